# SPDX-License-Identifier: BSD-3-Clause
"""Experiments write tables, a figure and a paragraph, and can rebuild the last two."""

import pytest

from paceline.errors import SpecError
from paceline.lab.experiment import QUICK_NOTICE, Lab, rebuild_report, run_experiment
from paceline.lab.trial_pool import TrialPool
from toy_experiment import TOY


def lab_in(folder, *, quick=False):
    return Lab(
        data=folder,
        cache=folder,
        pool=TrialPool(folder / ".trials", 1),
        seeds=range(2),
        quick=quick,
        progress=lambda done, of, share: None,
    )


def test_experiment_writes_tables_figure_and_paragraph(tmp_path):
    paragraph = run_experiment(TOY, lab_in(tmp_path), tmp_path)
    folder = tmp_path / "toy"
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "figure.png",
        "final.csv",
    ]
    assert (folder / "final.csv").read_text().splitlines()[0] == "seed,rule,accuracy"
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert paragraph == "Expected: That it does.\n\nMeasured: 2 seeds, at most 0.9."
    page = (folder / "README.md").read_text()
    assert page == f"# toy\n\n**Does it work?**\n\n{paragraph}\n"


def test_quick_run_says_that_it_is_not_a_result(tmp_path):
    paragraph = run_experiment(TOY, lab_in(tmp_path, quick=True), tmp_path)
    assert paragraph.startswith(QUICK_NOTICE)
    assert paragraph in (tmp_path / "toy" / "README.md").read_text()
    assert rebuild_report(TOY, tmp_path, quick=True) == paragraph


def test_figure_and_paragraph_are_rebuilt_from_the_tables_alone(tmp_path):
    first = run_experiment(TOY, lab_in(tmp_path), tmp_path)
    figure = (tmp_path / "toy" / "figure.png").read_bytes()
    (tmp_path / "toy" / "figure.png").unlink()
    assert rebuild_report(TOY, tmp_path) == first
    assert (tmp_path / "toy" / "figure.png").read_bytes() == figure


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"seed,rule,accuracy\n",
        b"seed,rule,accuracy\n0,sync\n",
        b"seed,rule,accuracy\n0,sync,0.9,0.8\n",
        b"seed,rule,accuracy\n0,sync,0.9\n1,sync,much\n",
        b"seed,rule,precision\n0,sync,0.9\n",
        b"\x89PNG\xff\xfe",
    ],
)
def test_damaged_tables_raise_one_sentence_and_leave_the_report_alone(tmp_path, damage):
    run_experiment(TOY, lab_in(tmp_path), tmp_path)
    folder = tmp_path / "toy"
    (folder / "final.csv").write_bytes(damage)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(SpecError, match="measure again: paceline lab run toy"):
        rebuild_report(TOY, tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_missing_tables_error_names_the_command(tmp_path):
    with pytest.raises(SpecError, match="paceline lab run toy"):
        rebuild_report(TOY, tmp_path)
