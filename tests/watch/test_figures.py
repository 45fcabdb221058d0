# SPDX-License-Identifier: BSD-3-Clause
"""Figures say what they show, have the promised formats, and need matplotlib only when drawn."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from figure_checks import check_figure, panel
from paceline.core.policies import parse_policy
from paceline.errors import SpecError
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import Header, Joined, Resumed, Trace, Update
from paceline.watch.curves import Target
from paceline.watch.figure_style import rule_colour
from paceline.watch.figures import PlannedTimes, draw_comparison, draw_curves, draw_plan
from paceline.watch.summary import summarize

Drawer = Callable[[Path], Figure]

BEGINNINGS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}

POLICIES = [
    "sync",
    "backup:1",
    "batchsync:3",
    "deadline",
    "ssp:3",
    "delayed:1",
    "softsync:2",
    "async",
]


def planned(workers: int = 4, least: int = 0) -> PlannedTimes:
    needed = list(range(1, workers + 1 - least))
    seconds = [100.0 / n + n for n in needed]
    return PlannedTimes(
        workers=workers,
        needed=needed,
        step_s={"cancel": [0.1 * n for n in needed], "finish": [0.2 * n for n in needed]},
        seconds=seconds,
        intervals=[(s - 1, s + 1) for s in seconds],
        best=least,
        baseline=least,
    )


def draw_some_plan(path: Path) -> Figure:
    return draw_plan(planned(), None, path)


def run(policy: str, latency: str = "50ms + 10% exp:300ms") -> Trace:
    return simulate(policy, Cluster.parse(latency), RunSpec(workers=3, steps=15))


def draw_some_comparison(path: Path) -> Figure:
    return draw_comparison([run("sync"), run("backup:1")], path)


def logged_run(policy: str, values: list[float]) -> Trace:
    header = Header.of("run", parse_policy(policy), RunSpec(workers=2), {})
    updates = [Update(float(n), n, (0,), 1, scalars={"loss": x}) for n, x in enumerate(values, 1)]
    return Trace(header, [Joined(0.0, 0), Resumed(0.0), *updates])


def draw_some_curves(path: Path) -> Figure:
    noise = np.random.default_rng(1).normal(size=(2, 200)).tolist()
    traces = [logged_run("sync", noise[0]), logged_run("async", noise[1])]
    return draw_curves(traces, "loss", Target.parse("loss<=-2"), path)


DRAWERS: list[Drawer] = [draw_some_plan, draw_some_comparison, draw_some_curves]


@pytest.mark.parametrize("ending", BEGINNINGS)
@pytest.mark.parametrize("draw", DRAWERS)
def test_ending_of_the_path_chooses_the_format(draw: Drawer, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"figure.{ending}"
    draw(path)
    content = path.read_bytes()
    assert content.startswith(BEGINNINGS[ending])
    assert len(content) > 1000


@pytest.mark.parametrize("draw", DRAWERS)
def test_figure_is_labelled_and_nothing_covers_its_data(draw: Drawer, tmp_path: Path) -> None:
    check_figure(draw(tmp_path / "figure.png"))


@pytest.mark.parametrize("workers", [1, 2, 3, 40])
def test_plan_of_any_size_is_drawn(workers: int, tmp_path: Path) -> None:
    times = np.linspace(0.05, 1.0, 99)
    check_figure(draw_plan(planned(workers), times, tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_plan_marks_the_recommended_b_and_the_line_of_sync(tmp_path: Path) -> None:
    axes = panel(draw_some_plan(tmp_path / "plan.png"), "Time to the target with 4 workers")
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert lines["expected time with backup:b"].get_xdata().tolist() == [3, 2, 1, 0]
    assert lines["recommended: sync"].get_xdata() == [0]
    assert set(lines["time with sync"].get_ydata()) == {29.0}


def test_plan_of_a_recording_with_backups_counts_b_from_all_workers(tmp_path: Path) -> None:
    figure = draw_plan(planned(4, least=1), None, tmp_path / "plan.png")
    axes = panel(figure, "Time to the target")
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert lines["expected time with backup:b"].get_xdata().tolist() == [3, 2, 1]
    assert "time with backup:1" in lines


def test_plan_shows_the_case_that_every_gradient_counts(tmp_path: Path) -> None:
    times = replace(planned(), worst_seconds=[400.0, 200.0, 60.0, 29.0])
    figure = draw_plan(times, None, tmp_path / "plan.png")
    check_figure(figure)
    lines = {line.get_label(): line for line in panel(figure, "Time to the target").get_lines()}
    shown = lines["the same, if every gradient counts"]
    assert shown.get_xdata().tolist() == [3, 2, 1, 0]
    assert shown.get_ydata().tolist() == [400.0, 200.0, 60.0, 29.0]


def test_plan_without_intervals_is_drawn(tmp_path: Path) -> None:
    check_figure(draw_plan(replace(planned(), intervals=[]), None, tmp_path / "plan.png"))


def test_all_policies_are_drawn_even_with_equal_times(tmp_path: Path) -> None:
    traces = [run(policy, "50ms") for policy in POLICIES]
    check_figure(draw_comparison(traces, tmp_path / "rules.png"))
    assert (tmp_path / "rules.png").stat().st_size > 1000


def test_update_times_without_any_delay_are_drawn(tmp_path: Path) -> None:
    check_figure(draw_comparison([run("sync", "0s"), run("async", "0s")], tmp_path / "rules.png"))


def test_times_far_below_the_longest_are_cut_off(tmp_path: Path) -> None:
    figure = draw_comparison([run("sync"), run("async", "50ms + exp:1us")], tmp_path / "rules.png")
    shortest, longest = panel(figure, "How long an update takes").get_xlim()
    assert 1000 < longest / shortest < 2000


def test_comparison_begins_with_useful_dropped_and_waiting_time(tmp_path: Path) -> None:
    traces = [run("sync"), run("backup:1")]
    figure = draw_comparison(traces, tmp_path / "rules.png")
    first, *rest = figure.axes
    assert [label.get_text() for label in first.get_yticklabels()] == ["sync", "backup:1"]
    assert [axes.get_title(loc="left") for axes in rest] == [
        "How long a gradient takes",
        "How long an update takes",
    ]
    for row, trace in enumerate(traces):
        bars = [bar for bar in first.patches if bar.get_y() == row - 0.4]
        useful, dropped, waiting = (bar.get_width() for bar in bars)
        summary = summarize(trace)
        assert useful + dropped + waiting == pytest.approx(1)
        assert waiting == pytest.approx(summary.idle_share)
        assert dropped == pytest.approx((1 - summary.idle_share) * summary.wasted_share)
        assert to_hex(bars[0].get_facecolor()) == rule_colour(trace.header.policy)


def test_noisy_values_are_smoothed_and_the_label_says_so(tmp_path: Path) -> None:
    figure = draw_some_curves(tmp_path / "loss.png")
    left, right = figure.axes
    assert "running mean over 4 % of a run" in left.get_ylabel()
    for axes in (left, right):
        raw, smooth = axes.get_lines()[:2]
        assert raw.get_alpha() < 0.5
        assert raw.get_color() == smooth.get_color() == rule_colour("sync")
        assert np.std(smooth.get_ydata()) < 0.6 * np.std(raw.get_ydata())
    assert [text.get_text() for text in right.texts] == ["target:\n<= -2"]


def test_few_values_are_drawn_as_they_are(tmp_path: Path) -> None:
    figure = draw_curves([logged_run("sync", [3.0, 1.0, 2.0])], "loss", None, tmp_path / "loss.png")
    left, _ = figure.axes
    assert left.get_ylabel() == "loss"
    (line,) = left.get_lines()
    assert line.get_ydata().tolist() == [3.0, 1.0, 2.0]


def test_more_runs_than_colours_are_drawn(tmp_path: Path) -> None:
    rules = [f"softsync:{c}" for c in range(1, 13)]
    draw_comparison([run(policy) for policy in rules], tmp_path / "many.png")
    assert (tmp_path / "many.png").stat().st_size > 1000


@pytest.mark.parametrize("name", ["figure.txt", ".png"])
@pytest.mark.parametrize("draw", DRAWERS)
def test_unknown_ending_is_refused(draw: Drawer, name: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"\.png.*\.svg.*\.pdf.*" + re.escape(repr(name))):
        draw(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("draw", "place"),
    [
        (draw_some_comparison, "nowhere/figure.png"),
        (draw_some_plan, "nowhere/figure.png"),
        (draw_some_plan, "file/figure.png"),
        (draw_some_plan, "directory.png"),
    ],
)
def test_unwritable_path_is_refused(draw: Drawer, place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory.png").mkdir()
    with pytest.raises(SpecError, match=re.escape(f"cannot write {tmp_path / place}: ")):
        draw(tmp_path / place)


def test_missing_matplotlib_names_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # makes the import fail
    with pytest.raises(SpecError, match=re.escape("pip install 'paceline[plot]'")):
        draw_some_plan(tmp_path / "plan.png")


def test_matplotlib_is_not_imported_before_a_figure_is_drawn() -> None:
    program = "import sys, paceline.watch.figures; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
