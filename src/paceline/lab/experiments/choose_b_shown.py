# SPDX-License-Identifier: BSD-3-Clause
"""What `choose-b` shows of its tables: figure and paragraph."""

from collections.abc import Iterator
from math import inf, nan
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paceline.lab.experiment import Rows, Tables
from paceline.lab.experiments.settings import finite, picked, spread
from paceline.lab.law import Law

__all__ = ["draw", "tell"]

SHOWN = 30  # backups, or as many as the planner chooses
WORDS = {"cancel": "cancelled", "finish": "finished"}


def draw(tables: Tables) -> Figure:
    """Updates against N; the time of an update against b; the time to the target against b."""
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    counts, steps, times = figure.subplots(1, 3)
    _draw_counts(counts, tables)
    predicted = tables["predicted"]
    most = max([SHOWN, *picked(tables["choices"], "backups")])
    few = [row for row in predicted if float(row["backups"]) <= most]
    for late, label in WORDS.items():
        backups = picked(few, "backups")
        steps.plot(backups, picked(few, f"{late}_step_s"), label=f"late work {label}")
        times.plot(backups, picked(few, f"{late}_s"), label=f"product, {label}")
    steps.set(xlabel="backups, b", ylabel="time of an update (s)")
    steps.set_title("waiting for the others, simulated")
    steps.legend(frameon=False)
    _draw_direct(times, tables)
    return figure


def _draw_counts(axes: Axes, tables: Tables) -> None:
    rows, law = tables["updates"], _law(tables)
    workers = float(tables["law"][0]["workers"])
    every = np.geomspace(min(picked(rows, "needed")), workers, 50)
    axes.plot(picked(rows, "needed"), picked(rows, "updates"), "o", ms=3, label="counted")
    axes.plot(every, law.updates(every), label=_formula(law))
    axes.plot(every, law.updates(every)[-1] * workers / every, "k--", lw=1, label="as 1/N")
    axes.set(xscale="log", yscale="log", xlabel="gradients in an update, N", ylabel="updates")
    axes.set_title(f"updates to {100 * float(tables['law'][0]['target']):g} % accuracy")
    axes.legend(frameon=False)


def _draw_direct(axes: Axes, tables: Tables) -> None:
    direct, predicted = tables["direct"], tables["predicted"]
    tried = sorted(set(picked(direct, "backups")))
    seconds = [picked(direct, "seconds", backups=b) for b in tried]
    means = [fmean(finite(own) or [nan]) for own in seconds]
    errors = [np.std(own, ddof=1) / len(own) ** 0.5 if len(own) > 1 else 0.0 for own in seconds]
    axes.errorbar(
        tried,
        means,
        errors,
        fmt="ks",
        ms=4,
        capsize=3,
        label="trained, cancelled; bars: standard error",
    )
    styles = {"every gradient counts": "v", "noise scale": "^", "measured table": "D"}
    for name, style in styles.items():
        own = [row for row in tables["choices"] if row["model"] == name]
        times = [picked(predicted, f"{row['late']}_s", backups=row["backups"])[0] for row in own]
        axes.plot(picked(own, "backups"), times, style, ms=8, mfc="none", label=f"plan: {name}")
    axes.set(xlabel="backups, b", ylabel="time to the target (s)")
    axes.set_title("time to the target")
    axes.legend(frameon=False, fontsize="small")


def _law(tables: Tables) -> Law:
    [row] = tables["law"]
    return Law(float(row["floor"]), float(row["scale"]))


def _formula(law: Law) -> str:
    return f"{law.floor:.0f} + {law.floor * law.scale:.0f} / N"


def tell(tables: Tables) -> str:
    """Put it into words."""
    return " ".join([*_of_times(tables), *_of_choices(tables["choices"])])


def _of_times(tables: Tables) -> Iterator[str]:
    law, updates, direct = _law(tables), tables["updates"], tables["direct"]
    trainings = len(_seeds(updates))
    times = "training" if trainings == 1 else "trainings"
    counts = "; ".join(
        f"N = {n:g}: {spread(picked(updates, 'updates', needed=n), 0)}"
        for n in sorted(set(picked(updates, "needed")))
    )
    [row] = tables["law"]
    target = 100 * float(row["target"])
    yield (
        f"Updates to {target:g} % accuracy, {trainings} {times} each: {counts}. That is about "
        f"{_formula(law)}, as with a noise scale of {float(row['scale_samples']):.0f} samples, for "
        "a rate in proportion to N."
    )
    for late, words in WORDS.items():
        seconds = picked(tables["predicted"], f"{late}_s")
        best = int(np.argmin(seconds))
        good = [b for b, value in enumerate(seconds) if value <= 1.02 * seconds[best]]
        yield (
            f"With late work {words} the product is smallest at b = {best}: {seconds[best]:.0f} s "
            f"against {seconds[0]:.0f} s without backups; b from {good[0]} to {good[-1]} is within "
            "2 % of it."
        )
    tried = sorted(set(picked(direct, "backups")))
    trained = "; ".join(
        f"b = {b:g}: {spread(picked(direct, 'seconds', backups=b), 0)} s" for b in tried
    )
    parts = "; ".join(f"b = {b:g}: {spread(_parts(direct, b))}" for b in tried if b > 0)
    ratios = [float(row["seconds"]) / float(row["product_s"]) for row in direct]
    first = _first(direct)
    yield (
        f"Trained with backups: {trained}; that is {spread(ratios)} times the product for the same "
        f"seed. Of these, b = {first:g} is there first. As parts of the time without backups, for "
        f"the same seed: {parts}."
    )


def _parts(direct: Rows, backups: float) -> list[float]:
    """The time with backups over that without, of each seed."""
    with_them, without = (
        [picked(direct, "seconds", backups=b, seed=seed)[0] for seed in _seeds(direct)]
        for b in (backups, 0)
    )
    return [one / other for one, other in zip(with_them, without, strict=True)]


def _seeds(rows: Rows) -> list[float]:
    return sorted(set(picked(rows, "seed")))


def _first(direct: Rows) -> float:
    """The b with which the target was reached first, of those that were trained."""
    seconds = {b: picked(direct, "seconds", backups=b) for b in set(picked(direct, "backups"))}
    return min(seconds, key=lambda b: fmean(finite(seconds[b]) or [inf]))


def _of_choices(rows: Rows) -> Iterator[str]:
    noise = {row["seed"]: float(row["noise_samples"]) for row in rows}
    yield (
        f"A pilot of the first {rows[0]['pilot_updates']:g} updates sees a noise scale of "
        f"{spread(list(noise.values()), 0)} samples. From its times, and by what is assumed of "
        "updates (the table is of all that was counted here), the planner chooses:"
    )
    described = []
    for late, name in dict.fromkeys((str(row["late"]), str(row["model"])) for row in rows):
        own = [row for row in rows if row["late"] == late and row["model"] == name]
        chosen = ", ".join(f"{row['backups']:g}" for row in own)
        costs = picked(own, "cost_percent")
        described.append(
            f"{name}, {WORDS[late]}: b = {chosen} (best {own[0]['best_backups']:g}; "
            f"{fmean(costs):.1f} % slower, at most {max(costs):.1f} %)"
        )
    yield "; ".join(described) + "."
