# SPDX-License-Identifier: BSD-3-Clause
"""`paceline lab`: list, run, figures, their output and their errors."""

import hashlib
import sys
from dataclasses import replace

import pytest

from paceline.cli import lab as verbs
from paceline.cli import main
from paceline.lab.data.download import Source
from paceline.lab.experiment import QUICK_NOTICE
from toy_experiment import TOY, measure


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Run the command line with a toy as the only experiment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verbs, "EXPERIMENTS", {"toy": TOY})

    def call_it(*words):
        monkeypatch.setattr(sys, "argv", ["paceline", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return call_it


def test_list_shows_the_experiments(call):
    code, out, _ = call("lab", "list")
    assert code == 0
    assert "toy" in out
    assert "Does it work?" in out


def test_run_says_where_the_tables_are(call, tmp_path):
    code, out, _ = call("lab", "run", "--quick", "--jobs", "1", "--out", "there")
    assert code == 0
    assert "toy (1 of 1): Does it work?" in out
    assert QUICK_NOTICE.split()[:4] == out.splitlines()[1].split()[:4]
    assert "Measured: 1 seeds" in out
    assert "Tables and figure: there/quick/toy" in out
    code, out, _ = call("lab", "figures", "--quick", "--out", "there")
    assert (code, out.strip()) == (0, "there/quick/toy/figure.png")


def test_quick_run_accepts_more_seeds(call):
    _, out, _ = call("lab", "run", "--quick", "--seeds", "4", "--jobs", "1")
    assert "Measured: 4 seeds" in out


def test_experiment_named_twice_runs_once(call):
    _, out, _ = call("lab", "run", "toy", "toy", "--quick", "--jobs", "1")
    assert "toy (1 of 1)" in out


def test_figures_skips_experiments_without_tables(call, tmp_path, monkeypatch):
    other = replace(TOY, name="other")
    monkeypatch.setattr(verbs, "EXPERIMENTS", {"other": other, "toy": TOY})
    call("lab", "run", "toy", "--jobs", "1")
    (tmp_path / "lab-out" / "other").mkdir()
    assert call("lab", "figures")[:2] == (0, "lab-out/toy/figure.png\n")


@pytest.fixture
def offered(tmp_path):
    """A data file that can be downloaded."""
    (tmp_path / "offered").write_bytes(b"digits")
    url = (tmp_path / "offered").as_uri()
    return Source("toy/digits", url, hashlib.sha256(b"digits").hexdigest())


def test_data_is_downloaded_before_anything_is_measured(call, tmp_path, monkeypatch, offered):
    def check_data(lab):
        assert (lab.data / "toy" / "digits").read_bytes() == b"digits"
        return measure(lab)

    needy = replace(TOY, measure=check_data, needs=(offered,))
    monkeypatch.setattr(verbs, "EXPERIMENTS", {"toy": needy})
    words = ("lab", "run", "--quick", "--jobs", "1", "--data", str(tmp_path / "data"))
    code, _, err = call(*words)
    assert (code, err.splitlines()) == (0, [f"downloading {offered.url}"])
    assert call(*words)[2] == ""


def test_failed_download_ends_the_command_before_measuring(call, tmp_path, monkeypatch, offered):
    def never(lab):
        raise AssertionError("measured without the data")

    (tmp_path / "offered").unlink()
    needy = replace(TOY, name="needy", needs=(offered,))
    first = replace(TOY, measure=never)
    monkeypatch.setattr(verbs, "EXPERIMENTS", {"toy": first, "needy": needy})
    code, _, err = call("lab", "run", "--data", "data")
    assert code == 2
    assert "toy/digits is not in data" in err


def test_ctrl_c_says_how_to_continue(call, monkeypatch):
    def interrupt(lab):
        raise KeyboardInterrupt

    monkeypatch.setattr(verbs, "EXPERIMENTS", {"toy": replace(TOY, measure=interrupt)})
    code, _, err = call("lab", "run")
    assert code == 130
    assert err.splitlines()[0] == "stopped; run the same command again to continue"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("run", "nothing"), "unknown experiment 'nothing'; choose from toy"),
        (("figures",), "there are no tables in lab-out; create them with: paceline lab run\n"),
        (("figures", "--quick"), "in lab-out/quick; create them with: paceline lab run --quick\n"),
        (("run", "--out", "/dev/null"), "cannot write to /dev/null: File exists"),
        (("run", "--out", "/dev/null/x"), "cannot write to /dev/null/x: Not a directory"),
        (("figures", "toy"), "there are no tables in lab-out/toy"),
    ],
)
def test_invalid_input_is_one_sentence(call, words, reason):
    code, _, err = call("lab", *words)
    assert code == 2
    assert reason in err


def test_time_left_is_that_of_the_current_trials(monkeypatch, capsys):
    """The estimate starts again with a second round, even if it has as many trials."""
    now = [0.0]
    monkeypatch.setattr(verbs, "monotonic", lambda: now[0])
    with verbs._TrialProgress("toy") as shown:
        for at, share in ((0, 0.0), (3600, 0.9), (3610, 0.0), (3670, 0.25)):
            now[0] = at
            shown(0, 4, share)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "toy: 0 of 4 trials, 90%; about 7 min left",
        "toy: 0 of 4 trials, 25%; about 3 min left",
    ]


def test_time_left_ignores_stored_progress(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(verbs, "monotonic", lambda: now[0])
    with verbs._TrialProgress("toy") as shown:
        for at, share in ((0, 0.5), (60, 0.6)):
            now[0] = at
            shown(0, 4, share)
    assert capsys.readouterr().err == "toy: 0 of 4 trials, 60%; about 4 min left\n"
