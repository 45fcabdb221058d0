# SPDX-License-Identifier: BSD-3-Clause
"""Figure and paragraph of the experiment `choose-b`."""

from collections.abc import Iterator
from math import inf, nan
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.lab.experiment import Rows, Tables
from paceline.lab.experiments.tables import column, finite, mean_and_sd
from paceline.lab.plotting import new_figure
from paceline.lab.updates_formula import UpdatesToTarget
from paceline.watch.figure_style import (
    GREY,
    SERIES,
    WIDTH,
    describe_axes,
    legend_below,
    plain_log,
    rule_colour,
    split_figure,
    whole_numbers,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

__all__ = ["describe", "draw"]

SHOWN = 30  # the largest b in the figure, unless the planner chooses more
WORDS = {"cancel": "cancelled", "finish": "finished"}
LOOKS = (("-", SERIES[2]), ("--", SERIES[4]))


def draw(tables: Tables) -> "Figure":
    """Draw the time to the target against b, and its two factors: updates and time per update."""
    figure = new_figure(WIDTH, 9)
    top, bottom = split_figure(figure, 2, 1, height_ratios=(5, 4))
    left, right = split_figure(bottom, 1, 2)
    most = max([SHOWN, *column(tables["choices"], "backups")])
    few = [row for row in tables["predicted"] if float(row["backups"]) <= most]
    times, steps = top.subplots(), right.subplots()
    for (late, label), (style, colour) in zip(WORDS.items(), LOOKS, strict=True):
        backups = column(few, "backups")
        name = f"late work is {label}"
        steps.plot(backups, column(few, f"{late}_step_s"), style, color=colour, label=name)
        name = f"predicted, {name}"
        times.plot(backups, column(few, f"{late}_s"), style, color=colour, label=name)
    title = "Time per update, simulated"
    describe_axes(steps, title, "b, backup workers", "mean time per update (s)")
    whole_numbers(steps.xaxis)
    legend_below(right, steps, columns=1)
    _draw_direct(times, tables)
    legend_below(top, times, columns=2)
    _draw_counts(left, tables)
    return figure


def _draw_counts(figure: "FigureBase", tables: Tables) -> None:
    axes = figure.subplots()
    rows, fit = tables["updates"], _fit(tables)
    workers = float(tables["law"][0]["workers"])
    every = np.geomspace(min(column(rows, "needed")), workers, 50)
    needed, updates = column(rows, "needed"), column(rows, "updates")
    axes.plot(needed, updates, "o", color=SERIES[2], markersize=3, label="counted, one seed")
    label = f"fitted: {_formula(fit)}"
    axes.plot(every, fit.updates(every), color=SERIES[2], label=label)
    inverse = fit.updates(every)[-1] * workers / every
    axes.plot(every, inverse, "--", color=GREY, linewidth=1, label="if every gradient counted")
    title = f"Updates to {100 * float(tables['law'][0]['target']):g} % accuracy"
    describe_axes(axes, title, "N, gradients per update", "updates")
    plain_log(axes, "x")
    plain_log(axes, "y")
    legend_below(figure, axes, columns=1)


def _draw_direct(axes: "Axes", tables: Tables) -> None:
    direct, predicted = tables["direct"], tables["predicted"]
    tried = sorted(set(column(direct, "backups")))
    seconds = [column(direct, "seconds", backups=b) for b in tried]
    means = [fmean(finite(own) or [nan]) for own in seconds]
    errors = [np.std(own, ddof=1) / len(own) ** 0.5 if len(own) > 1 else 0.0 for own in seconds]
    axes.errorbar(
        tried,
        means,
        errors,
        fmt="ks",
        ms=4,
        capsize=3,
        label="trained, late work is cancelled (bars: standard error)",
    )
    styles = {
        "every gradient counts": "v",
        "noise scale": "^",
        "noise scale or more": "o",
        "measured table": "D",
    }
    for name, style in styles.items():
        own = [row for row in tables["choices"] if row["model"] == name]
        times = [column(predicted, f"{row['late']}_s", backups=row["backups"])[0] for row in own]
        look: dict[str, Any] = {
            "markersize": 9,
            "markerfacecolor": "none",
            "color": rule_colour("backup"),
        }
        axes.plot(column(own, "backups"), times, style, **look, label=f"chosen by plan: {name}")
    title = f"Time to {100 * float(tables['law'][0]['target']):g} % accuracy"
    describe_axes(axes, title, "b, backup workers", "virtual time (s)")
    whole_numbers(axes.xaxis)


def _fit(tables: Tables) -> UpdatesToTarget:
    [row] = tables["law"]
    return UpdatesToTarget(float(row["floor"]), float(row["scale"]))


def _formula(fit: UpdatesToTarget) -> str:
    return f"{fit.floor:.0f} + {fit.floor * fit.scale:.0f} / N"


def describe(tables: Tables) -> str:
    """Summarize the tables in words."""
    return "\n\n".join([*_describe_times(tables), _describe_choices(tables["choices"])])


def _describe_times(tables: Tables) -> Iterator[str]:
    fit, updates, direct = _fit(tables), tables["updates"], tables["direct"]
    trainings = len(_seeds(updates))
    times = "training" if trainings == 1 else "trainings"
    counts = "; ".join(
        f"N = {n:g}: {mean_and_sd(column(updates, 'updates', needed=n), 0)}"
        for n in sorted(set(column(updates, "needed")))
    )
    [row] = tables["law"]
    target = 100 * float(row["target"])
    yield (
        f"Updates to {target:g} % accuracy, {trainings} {times} each: {counts}. With a rate "
        f"proportional to N, this is about {_formula(fit)}, which corresponds to a noise scale of "
        f"{float(row['scale_samples']):.0f} samples."
    )
    yield " ".join(_describe_product(tables["predicted"]))
    tried = sorted(set(column(direct, "backups")))
    trained = "; ".join(
        f"b = {b:g}: {mean_and_sd(column(direct, 'seconds', backups=b), 0)} s" for b in tried
    )
    ratios = "; ".join(f"b = {b:g}: {mean_and_sd(_ratios(direct, b))}" for b in tried if b > 0)
    to_product = [float(row["seconds"]) / float(row["product_s"]) for row in direct]
    yield (
        f"Trained directly with backups: {trained}. That is {mean_and_sd(to_product)} times the "
        f"product for the same seed. Of these, b = {_fastest(direct):g} reaches the target first. "
        f"Relative to training without backups with the same seed: {ratios}."
    )


def _describe_product(predicted: Rows) -> Iterator[str]:
    for late, words in WORDS.items():
        seconds = column(predicted, f"{late}_s")
        best = int(np.argmin(seconds))
        good = [b for b, value in enumerate(seconds) if value <= 1.02 * seconds[best]]
        yield (
            f"If late work is {words}, the product of updates and time per update is smallest at "
            f"b = {best}: {seconds[best]:.0f} s, against {seconds[0]:.0f} s without backups; any b "
            f"from {good[0]} to {good[-1]} is within 2 % of that."
        )


def _ratios(direct: Rows, backups: float) -> list[float]:
    """Return the time with backups over the time without, for each seed."""
    with_backups, without = (
        [column(direct, "seconds", backups=b, seed=seed)[0] for seed in _seeds(direct)]
        for b in (backups, 0)
    )
    return [one / other for one, other in zip(with_backups, without, strict=True)]


def _seeds(rows: Rows) -> list[float]:
    return sorted(set(column(rows, "seed")))


def _fastest(direct: Rows) -> float:
    """Return the b that reached the target first in direct training."""
    seconds = {b: column(direct, "seconds", backups=b) for b in set(column(direct, "backups"))}
    return min(seconds, key=lambda b: fmean(finite(seconds[b]) or [inf]))


def _describe_choices(rows: Rows) -> str:
    noise = {row["seed"]: float(row["noise_samples"]) for row in rows}
    lines = [
        f"In a pilot of the first {rows[0]['pilot_updates']:g} updates, the estimated noise scale "
        f"is {mean_and_sd(list(noise.values()), 0)} samples. From the pilot's times and a model of "
        "how many updates are needed, the planner chooses the following b, one per pilot (the "
        "measured table has all updates counted here):\n"
    ]
    for late, name in dict.fromkeys((str(row["late"]), str(row["model"])) for row in rows):
        own = [row for row in rows if row["late"] == late and row["model"] == name]
        chosen = ", ".join(f"{row['backups']:g}" for row in own)
        costs = column(own, "cost_percent")
        lines.append(
            f"- {name}, late work {WORDS[late]}: b = {chosen} (best: {own[0]['best_backups']:g}; "
            f"{fmean(costs):.1f} % slower on average, {max(costs):.1f} % at most)"
        )
    return "\n".join(lines)
