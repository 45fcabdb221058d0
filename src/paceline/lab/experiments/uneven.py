# SPDX-License-Identifier: BSD-3-Clause
"""What if half of the workers are slow? Eight of sixteen always take twice as long."""

from collections import Counter
from typing import TYPE_CHECKING

from paceline.core.events import Fate
from paceline.lab.data import mnist
from paceline.lab.experiment import Experiment, Lab, Rows, Tables
from paceline.lab.experiments.race_to_target import (
    WORKERS,
    Entrant,
    draw_bars,
    race,
    seconds_text,
)
from paceline.lab.experiments.settings import CHEN
from paceline.lab.experiments.tables import column, seed_count
from paceline.lab.experiments.tuning import edge_note
from paceline.lab.plotting import new_figure
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.watch.figure_style import WIDTH, describe_bars, draw_stacked_bars, legend_below

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["UNEVEN"]

SLOW = 8
LATENCY = f"{CHEN}; workers 0-{SLOW - 1} x2"
RULES = (
    *("sync", "backup:1", "backup:4", "backup:8", "backup:12"),
    *("batchsync:8", "batchsync:16", "batchsync:24", "ssp:3", "softsync:4", "async"),
)
QUICK_RULES = ("sync", "backup:8", "batchsync:24", "async")


def measure(lab: Lab) -> Tables:
    """Measure how many gradients each rule uses per second, and how fast it learns."""
    entrants = [Entrant(rule, LATENCY) for rule in (QUICK_RULES if lab.quick else RULES)]
    pace = [_pace(entrant, 200 if lab.quick else 2000) for entrant in entrants]
    found = race(lab, entrants)
    return {"pace": pace, "tried": found.tried, "race": found.final}


def _pace(entrant: Entrant, cycles: int) -> dict[str, float | str]:
    """Return the speed of a rule in a simulation, without training."""
    steps = cycles * WORKERS // entrant.gradients
    spec = RunSpec(workers=WORKERS, steps=steps)
    trace = simulate(entrant.policy, Cluster.parse(entrant.latency), spec)
    seconds = max(update.t for update in trace.updates())
    fates = Counter((g.worker < SLOW, g.fate is Fate.ACCEPTED) for g in trace.gradients())
    used = fates[True, True] + fates[False, True]
    return {
        "rule": entrant.label,
        "update_s": seconds / steps,
        "gradients_per_s": used / seconds,
        "from_slow": fates[True, True] / used,
        "lost": 1 - used / sum(fates.values()),
    }


def draw(tables: Tables) -> "Figure":
    """Draw the gradients that count per second, and the time to the target."""
    figure = new_figure(WIDTH, 4.6, f"{WORKERS} workers, half of them twice as slow")
    left, right = figure.subplots(1, 2)
    pace = tables["pace"]
    slow = [float(row["gradients_per_s"]) * float(row["from_slow"]) for row in pace]
    every = [float(row["gradients_per_s"]) for row in pace]
    fast = [a - s for a, s in zip(every, slow, strict=True)]
    parts = {"from fast workers": fast, "from slow workers": slow}
    draw_stacked_bars(left, [str(row["rule"]) for row in pace], parts)
    describe_bars(left, "Gradients used in updates", "gradients per second")
    draw_bars(right, tables["race"], "Time to the target")
    legend_below(figure, left, right)
    return figure


def describe(tables: Tables) -> str:
    """Summarize the tables in words."""
    pace: Rows = tables["pace"]
    rows = tables["race"]

    def line(rule: str) -> str:
        update_s, every, slow = (
            column(pace, name, rule=rule)[0]
            for name in ("update_s", "gradients_per_s", "from_slow")
        )
        return f"- {rule}: {update_s:.2f} s, {every:.1f}/s, {slow:.0%}"

    lines = "\n".join(line(str(row["rule"])) for row in pace)
    return (
        "Time per update, gradients that count per second, and the share of them that comes from "
        f"the slow half:\n\n{lines}\n\nSeconds to {float(rows[0]['target']):.0%} accuracy on "
        f"digits, {seed_count(rows)}: {seconds_text(rows)}."
        f"{edge_note(tables['tried'], rows, 'rule')}"
    )


UNEVEN = Experiment(
    name="uneven",
    question="What if half of the workers are always twice as slow?",
    expected=(
        "A rule that waits for all workers runs at the speed of the slow ones, and so does bounded "
        "staleness. Dropping the slow half doubles the speed of sync and wastes half of the "
        "workers. Tyurin and Richtárik: taking mini-batches of one version from anyone (batchsync) "
        "is optimal up to a constant if all workers have the same data."
    ),
    measure=measure,
    draw=draw,
    describe=describe,
    needs=mnist.SOURCES,
)
