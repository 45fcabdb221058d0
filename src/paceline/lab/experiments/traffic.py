# SPDX-License-Identifier: BSD-3-Clause
"""What do the rules cost the network? Bytes for each sample that counts, and to reach a target.

A worker pulls the parameters for each piece of work, and pushes each gradient that it has finished;
what was cancelled has been pulled and is not pushed. Both have the size of the model. `finish`:
late work is finished, pushed, and then dropped, as in Chen et al.
"""

from collections import Counter
from statistics import fmean

from matplotlib.figure import Figure
from torch import nn

from paceline.core.events import Fate
from paceline.lab.data import mnist
from paceline.lab.experiment import Experiment, Lab, Rows, Tables
from paceline.lab.experiments.race import BATCH, WORKERS, Entrant, digits, outcome_words, race
from paceline.lab.experiments.settings import CHEN, finite, picked, seeds_of, spread
from paceline.lab.experiments.tuning import edges
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec

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
    """Count what is moved, and train to know for how long."""
    entrants = QUICK if lab.quick else ENTRANTS
    problem = digits(lab.data, 0, quick=lab.quick)
    size = _bytes(problem.build())
    counts = [_counted(entrant, 200 if lab.quick else 2000, size) for entrant in entrants]
    moved = {str(row["rule"]): float(row["bytes_per_sample"]) for row in counts}
    run = race(lab, entrants)
    final: Rows = [
        row | {"megabytes": float(row["epochs"]) * problem.samples * moved[str(row["rule"])] / 1e6}
        for row in run.final
    ]
    return {"counts": counts, "tried": run.tried, "race": final}


def _bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _counted(entrant: Entrant, cycles: int, size: int) -> dict[str, float | str]:
    """Pulls and pushes for each gradient that counts, from a simulation."""
    steps = cycles * WORKERS // entrant.gradients
    spec = RunSpec(workers=WORKERS, steps=steps, late=entrant.late)
    trace = simulate(entrant.policy, Cluster.parse(entrant.latency, batch=BATCH), spec)
    fates: Counter[Fate] = Counter()
    version: dict[int, int] = {}  # that a worker has
    again = 0
    for gradient in trace.gradients():
        fates[gradient.fate] += 1
        again += version.get(gradient.worker) == gradient.version
        version[gradient.worker] = gradient.version
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


def draw(tables: Tables) -> Figure:
    """Bytes for a sample, and to the target."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    counts = tables["counts"][::-1]
    rules = [str(row["rule"]) for row in counts]
    places = range(len(rules))
    begun = [0.0] * len(rules)
    for column, label in (("pulls", "pulled"), ("pushes", "pushed")):
        values = [float(row[column]) for row in counts]
        left.barh(places, values, left=begun, alpha=0.7, label=label)
        begun = [a + b for a, b in zip(begun, values, strict=True)]
    left.set(xlabel="sizes of the model moved, for each gradient that counts")
    left.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    for place, rule in enumerate(rules):
        values = finite(picked(tables["race"], "megabytes", rule=rule))
        right.barh(place, fmean(values or [0.0]), color="C2", alpha=0.5)
        right.plot(values, [place] * len(values), "k.", markersize=4)
    target = float(tables["race"][0]["target"])
    right.set(xlabel=f"megabytes moved until {target:.0%} are right (dots: seeds)", xlim=(0, None))
    for axes in (left, right):
        axes.set_yticks(places, rules)
        axes.grid(alpha=0.3, axis="x")
    return figure


def tell(tables: Tables) -> str:
    """Put it into words."""
    counts, rows = tables["counts"], tables["race"]
    parts = []
    for row in counts:
        megabytes = spread(picked(rows, "megabytes", rule=str(row["rule"])), 0)
        parts.append(
            f"{row['rule']} {float(row['pulls']):.2f} pulls and {float(row['pushes']):.2f} pushes, "
            f"{float(row['bytes_per_sample']) / 1e3:.1f} kB a sample, {megabytes} MB"
        )
    spared = "".join(
        f" Of the pulls of {row['rule']}, {float(row['pulled_again']):.2f} for each gradient are "
        "of a version that the worker has already, and can be spared."
        for row in counts
        if float(row["pulled_again"]) > 0.01
    )
    return (
        f"For each gradient that counts (a model of {float(counts[0]['model_bytes']) / 1e3:.0f} kB,"
        f" {BATCH} samples), and to {float(rows[0]['target']):.0%} with {seeds_of(rows)}: "
        f"{'; '.join(parts)}.{spared} Seconds to the target: {outcome_words(rows)}."
        f"{edges(tables['tried'], rows, 'rule')}"
    )


TRAFFIC = Experiment(
    name="traffic",
    question="What do the rules cost the network?",
    expected=(
        "By counting: sync and asynchronous rules move the parameters and a gradient once for each "
        "gradient that counts; backup:b pulls (N+b)/N times as often, and pushes as often, too, if "
        "late work is finished; with cancelling nothing is pushed in vain."
    ),
    measure=measure,
    draw=draw,
    tell=tell,
    needs=mnist.SOURCES,
)
