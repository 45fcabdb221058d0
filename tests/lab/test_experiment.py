# SPDX-License-Identifier: BSD-3-Clause
"""Experiments: tables, a figure and a paragraph; and the verbs of the lab."""

import sys

import pytest
from matplotlib.figure import Figure

from paceline.cli import lab as verbs
from paceline.cli import main
from paceline.errors import SpecError
from paceline.lab.bench import Bench
from paceline.lab.experiment import Experiment, Lab, make_again, run_experiment
from paceline.lab.experiments import EXPERIMENTS
from paceline.lab.recipe import Recipe
from paceline.lab.trial import Trial
from toys import Clouds


def measure(lab):
    trials = [
        Trial(Clouds(seed=seed), Recipe(0.1), "sync", 2, "10ms", epochs=0.2, rows=2)
        for seed in lab.seeds
    ]
    outcomes = lab.outcomes(trials)
    rows = [
        {"seed": seed, "rule": "sync", "accuracy": outcome.last("accuracy")}
        for seed, outcome in zip(lab.seeds, outcomes, strict=True)
    ]
    return {"final": rows}


def draw(tables):
    figure = Figure()
    figure.subplots().plot([row["seed"] for row in tables["final"]])
    return figure


def tell(tables):
    return f"{len(tables['final'])} seeds, at most {max(r['accuracy'] for r in tables['final'])}."


TOY = Experiment("toy", "Does it work?", "That it does.", measure, draw, tell)


def lab_in(folder, *, quick=False):
    return Lab(
        data=folder,
        cache=folder,
        bench=Bench(folder / ".trials", 1),
        seeds=range(2),
        quick=quick,
        progress=lambda done, of, share: None,
    )


def test_an_experiment_leaves_tables_a_figure_and_a_paragraph(tmp_path):
    paragraph = run_experiment(TOY, lab_in(tmp_path), tmp_path)
    folder = tmp_path / "toy"
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "figure.png",
        "final.csv",
    ]
    assert (folder / "final.csv").read_text().splitlines()[0] == "seed,rule,accuracy"
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "Does it work?" in paragraph
    assert "That it does." in paragraph
    assert "2 seeds" in paragraph
    assert paragraph in (folder / "README.md").read_text()


def test_figure_and_paragraph_are_made_again_from_the_tables_alone(tmp_path):
    first = run_experiment(TOY, lab_in(tmp_path), tmp_path)
    figure = (tmp_path / "toy" / "figure.png").read_bytes()
    (tmp_path / "toy" / "figure.png").unlink()
    assert make_again(TOY, tmp_path) == first
    assert (tmp_path / "toy" / "figure.png").read_bytes() == figure


def test_without_tables_it_says_how_to_get_them(tmp_path):
    with pytest.raises(SpecError, match="paceline lab run toy"):
        make_again(TOY, tmp_path)


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Call the command line where the only experiment is a toy."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verbs, "EXPERIMENTS", {"toy": TOY})

    def call_it(*words):
        monkeypatch.setattr(sys, "argv", ["paceline", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return call_it


def test_the_lab_lists_its_experiments(call):
    code, out, _ = call("lab", "list")
    assert code == 0
    assert "toy" in out
    assert "Does it work?" in out


def test_the_lab_runs_experiments_and_says_where_their_tables_are(call, tmp_path):
    code, out, _ = call("lab", "run", "--quick", "--jobs", "1", "--out", "there")
    assert code == 0
    assert "toy (1 of 1): Does it work?" in out
    assert "1 seeds" in out
    assert "Tables and figure are in there/quick/toy" in out
    code, out, _ = call("lab", "figures", "--out", "there/quick")
    assert (code, out.strip()) == (0, "there/quick/toy/figure.png")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("run", "nothing"), "there is no experiment 'nothing'; there are toy"),
        (("figures",), "there are no tables in lab-out"),
        (("figures", "toy"), "there are no tables in lab-out/toy"),
    ],
)
def test_what_cannot_be_is_one_sentence(call, words, reason):
    code, _, err = call("lab", *words)
    assert code == 2
    assert reason in err


def test_every_experiment_says_what_it_asks_and_what_is_expected():
    for name, experiment in EXPERIMENTS.items():
        assert name == experiment.name
        assert experiment.question.endswith("?")
        assert len(experiment.expected) > 40


def test_the_time_left_is_that_of_the_trials_under_way(monkeypatch, capsys):
    """Two rounds of as many trials: the second begins anew, though their number is the same."""
    now = [0.0]
    monkeypatch.setattr(verbs, "monotonic", lambda: now[0])
    with verbs._Shown("toy") as shown:
        for at, share in ((0, 0.0), (3600, 0.9), (3610, 0.0), (3670, 0.25)):
            now[0] = at
            shown(0, 4, share)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["toy: 0 of 4 trials, 90%; 7 min left", "toy: 0 of 4 trials, 25%; 3 min left"]
