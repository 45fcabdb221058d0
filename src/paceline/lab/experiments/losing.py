# SPDX-License-Identifier: BSD-3-Clause
"""Where do backups lose? Three cases, each against full synchronous training and a remedy.

A slow majority: twelve of sixteen workers take three times as long, so that whoever drops a few
still waits for slow ones, and whoever drops all of them does without three quarters of the
machines; or half as long again, also with mini-batches so small that every gradient counts. Data of
their own: two of the digits are only on four workers that are slow. And a b that is too large: all
machines are alike, so that beyond the stragglers there is nothing to gain.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

from matplotlib.figure import Figure

from paceline.core.events import Fate
from paceline.lab.data import mnist
from paceline.lab.experiment import Experiment, Lab, Rows, Tables
from paceline.lab.experiments.race import (
    BATCH,
    FACTORS,
    WORKERS,
    Entrant,
    bars,
    outcome_words,
    race,
)
from paceline.lab.experiments.settings import CHEN, picked, seeds_of, spread
from paceline.lab.experiments.tuning import edges, highest, tuned
from paceline.lab.problems.reserved import ReservedDigits
from paceline.lab.recipe import Recipe
from paceline.lab.trial import Trial
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import Gradient

__all__ = ["LOSING"]

MAJORITY = f"{CHEN}; workers 0-11 x3"
MAJORITY_RULES = ("sync", "backup:4", "backup:12", "batchsync:24", "async")
MAJORITY_RULES_QUICK = ("sync", "backup:4", "backup:12")
MILD = f"{CHEN}; workers 0-11 x1.5"
MILD_RULES = ("sync", "backup:4", "backup:12")
MILD_RULES_QUICK = ("sync", "backup:12")
SMALL_BATCH = 2
LARGE_RULES = ("sync", "backup:1", "backup:4", "backup:8", "backup:14")
LARGE_RULES_QUICK = ("sync", "backup:14")

SLOW = (0, 1, 2, 3)
OWNERS = f"{CHEN}; workers 0-3 x2"
RESERVED = (8, 9)


@dataclass(frozen=True)
class Owned:
    """Training where the slow have data of their own; or not, where all have all."""

    policy: str
    is_shared: bool = False

    @property
    def label(self) -> str:
        """Its name in tables and figures."""
        return f"{self.policy}, all data everywhere" if self.is_shared else self.policy

    def trial(self, lab: Lab, factor: float, seed: int) -> Trial:
        """The same as a trial; the factor is that of a race."""
        problem = ReservedDigits(
            batch=BATCH,
            seed=seed,
            data=lab.data,
            width=0.5,
            scored=1000 if lab.quick else 10_000,
            reserved=RESERVED,
            owners=tuple(range(WORKERS)) if self.is_shared else SLOW,
            workers=WORKERS,
        )
        rate = Entrant(self.policy, OWNERS).rate(factor)
        return Trial(
            problem=problem,
            recipe=Recipe(rate, method="adam", fall_from=0.5),
            policy=self.policy,
            workers=WORKERS,
            latency=OWNERS,
            epochs=0.25 if lab.quick else 0.5,
            rows=1,
        )


OWNED = (
    Owned("sync"),
    Owned("backup:2"),
    Owned("backup:4"),
    Owned("backup:4", is_shared=True),
    Owned("batchsync:12"),
    Owned("softsync:4"),
    Owned("async"),
)
OWNED_QUICK = OWNED[0], OWNED[2], OWNED[3]


def measure(lab: Lab) -> Tables:
    """All of these cases; and what becomes of the mini-batches that were dropped."""
    races = {
        name: race(
            lab,
            [Entrant(rule, latency, batch=batch) for rule in (quick if lab.quick else full)],
        )
        for name, latency, batch, full, quick in (
            ("majority", MAJORITY, BATCH, MAJORITY_RULES, MAJORITY_RULES_QUICK),
            ("mild", MILD, BATCH, MILD_RULES, MILD_RULES_QUICK),
            ("small", MILD, SMALL_BATCH, MILD_RULES, MILD_RULES_QUICK),
            ("large", CHEN, BATCH, LARGE_RULES, LARGE_RULES_QUICK),
        )
    }
    return {
        **{name: own.final for name, own in races.items()},
        **{f"{name}_tried": own.tried for name, own in races.items()},
        "own_data": _own_data(lab, OWNED_QUICK if lab.quick else OWNED),
        "requeue": _requeue(200 if lab.quick else 2000),
    }


def _own_data(lab: Lab, rules: tuple[Owned, ...]) -> Rows:
    """Each rule at the rate that is best with the first seed."""
    best, _ = tuned(
        lab,
        lab.seeds[:1],
        dict.fromkeys(rules, (0.3,) if lab.quick else FACTORS),
        lambda rule, factor, seed: rule.trial(lab, factor, seed),
        highest("accuracy"),
    )
    cases = list(product(rules, lab.seeds))
    trials = [rule.trial(lab, best[rule], seed) for rule, seed in cases]
    return [
        {
            "rule": rule.label,
            "rate": trial.recipe.rate_max,
            "seed": seed,
            "seconds": outcome.seconds,
            **{name: outcome.last(name) for name in ("accuracy", "reserved", "others")},
        }
        for (rule, seed), trial, outcome in zip(cases, trials, lab.outcomes(trials), strict=True)
    ]


def _requeue(steps: int) -> Rows:
    """What becomes of mini-batches whose gradient was dropped, on machines alike and with slow."""
    rows: Rows = []
    for machines, latency, rule in (("alike", CHEN, "backup:1"), ("4 slow", OWNERS, "backup:4")):
        spec = RunSpec(workers=WORKERS, steps=steps)
        trace = simulate(rule, Cluster.parse(latency, batch=BATCH), spec)
        for is_slow in (True, False):
            own = [g for g in trace.gradients() if (g.worker in SLOW) == is_slow]
            used = sum(g.fate is Fate.ACCEPTED for g in own)
            rows.append(
                {
                    "machines": machines,
                    "rule": rule,
                    "workers": "0-3" if is_slow else "others",
                    "computed": len(own),
                    "used": used,
                    "forgotten_without": 1 - used / len(own),
                    "tries_with": _most_tries(own),
                }
            )
    return rows


def _most_tries(gradients: Sequence[Gradient]) -> int:
    """How often a mini-batch was computed at most, if it comes again until it counts."""
    tries: Counter[int] = Counter()
    most = 0
    for gradient in gradients:
        tries[gradient.worker] += 1
        most = max(most, tries[gradient.worker])
        if gradient.fate is Fate.ACCEPTED:
            tries[gradient.worker] = 0
    return most


def draw(tables: Tables) -> Figure:
    """Four races, and who has learnt the reserved digits."""
    figure = Figure(figsize=(14, 7), layout="constrained")
    *races, right, rest = figure.subplots(2, 3).flat
    rest.set_axis_off()
    titles = {
        "majority": "12 of 16 workers x3",
        "mild": "12 of 16 workers x1.5",
        "small": f"the same, mini-batches of {SMALL_BATCH}",
        "large": "all workers alike",
    }
    for axes, (name, title) in zip(races, titles.items(), strict=True):
        bars(axes, tables[name])
        axes.set_title(title)
    rows = tables["own_data"]
    rules = list(dict.fromkeys(str(row["rule"]) for row in rows))[::-1]
    for shift, column, label in ((0.2, "others", "other digits"), (-0.2, "reserved", "8 and 9")):
        values = [100 * fmean(picked(rows, column, rule=rule)) for rule in rules]
        places = [place + shift for place in range(len(rules))]
        right.barh(places, values, height=0.38, alpha=0.7, label=label)
    right.set_yticks(range(len(rules)), [rule.replace(", ", ",\n") for rule in rules])
    right.set(xlabel="right (%)", title="8 and 9 only on four slow workers", xlim=(0, 100))
    rest.legend(*right.get_legend_handles_labels(), frameon=False, loc="upper left")
    return figure


def tell(tables: Tables) -> str:
    """Put it into words."""
    owned = tables["own_data"]
    learnt = []
    for rule in dict.fromkeys(str(row["rule"]) for row in owned):
        reserved, others = (
            spread([100 * value for value in picked(owned, column, rule=rule)], 1)
            for column in ("reserved", "others")
        )
        seconds = fmean(picked(owned, "seconds", rule=rule))
        learnt.append(f"{rule} {reserved} % of them and {others} % of the others ({seconds:.0f} s)")
    races = " ".join(
        f"{words}: {outcome_words(tables[name])}.{_edge_words(tables, name)}"
        for name, words in (
            ("majority", "12 of 16 workers three times as slow"),
            ("mild", "12 of 16 one and a half times as slow"),
            ("small", f"The same with {SMALL_BATCH} images in a mini-batch"),
            ("large", "All alike"),
        )
    )
    return (
        f"{seeds_of(owned)}. Seconds to {float(tables['large'][0]['target']):.0%}. {races} With 8 "
        f"and 9 only on four slow workers: {'; '.join(learnt)}. {_requeue_words(tables['requeue'])}"
    )


def _edge_words(tables: Tables, name: str) -> str:
    return edges(tables[f"{name}_tried"], tables[name], "rule")


def _requeue_words(rows: Rows) -> str:
    def of(column: str, machines: str, workers: str) -> float:
        return picked(rows, column, machines=machines, workers=workers)[0]

    return (
        "What becomes of mini-batches that are dropped and given again, counted: with backup:1 and "
        f"machines alike {of('forgotten_without', 'alike', 'others'):.1%} of them would be "
        "forgotten if they were not given again; as it is, each counted after at most "
        f"{of('tries_with', 'alike', 'others'):.0f} tries. With backup:4 the four slow workers "
        f"computed the same mini-batch up to {of('tries_with', '4 slow', '0-3'):.0f} times, and "
        f"{of('used', '4 slow', '0-3'):.0f} of their "
        f"{of('computed', '4 slow', '0-3'):.0f} gradients counted."
    )


LOSING = Experiment(
    name="losing",
    question="Where do backup workers lose?",
    expected=(
        "Where most workers are slow, a few backups gain nothing. Enough of them to leave out M of "
        "W, s times as slow, throw most of the work away: if every gradient counts the same, that "
        "pays only if s is above W/(W-M), here 4. Data that only slow workers have is not learnt "
        "(Tyurin and Richtárik: where each has other data, the slowest cannot be left out). A b "
        "beyond the stragglers throws work away."
    ),
    measure=measure,
    draw=draw,
    tell=tell,
    needs=mnist.SOURCES,
)
