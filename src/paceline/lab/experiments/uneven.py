# SPDX-License-Identifier: BSD-3-Clause
"""What if half of the machines are slow? Eight of sixteen workers take twice as long, always."""

from collections import Counter

from matplotlib.figure import Figure

from paceline.core.events import Fate
from paceline.lab.data import mnist
from paceline.lab.experiment import Experiment, Lab, Rows, Tables
from paceline.lab.experiments.race import WORKERS, Entrant, bars, outcome_words, race
from paceline.lab.experiments.settings import CHEN, picked, seeds_of
from paceline.lab.experiments.tuning import edges
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec

__all__ = ["UNEVEN"]

SLOW = 8
LATENCY = f"{CHEN}; workers 0-{SLOW - 1} x2"
RULES = (
    *("sync", "backup:1", "backup:4", "backup:8", "backup:12"),
    *("batchsync:8", "batchsync:16", "batchsync:24", "ssp:3", "softsync:4", "async"),
)
QUICK_RULES = ("sync", "backup:8", "batchsync:24", "async")


def measure(lab: Lab) -> Tables:
    """How fast the rules are, and how fast they learn."""
    entrants = [Entrant(rule, LATENCY) for rule in (QUICK_RULES if lab.quick else RULES)]
    pace = [_pace(entrant, 200 if lab.quick else 2000) for entrant in entrants]
    run = race(lab, entrants)
    return {"pace": pace, "tried": run.tried, "race": run.final}


def _pace(entrant: Entrant, cycles: int) -> dict[str, float | str]:
    """From a simulation alone, without training."""
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


def draw(tables: Tables) -> Figure:
    """How many gradients count in a second, and when the target is reached."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    pace = tables["pace"][::-1]
    places = range(len(pace))
    slow = [float(row["gradients_per_s"]) * float(row["from_slow"]) for row in pace]
    every = [float(row["gradients_per_s"]) for row in pace]
    fast = [a - s for a, s in zip(every, slow, strict=True)]
    left.barh(places, fast, color="C0", alpha=0.7, label="of the fast")
    left.barh(places, slow, left=fast, color="C1", alpha=0.7, label="of the slow")
    left.set_yticks(places, [str(row["rule"]) for row in pace])
    left.set(xlabel="gradients that count, in a second")
    left.legend(frameon=False)
    left.grid(alpha=0.3, axis="x")
    bars(right, tables["race"])
    return figure


def tell(tables: Tables) -> str:
    """Put it into words."""
    pace: Rows = tables["pace"]
    rows = tables["race"]

    def words(rule: str) -> str:
        update_s, every, slow = (
            picked(pace, column, rule=rule)[0]
            for column in ("update_s", "gradients_per_s", "from_slow")
        )
        return f"{rule} {update_s:.2f} s, {every:.1f}/s, {slow:.0%}"

    return (
        "Time of an update, gradients that count in a second, and how many of these are of the "
        f"slow half: {'; '.join(words(str(row['rule'])) for row in pace)}. Seconds until "
        f"{float(rows[0]['target']):.0%} of the digits are right, {seeds_of(rows)}: "
        f"{outcome_words(rows)}.{edges(tables['tried'], rows, 'rule')}"
    )


UNEVEN = Experiment(
    name="uneven",
    question="What if half of the workers are twice as slow, always?",
    expected=(
        "Waiting for everybody goes at the pace of the slow, and so does bounded staleness; "
        "dropping the slow half doubles the pace of sync and wastes half of the machines. Tyurin "
        "and Richtárik: taking mini-batches from anyone at one version (batchsync) is optimal up "
        "to a constant where all have the same data."
    ),
    measure=measure,
    draw=draw,
    tell=tell,
    needs=mnist.SOURCES,
)
