# SPDX-License-Identifier: BSD-3-Clause
"""How much network traffic does each rule cause, per sample that counts and to reach a target?

A worker pulls the parameters for each assignment, and pushes each gradient that it finishes. A
cancelled assignment has been pulled but isn't pushed. Both transfers have the size of the model.
`finish` means that late work is finished, pushed and then dropped, as in Chen et al.
"""

from collections import Counter
from typing import TYPE_CHECKING

from torch import nn

from paceline.core.events import Fate
from paceline.lab.data import mnist
from paceline.lab.experiment import Experiment, Lab, Rows, Tables
from paceline.lab.experiments.race_to_target import (
    BATCH,
    WORKERS,
    Entrant,
    digits_problem,
    race,
    seconds_text,
)
from paceline.lab.experiments.settings import CHEN
from paceline.lab.experiments.tables import column, finite, mean_and_sd, seed_count
from paceline.lab.experiments.tuning import edge_note
from paceline.lab.plotting import new_figure
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.watch.figure_style import (
    WIDTH,
    describe_bars,
    draw_seed_bars,
    draw_stacked_bars,
    legend_below,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TRAFFIC"]

ENTRANTS = (
    Entrant("sync", CHEN),
    Entrant("backup:1", CHEN),
    Entrant("backup:1", CHEN, late="finish"),
    Entrant("backup:4", CHEN),
    Entrant("backup:4", CHEN, late="finish"),
    Entrant("batchsync:16", CHEN),
    Entrant("deadline", CHEN),
    Entrant("delayed:1", CHEN),
    Entrant("softsync:4", CHEN),
    Entrant("ssp:3", CHEN),
    Entrant("async", CHEN),
)
QUICK = (ENTRANTS[0], ENTRANTS[3], ENTRANTS[4])


def measure(lab: Lab) -> Tables:
    """Count transfers in a simulation, and train to find how much data the target takes."""
    entrants = QUICK if lab.quick else ENTRANTS
    problem = digits_problem(lab.data, 0, quick=lab.quick)
    size = _bytes(problem.build())
    counts = [_count_transfers(entrant, 200 if lab.quick else 2000, size) for entrant in entrants]
    per_sample = {str(row["rule"]): float(row["bytes_per_sample"]) for row in counts}
    found = race(lab, entrants)
    final: Rows = [
        row
        | {"megabytes": float(row["epochs"]) * problem.samples * per_sample[str(row["rule"])] / 1e6}
        for row in found.final
    ]
    return {"counts": counts, "tried": found.tried, "race": final}


def _bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _count_transfers(entrant: Entrant, cycles: int, size: int) -> dict[str, float | str]:
    """Count pulls and pushes per gradient that counts, in a simulation."""
    steps = cycles * WORKERS // entrant.gradients
    spec = RunSpec(workers=WORKERS, steps=steps, late=entrant.late)
    trace = simulate(entrant.policy, Cluster.parse(entrant.latency, batch=BATCH), spec)
    fates: Counter[Fate] = Counter()
    held_version: dict[int, int] = {}  # by worker
    again = 0
    for gradient in trace.gradients():
        fates[gradient.fate] += 1
        again += held_version.get(gradient.worker) == gradient.version
        held_version[gradient.worker] = gradient.version
    used, pulls = fates[Fate.ACCEPTED], fates.total()
    pushes = pulls - fates[Fate.CANCELLED]
    return {
        "rule": entrant.label,
        "pulls": pulls / used,
        "pushes": pushes / used,
        "pulled_again": again / used,
        "bytes_per_sample": (pulls + pushes) * size / (used * BATCH),
        "update_s": max(update.t for update in trace.updates()) / steps,
        "model_bytes": size,
    }


def draw(tables: Tables) -> "Figure":
    """Draw transfers per gradient, and megabytes to the target."""
    figure = new_figure(WIDTH, 4.6, f"What {WORKERS} workers send and receive")
    left, right = figure.subplots(1, 2)
    counts = tables["counts"]
    rules = [str(row["rule"]) for row in counts]
    parts = {
        "parameters pulled by workers": column(counts, "pulls"),
        "gradients pushed by workers": column(counts, "pushes"),
    }
    draw_stacked_bars(left, rules, parts)
    describe_bars(left, "Transfers for each gradient that counts", "transfers of a model's size")
    megabytes = [finite(column(tables["race"], "megabytes", rule=rule)) for rule in rules]
    draw_seed_bars(right, rules, megabytes)
    target = float(tables["race"][0]["target"])
    describe_bars(right, f"Transferred until {100 * target:g} % accuracy", "megabytes")
    legend_below(figure, left, right)
    return figure


def describe(tables: Tables) -> str:
    """Summarize the tables in words."""
    counts, rows = tables["counts"], tables["race"]
    target = f"{float(rows[0]['target']):.0%}"
    lines = [
        "Per gradient that counts, with a model of "
        f"{float(counts[0]['model_bytes']) / 1e3:.0f} kB and {BATCH} samples; and in total to "
        f"{target} accuracy, {seed_count(rows)}:\n"
    ]
    for row in counts:
        megabytes = mean_and_sd(column(rows, "megabytes", rule=str(row["rule"])), 0)
        lines.append(
            f"- {row['rule']}: {float(row['pulls']):.2f} pulls and {float(row['pushes']):.2f} "
            f"pushes, {float(row['bytes_per_sample']) / 1e3:.1f} kB per sample, {megabytes} MB"
        )
    avoidable = "".join(
        f"Under {row['rule']}, {float(row['pulled_again']):.2f} pulls per gradient fetch a version "
        "that the worker already holds, so they could be avoided. "
        for row in counts
        if float(row["pulled_again"]) > 0.01
    )
    lines.append(
        f"\n{avoidable}Seconds to the target: {seconds_text(rows)}."
        f"{edge_note(tables['tried'], rows, 'rule')}"
    )
    return "\n".join(lines)


TRAFFIC = Experiment(
    name="traffic",
    question="How much network traffic does each rule cause?",
    expected=(
        "By counting: sync and the asynchronous rules transfer the parameters and one gradient for "
        "each gradient that counts. backup:b pulls (N+b)/N times as often; if late work is "
        "finished, it also pushes that often. If late work is cancelled, no push is wasted."
    ),
    measure=measure,
    draw=draw,
    describe=describe,
    needs=mnist.SOURCES,
)
