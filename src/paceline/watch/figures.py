# SPDX-License-Identifier: BSD-3-Clause
"""Draw figures from plain numbers and traces, write them to files, and return them.

matplotlib is an optional dependency (`paceline[plot]`), imported when the first figure is drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from paceline.core.events import Fate
from paceline.errors import SpecError
from paceline.trace.schema import Trace
from paceline.watch.curves import Point, Target, curve, smoothed
from paceline.watch.figure_style import (
    DPI,
    GREY,
    WIDTH,
    describe_axes,
    describe_bars,
    draw_stacked_bars,
    label_target,
    legend_below,
    line_style,
    plain_log,
    rule_colour,
    split_figure,
    tint,
    whole_numbers,
)
from paceline.watch.segments import start_time, step_times
from paceline.watch.summary import Summary, summarize
from paceline.watch.words import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

__all__ = ["PlannedTimes", "check_ending", "draw_comparison", "draw_curves", "draw_plan", "save"]

ENDINGS = (".png", ".svg", ".pdf")
LATE_LABELS = {"cancel": "late work is cancelled", "finish": "late work is finished, then dropped"}
MARKED = 40  # a curve of at most this many points shows each of them
SMOOTHED = 0.04  # of a run; a curve of fewer than 1 / SMOOTHED values is not smoothed
WIDE = 5.0  # times that differ by more than this factor need a logarithmic axis
WIDEST = 1000.0  # show times within this factor of the longest one
BACKUP = rule_colour("backup")


@dataclass(frozen=True)
class PlannedTimes:
    """What `paceline plan` found, for each N."""

    workers: int
    needed: Sequence[int]
    """The values of N, in ascending order."""
    step_s: dict[str, list[float]]
    """The time per update for each N, if late work is cancelled and if it is finished."""
    seconds: Sequence[float]
    """The time to the target."""
    intervals: Sequence[tuple[float, float]]
    """The 95 % intervals of `seconds`; empty if there are none."""
    best: int
    """The recommended b."""
    baseline: int = 0
    """The b that it is compared with."""
    worst_seconds: Sequence[float] = ()
    """The time to the target if every gradient counts the same; empty if that is not in doubt."""

    @property
    def backups(self) -> list[int]:
        """The b of each N."""
        return [self.workers - n for n in self.needed]


def check_ending(path: Path | None) -> None:
    """Raise SpecError unless the ending of the path is a known figure format."""
    if path is not None and path.suffix.lower() not in ENDINGS:
        raise SpecError(f"a figure must end in .png, .svg or .pdf, got {path.name!r}")


def _new_figure(width: float, height: float) -> "Figure":
    try:
        module = import_module("matplotlib.figure")
    except ImportError:
        raise SpecError(
            "figures need matplotlib; install it with: pip install 'paceline[plot]'"
        ) from None
    figure: Figure = module.Figure(figsize=(width, height), layout="constrained")
    return figure


def save(figure: "Figure", path: Path) -> None:
    """Write the figure in the format that the ending of the path names."""
    check_ending(path)
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise SpecError(f"cannot write {path}: {error.strerror}") from None


def draw_plan(plan: PlannedTimes, arrivals: ArrayLike | None, path: Path) -> "Figure":
    """Draw the time to the target for each b, and below it what it follows from."""
    figure = _new_figure(WIDTH, 7)
    top, bottom = split_figure(figure, 2, 1, height_ratios=(4, 3))
    _draw_target_times(top, plan)
    if arrivals is None:
        _draw_step_times(bottom, plan)
    else:
        left, right = split_figure(bottom, 1, 2)
        _draw_step_times(left, plan)
        axes = right.subplots()
        _draw_survival(axes, np.asarray(arrivals), color=GREY)
        _describe_survival(
            axes, "How long a gradient takes", "computation time (s)", "share taking longer"
        )
    save(figure, path)
    return figure


def _draw_target_times(figure: "FigureBase", plan: PlannedTimes) -> None:
    axes, backups = figure.subplots(), plan.backups
    if plan.intervals:
        low, high = np.array(plan.intervals).T
        label = "95 % interval, of the time per update only"
        band: dict[str, Any] = {"color": tint(BACKUP), "linewidth": 0, "label": label}
        axes.fill_between(backups, low, high, **band)
    axes.plot(backups, plan.seconds, label="expected time with backup:b", **_dots(plan))
    if plan.worst_seconds:
        label = "the same, if every gradient counts"
        axes.plot(backups, plan.worst_seconds, ":", color=BACKUP, label=label)
    rule = _rule(plan.baseline)
    compared = plan.seconds[backups.index(plan.baseline)]
    line: dict[str, Any] = {"color": rule_colour(rule), "linewidth": 1, "linestyle": "--"}
    axes.axhline(compared, label=f"time with {rule}", **line)
    best, rule = plan.seconds[backups.index(plan.best)], _rule(plan.best)
    star: dict[str, Any] = {
        "marker": "*",
        "markersize": 15,
        "markeredgecolor": "black",
        "linestyle": "",
    }
    axes.plot(plan.best, best, color=rule_colour(rule), label=f"recommended: {rule}", **star)
    describe_axes(
        axes,
        f"Time to the target with {plural(plan.workers, 'worker')}",
        "b, backup workers: an update doesn't wait for the b slowest",
        "time to the target (s)",
    )
    # Far from the best b the time grows without bound, so show only what is near it.
    highest = max([*plan.seconds, *plan.worst_seconds, *(high for _, high in plan.intervals)])
    axes.set_ylim(0, min(2 * compared, 1.1 * highest))
    whole_numbers(axes.xaxis)
    legend_below(figure, axes, columns=3)


def _draw_step_times(figure: "FigureBase", plan: PlannedTimes) -> None:
    axes = figure.subplots()
    for (late, values), style in zip(plan.step_s.items(), ("-", "--"), strict=False):
        label = LATE_LABELS.get(late, late)
        axes.plot(plan.needed, values, linestyle=style, label=label, **_dots(plan))
    describe_axes(
        axes,
        "How long an update takes",
        "N, gradients an update waits for",
        "mean time per update (s)",
    )
    axes.set_ylim(0, None)
    whole_numbers(axes.xaxis)
    legend_below(figure, axes, columns=1)


def _rule(backups: int) -> str:
    return f"backup:{backups}" if backups else "sync"


def _dots(plan: PlannedTimes) -> dict[str, Any]:
    """Return the look of a line with a value for each N, with dots unless there are too many."""
    marker = "o" if len(plan.needed) <= MARKED else ""
    return {"color": BACKUP, "marker": marker, "markersize": 4}


def draw_comparison(traces: list[Trace], path: Path) -> "Figure":
    """Draw how each rule used the workers' time, then how long gradients and updates took."""
    summaries = [summarize(trace) for trace in traces]
    bars_height = 1.3 + 0.32 * len(traces)
    figure = _new_figure(WIDTH, bars_height + 3.4 + 0.2 * (len(traces) // 5))
    top, bottom = split_figure(figure, 2, 1, height_ratios=(bars_height, 3.4))
    _draw_use_of_time(top, summaries)
    left, right = bottom.subplots(1, 2, sharey=True)
    for trace, summary in zip(traces, summaries, strict=True):
        answers = [g.t - g.asked_at for g in trace.gradients() if g.fate is not Fate.CANCELLED]
        steps = [step.lasted_s for step in step_times(trace, start_time(trace))]
        style = line_style(summary.policy)
        _draw_survival(left, np.array(answers), label=summary.policy, **style)
        _draw_survival(right, np.array(steps), label=summary.policy, **style)
    _describe_survival(
        left, "How long a gradient takes", "from request to arrival (s)", "share taking longer"
    )
    _describe_survival(right, "How long an update takes", "since the last update (s)", "")
    legend_below(bottom, left, columns=5)
    save(figure, path)
    return figure


def _draw_use_of_time(figure: "FigureBase", summaries: list[Summary]) -> None:
    """Draw a bar per rule: useful work in its colour, dropped work hatched, waiting grey."""
    axes = figure.subplots()
    busy = np.array([1 - summary.idle_share for summary in summaries])
    wasted = np.array([summary.wasted_share for summary in summaries])
    parts = {
        "useful: part of an update": (busy * (1 - wasted)).tolist(),
        "dropped or cancelled": (busy * wasted).tolist(),
        "waiting": (1 - busy).tolist(),
    }
    draw_stacked_bars(axes, [summary.policy for summary in summaries], parts)
    for row, summary in enumerate(summaries):
        rate = "?" if summary.updates_per_s is None else f"{summary.updates_per_s:.3g}"
        note = f"{rate} updates/s, staleness {summary.staleness_mean:.2g}"
        axes.text(1.01, row, note, va="center", fontsize="small", color=GREY)
    describe_bars(axes, "What the workers did with their time", "share of the workers' time (%)")
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}")
    axes.set_xlim(0, 1)
    legend_below(figure, axes)


def draw_curves(traces: list[Trace], name: str, target: Target | None, path: Path) -> "Figure":
    """Draw a logged scalar against time and against samples, by policy."""
    figure = _new_figure(WIDTH, 4.4)
    left, right = figure.subplots(1, 2, sharey=True)
    is_smoothed = False
    for trace in traces:
        points = curve(trace, name)
        smooth = smoothed(points, SMOOTHED)
        style = line_style(trace.header.policy)
        if smooth != points:
            is_smoothed = True
            _draw_points(left, right, points, color=style["color"], alpha=0.25, linewidth=0.8)
        _draw_points(left, right, smooth, label=trace.header.policy, **style)
    what = (
        f"{name}\n(thick: running mean over {100 * SMOOTHED:g} % of a run)" if is_smoothed else name
    )
    describe_axes(left, f"{name} against time", "time since the start of training (s)", what)
    describe_axes(right, f"{name} against data", "training samples used so far")
    right.xaxis.set_major_formatter("{x:,.0f}")
    if target is not None:
        label_target(left, target.value)
        label_target(right, target.value, f"target:\n{target.sign} {target.value:g}")
    legend_below(figure, left, columns=5)
    save(figure, path)
    return figure


def _draw_points(left: "Axes", right: "Axes", points: list[Point], **style: Any) -> None:
    values = [point.value for point in points]
    left.plot([point.t for point in points], values, **style)
    right.plot([point.samples for point in points], values, **style)


def _draw_survival(axes: "Axes", values: ArrayLike, **style: Any) -> None:
    """Draw the share that takes longer than each time."""
    ordered = np.sort(np.asarray(values))
    share = 1 - np.arange(len(ordered)) / len(ordered)
    axes.step(ordered, share, where="pre", **style)


def _describe_survival(axes: "Axes", title: str, xlabel: str, ylabel: str) -> None:
    """Label a panel of survival curves, on logarithmic axes, which show the tail."""
    describe_axes(axes, title, xlabel, ylabel)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    times = np.concatenate([line.get_xdata() for line in axes.get_lines()])
    shortest, longest = times.min(initial=np.inf), times.max(initial=0.0)
    if longest > WIDE * shortest:
        if longest > WIDEST * shortest:  # two updates of `async` can follow each other at once
            axes.set_xlim(longest / WIDEST, 1.5 * longest)
        plain_log(axes, "x")
