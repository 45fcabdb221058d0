# SPDX-License-Identifier: BSD-3-Clause
"""Draw figures from plain numbers and traces.

matplotlib is an optional dependency (`paceline[plot]`), imported when the first figure is drawn.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from paceline.core.events import Fate
from paceline.errors import SpecError
from paceline.trace.schema import Trace
from paceline.watch.curves import Target, curve
from paceline.watch.summary import summarize

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["check_ending", "draw_comparison", "draw_curves", "draw_plan", "save"]

COLOURS = [f"C{i}" for i in range(10)]  # matplotlib's default colours
ENDINGS = (".png", ".svg", ".pdf")
LATE_LABELS = {"cancel": "late work cancelled", "finish": "late work finished"}


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
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise SpecError(f"cannot write {path}: {error.strerror}") from None


def draw_plan(
    needed: list[int],
    step_s: dict[str, list[float]],
    seconds: list[float],
    intervals: list[tuple[float, float]],
    arrivals: ArrayLike | None,
    path: Path,
) -> None:
    """Draw update time against N, time to the target against b, and computation times."""
    figure = _new_figure(13, 4)
    left, middle, right = figure.subplots(1, 3)
    for (late, values), colour in zip(step_s.items(), COLOURS, strict=False):
        left.plot(needed, values, color=colour, label=LATE_LABELS.get(late, late))
    left.set(xlabel="N, gradients per update", ylabel="time per update (s)", ylim=(0, None))
    left.legend(frameon=False)
    backups = [needed[-1] - n for n in needed]
    low, high = np.array(intervals).T
    best = int(np.argmin(seconds))
    middle.fill_between(backups, low, high, alpha=0.25, label="95 % interval")
    middle.plot(backups, seconds)
    middle.plot(
        backups[best], seconds[best], "o", color=COLOURS[3], label=f"best: b = {backups[best]}"
    )
    middle.axhline(seconds[-1], color="0.6", linewidth=0.8, linestyle="--", label="sync")
    # Far from the best b the time grows without bound, so show only what is near it.
    middle.set(xlabel="b, backup workers", ylabel="time to the target (s)")
    middle.set_ylim(0, 2 * seconds[-1])
    middle.legend(frameon=False)
    if arrivals is None:
        right.set_axis_off()
    else:
        _draw_survival(right, np.asarray(arrivals), "computation", COLOURS[0])
        right.set(xlabel="computation time (s)", ylabel="share taking longer")
    save(figure, path)


def draw_comparison(traces: list[Trace], path: Path) -> None:
    """Draw arrival times, update times and the use of the workers' time, by policy."""
    figure = _new_figure(13, 4)
    left, middle, right = figure.subplots(1, 3)
    summaries = [summarize(trace) for trace in traces]
    for trace, summary, colour in zip(traces, summaries, COLOURS * 3, strict=False):
        answers = [g.t - g.asked_at for g in trace.gradients() if g.fate is not Fate.CANCELLED]
        steps = np.diff([0.0, *(u.t for u in trace.updates())])
        _draw_survival(left, np.array(answers), summary.policy, colour)
        _draw_survival(middle, steps, summary.policy, colour)
    left.set(xlabel="from request to arrival (s), finished work", ylabel="share taking longer")
    middle.set(xlabel="time per update (s)", ylabel="share taking longer")
    middle.legend(frameon=False, fontsize="small")
    rows = np.arange(len(summaries))
    busy = np.array([1 - s.idle_share for s in summaries])
    wasted = np.array([s.wasted_share for s in summaries])
    right.barh(rows, busy * (1 - wasted), color=COLOURS[2], label="useful")
    right.barh(rows, busy * wasted, left=busy * (1 - wasted), color=COLOURS[3], label="dropped")
    right.barh(rows, 1 - busy, left=busy, color="0.85", label="waiting")
    for i, summary in enumerate(summaries):
        note = f"{summary.updates_per_s:.3g} updates/s, staleness {summary.staleness_mean:.1f}"
        right.text(0.02, i, note, va="center", fontsize="small")
    right.set_yticks(rows, [s.policy for s in summaries])
    right.set(xlabel="share of the workers' time", xlim=(0, 1))
    right.invert_yaxis()
    right.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    save(figure, path)


def draw_curves(traces: list[Trace], name: str, target: Target | None, path: Path) -> None:
    """Draw a logged scalar against time and against samples, by policy."""
    figure = _new_figure(10, 4)
    left, right = figure.subplots(1, 2, sharey=True)
    for trace, colour in zip(traces, COLOURS * 3, strict=False):
        points = curve(trace, name)
        values = [point.value for point in points]
        policy = trace.header.policy
        left.plot([point.t for point in points], values, color=colour, label=policy)
        right.plot([point.samples for point in points], values, color=colour)
    for axes in (left, right):
        if target is not None:
            axes.axhline(target.value, color="0.6", linewidth=0.8, linestyle="--")
        axes.grid(alpha=0.3)
    left.set(xlabel="time (s)", ylabel=name)
    right.set(xlabel="samples in updates")
    left.legend(frameon=False)
    save(figure, path)


def _draw_survival(axes: "Axes", values: ArrayLike, label: str, colour: str) -> None:
    """Draw the share that takes longer, on logarithmic axes, which show the tail."""
    ordered = np.sort(np.asarray(values))
    share = 1 - np.arange(len(ordered)) / len(ordered)
    axes.step(ordered, share, color=colour, label=label, where="pre")
    axes.set_yscale("log")
    axes.set_xscale("log")
