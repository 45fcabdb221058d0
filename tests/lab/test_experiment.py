# SPDX-License-Identifier: BSD-3-Clause
"""Experiments: tables, a figure and a paragraph; and the verbs of the lab."""

import hashlib
import sys
from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from paceline.cli import lab as verbs
from paceline.cli import main
from paceline.errors import SpecError
from paceline.lab.bench import Bench
from paceline.lab.data.files import Source
from paceline.lab.experiment import QUICK, Experiment, Lab, make_again, run_experiment
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
    assert paragraph == "Expected: That it does.\n\nSeen: 2 seeds, at most 0.9."
    page = (folder / "README.md").read_text()
    assert page == f"# toy\n\n**Does it work?**\n\n{paragraph}\n"


def test_a_quick_look_says_that_it_is_no_result(tmp_path):
    paragraph = run_experiment(TOY, lab_in(tmp_path, quick=True), tmp_path)
    assert paragraph.startswith(QUICK)
    assert paragraph in (tmp_path / "toy" / "README.md").read_text()
    assert make_again(TOY, tmp_path, quick=True) == paragraph


def test_figure_and_paragraph_are_made_again_from_the_tables_alone(tmp_path):
    first = run_experiment(TOY, lab_in(tmp_path), tmp_path)
    figure = (tmp_path / "toy" / "figure.png").read_bytes()
    (tmp_path / "toy" / "figure.png").unlink()
    assert make_again(TOY, tmp_path) == first
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
def test_damaged_tables_are_one_sentence_and_what_was_made_of_them_before_stays(tmp_path, damage):
    run_experiment(TOY, lab_in(tmp_path), tmp_path)
    folder = tmp_path / "toy"
    (folder / "final.csv").write_bytes(damage)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(SpecError, match="measure again: paceline lab run toy"):
        make_again(TOY, tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


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
    assert QUICK.split()[:4] == out.splitlines()[1].split()[:4]
    assert "Seen: 1 seeds" in out
    assert "Tables and figure: there/quick/toy" in out
    code, out, _ = call("lab", "figures", "--quick", "--out", "there")
    assert (code, out.strip()) == (0, "there/quick/toy/figure.png")


def test_a_quick_look_may_have_more_seeds(call):
    _, out, _ = call("lab", "run", "--quick", "--seeds", "4", "--jobs", "1")
    assert "Seen: 4 seeds" in out


def test_an_experiment_that_is_named_twice_is_run_once(call):
    _, out, _ = call("lab", "run", "toy", "toy", "--quick", "--jobs", "1")
    assert "toy (1 of 1)" in out


def test_an_empty_folder_is_no_reason_to_draw_nothing(call, tmp_path, monkeypatch):
    other = replace(TOY, name="other")
    monkeypatch.setattr(verbs, "EXPERIMENTS", {"other": other, "toy": TOY})
    call("lab", "run", "toy", "--jobs", "1")
    (tmp_path / "lab-out" / "other").mkdir()
    assert call("lab", "figures")[:2] == (0, "lab-out/toy/figure.png\n")


@pytest.fixture
def offered(tmp_path):
    """A file of a data set, and what it needs to be had."""
    (tmp_path / "offered").write_bytes(b"digits")
    url = (tmp_path / "offered").as_uri()
    return Source("toy/digits", url, hashlib.sha256(b"digits").hexdigest())


def test_data_is_fetched_before_anything_is_measured(call, tmp_path, monkeypatch, offered):
    def looking(lab):
        assert (lab.data / "toy" / "digits").read_bytes() == b"digits"
        return measure(lab)

    needy = replace(TOY, measure=looking, needs=(offered,))
    monkeypatch.setattr(verbs, "EXPERIMENTS", {"toy": needy})
    words = ("lab", "run", "--quick", "--jobs", "1", "--data", str(tmp_path / "data"))
    code, _, err = call(*words)
    assert (code, err.splitlines()) == (0, [f"downloading {offered.url}"])
    assert call(*words)[2] == ""


def test_where_data_cannot_be_had_nothing_is_measured(call, tmp_path, monkeypatch, offered):
    def never(lab):
        raise AssertionError("it was measured")

    (tmp_path / "offered").unlink()
    needy = replace(TOY, name="needy", needs=(offered,))
    first = replace(TOY, measure=never)
    monkeypatch.setattr(verbs, "EXPERIMENTS", {"toy": first, "needy": needy})
    code, _, err = call("lab", "run", "--data", "data")
    assert code == 2
    assert "toy/digits is not in data" in err


def test_who_stops_it_is_told_how_it_goes_on(call, monkeypatch):
    def stop(lab):
        raise KeyboardInterrupt

    monkeypatch.setattr(verbs, "EXPERIMENTS", {"toy": replace(TOY, measure=stop)})
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
    with verbs._TrialProgress("toy") as shown:
        for at, share in ((0, 0.0), (3600, 0.9), (3610, 0.0), (3670, 0.25)):
            now[0] = at
            shown(0, 4, share)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "toy: 0 of 4 trials, 90%; about 7 min left",
        "toy: 0 of 4 trials, 25%; about 3 min left",
    ]


def test_what_is_remembered_of_an_interrupted_trial_took_no_time(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(verbs, "monotonic", lambda: now[0])
    with verbs._TrialProgress("toy") as shown:
        for at, share in ((0, 0.5), (60, 0.6)):
            now[0] = at
            shown(0, 4, share)
    assert capsys.readouterr().err == "toy: 0 of 4 trials, 60%; about 4 min left\n"
