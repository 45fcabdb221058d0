# SPDX-License-Identifier: BSD-3-Clause
"""Does it pay to hide the exchange of gradients behind computing, and use them k updates late?

Small relatives of AlexNet and GoogLeNet, twenty classes of Tiny-ImageNet at 32x32, 8 workers with 8
images each, momentum 0.9. The clock is that of the networks which Daily et al. measured on 8 GPUs:
computing, bandwidth and the number of servers are fitted to their iterations a second. Every rule
is trained with the rate that is best for `sync`, as in the paper, and with its own best one, of the
same few for all; what was tried with the first seed decides.
"""

from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from paceline.lab.data import tiny_imagenet
from paceline.lab.experiment import Experiment, Lab, Rows, Tables
from paceline.lab.experiments.curves import mean_curve, times_to
from paceline.lab.experiments.rows import curve_rows, end_row
from paceline.lab.experiments.settings import picked, seeds_of, spread
from paceline.lab.experiments.tuning import edges, highest, tuned
from paceline.lab.problems.tiny import Tiny
from paceline.lab.recipe import Recipe
from paceline.lab.trial import Trial
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import Update

__all__ = ["DELAY"]

WORKERS, BATCH = 8, 8
RATES = (0.001, 0.003, 0.01)
RULES = ("sync", "delayed:1", "delayed:2", "delayed:3")
NOTHING = "nothing sent"
EARLY = 0.5  # of the accuracy at the end


@dataclass(frozen=True)
class Subject:
    """What is trained, and how long it takes on the machines of the paper."""

    model: Literal["alexnet", "googlenet"]
    latency: str
    network: str
    paper: dict[str, float]
    """Iterations a second on 8 GPUs, read off figure 1."""
    width: float
    epochs: float


# Every computation is 5 % off; without that, all workers send at the same moments, and nothing can
# be hidden. The models have their published bytes.
SUBJECTS: dict[str, Subject] = {
    one.model: one
    for one in (
        Subject(
            "alexnet",
            latency="lognormal:41.2ms,0.05",
            network="model=244MB,bandwidth=32.1GB,servers=2",
            paper=dict(zip((NOTHING, *RULES), (22.6, 10.0, 13.8, 16.8, 16.7), strict=True)),
            width=0.5,
            epochs=10.0,
        ),
        Subject(
            "googlenet",
            latency="lognormal:34.9ms,0.05",
            network="model=28MB,bandwidth=6.35GB,servers=4",
            paper=dict(zip((NOTHING, *RULES), (26.7, 19.2, 22.5, 22.1, 22.5), strict=True)),
            width=1.0,
            epochs=4.0,
        ),
    )
}


class Case(NamedTuple):
    """What is tried."""

    model: str
    rule: str
    rate: float
    seed: int

    def trial(self, lab: Lab) -> Trial:
        """The same as a trial."""
        subject = SUBJECTS[self.model]
        return Trial(
            problem=Tiny(
                batch=BATCH,
                seed=self.seed,
                data=lab.data,
                cache=lab.cache,
                model=subject.model,
                width=subject.width,
            ),
            recipe=Recipe(self.rate, momentum=0.9, fall_from=0.5),
            policy=self.rule,
            workers=WORKERS,
            latency=subject.latency,
            network=subject.network,
            epochs=1.0 if lab.quick else subject.epochs,
            rows=5 if lab.quick else 40,
        )


def measure(lab: Lab) -> Tables:
    """Find the rates, then train with the one of `sync` and with each rule's own."""
    models = ("alexnet",) if lab.quick else tuple(SUBJECTS)
    rules = ("sync", "delayed:3") if lab.quick else RULES
    best, found = tuned(
        lab,
        lab.seeds[:1],
        dict.fromkeys(product(models, rules), RATES[1:2] if lab.quick else RATES),
        lambda pair, rate, seed: Case(*pair, rate, seed).trial(lab),
        highest("accuracy"),
    )
    cases = [
        (kind, Case(model, rule, best[model, "sync" if kind == "same" else rule], seed))
        for kind, model, rule, seed in product(("same", "own"), models, rules, lab.seeds)
    ]
    outcomes = lab.outcomes([case.trial(lab) for _, case in cases])
    done = list(zip(cases, outcomes, strict=True))
    return {
        "rates": [row for model in models for row in _iteration_rates(SUBJECTS[model])],
        "tried": [
            end_row(Case(*pair, rate, seed)._asdict(), outcome, accuracy="accuracy")
            for (pair, rate, seed), outcome in found.items()
        ],
        "final": [
            end_row({"kind": kind, **case._asdict()}, outcome, accuracy="accuracy")
            for (kind, case), outcome in done
        ],
        "curves": [
            row
            for (kind, case), outcome in done
            for row in curve_rows(
                {"kind": kind, **case._asdict()}, outcome, accuracy="accuracy", loss="loss"
            )
        ],
    }


def _iteration_rates(subject: Subject) -> Rows:
    """Iterations a second: what the simulator gives, and what the paper measured."""
    return [
        {
            "model": subject.model,
            "rule": rule,
            "paper": paper,
            "simulated": iterations_per_s(subject, rule),
        }
        for rule, paper in subject.paper.items()
    ]


def iterations_per_s(subject: Subject, rule: str, steps: int = 1000) -> float:
    """Of the simulator; `NOTHING`: as if nobody had to send anything."""
    sends = "" if rule == NOTHING else subject.network
    cluster = Cluster.parse(subject.latency, sends, batch=BATCH)
    spec = RunSpec(workers=WORKERS, steps=steps)
    trace = simulate("sync" if rule == NOTHING else rule, cluster, spec)
    return steps / max(record.t for record in trace.records if isinstance(record, Update))


def draw(tables: Tables) -> Figure:
    """A row for each network: accuracy against updates and time, then time with the own rates."""
    models = list(dict.fromkeys(str(row["model"]) for row in tables["final"]))
    figure = Figure(figsize=(12, 3.6 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), 3, squeeze=False, sharey="row")
    for row, model in zip(panels, models, strict=True):
        for axes, kind, x in zip(
            row, ("same", "same", "own"), ("updates", "seconds", "seconds"), strict=True
        ):
            _draw_curves(axes, tables, model, kind, x)
        row[0].set(ylabel="test accuracy")
        best = max(picked(tables["curves"], "accuracy", model=model))
        row[0].set_ylim(0, 1.4 * best)  # room for the legends
        row[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return figure


def _draw_curves(axes: Axes, tables: Tables, model: str, kind: str, x: str) -> None:
    for number, rule in enumerate(dict.fromkeys(str(row["rule"]) for row in tables["final"])):
        rate = picked(tables["final"], "rate", model=model, kind=kind, rule=rule)[0]
        label = rule if kind == "same" else f"{rule}, rate {rate:g}"
        axes.plot(*_curve(tables, model, kind, rule, x), color=f"C{number}", label=label)
    same = picked(tables["final"], "rate", model=model, kind="same")[0]
    rates = f"rate {same:g} for all" if kind == "same" else "the best rate of each"
    axes.set(xlabel=x if x == "updates" else "virtual time (s)", title=f"{model}, {rates}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="upper left")


def _curve(
    tables: Tables, model: str, kind: str, rule: str, x: str = "seconds"
) -> tuple[list[float], list[float]]:
    """Accuracy, the mean over the seeds."""
    return mean_curve(_curves(tables, model, kind, rule), x, "accuracy")


def _curves(tables: Tables, model: str, kind: str, rule: str) -> Rows:
    wanted = (model, kind, rule)
    return [r for r in tables["curves"] if (r["model"], r["kind"], r["rule"]) == wanted]


def seconds_to(tables: Tables, model: str, kind: str, rule: str, part: float) -> list[float]:
    """Until there is this part of what `sync` ends with on average, for each seed; NaN: never."""
    _, accuracy = _curve(tables, model, kind, "sync")
    own = _curves(tables, model, kind, rule)
    return times_to(own, "accuracy", part * accuracy[-1], is_high=True)


def tell(tables: Tables) -> str:
    """Put it into words."""
    models = dict.fromkeys(str(row["model"]) for row in tables["final"])
    described = [_tell_model(tables, model) for model in models]
    text = " ".join([f"{seeds_of(tables['final'])}.", *described])
    own = [row for row in tables["final"] if row["kind"] == "own"]
    return text + edges(tables["tried"], own, "model", "rule")


def _tell_model(tables: Tables, model: str) -> str:
    speeds = ", ".join(
        f"{row['rule']} {float(row['simulated']):.1f} ({float(row['paper']):.1f})"
        for row in tables["rates"]
        if row["model"] == model
    )
    updates = max(picked(tables["final"], "updates", model=model))
    rate = picked(tables["final"], "rate", model=model, kind="same")[0]
    rules = [r for r in dict.fromkeys(str(row["rule"]) for row in tables["final"]) if r != "sync"]
    losing = [
        rule
        for rule in rules
        if not fmean(seconds_to(tables, model, "same", rule, EARLY))
        <= fmean(seconds_to(tables, model, "same", "sync", EARLY))
    ]
    return (
        f"{model}: iterations a second, simulated (in the paper): {speeds}. Accuracy after "
        f"{updates:g} updates, and the seconds until half of what sync ends with, and all of it: "
        f"with sync's rate of {rate:g}, {_tell_kind(tables, model, 'same')}; with the best rate of "
        f"each, {_tell_kind(tables, model, 'own')}. Early in training, until half of that accuracy "
        f"and with one rate, the delayed rules lose to sync in time: {_yes_or_no(losing, rules)}."
    )


def _tell_kind(tables: Tables, model: str, kind: str) -> str:
    described = []
    final = tables["final"]
    for rule in dict.fromkeys(str(row["rule"]) for row in final):
        accuracy = picked(final, "accuracy", model=model, kind=kind, rule=rule)
        rate = picked(final, "rate", model=model, kind=kind, rule=rule)[0]
        half, whole = (
            spread(seconds_to(tables, model, kind, rule, part), 0) for part in (EARLY, 1.0)
        )
        own = f", rate {rate:g}" if kind == "own" else ""
        percent = spread([100 * a for a in accuracy], 1)
        described.append(f"{rule} {percent} % ({half}, {whole}{own})")
    return ", ".join(described)


def _yes_or_no(losing: list[str], rules: list[str]) -> str:
    if not losing:
        return "no"
    return "yes, all" if losing == rules else f"{', '.join(losing)} yes, others no"


DELAY = Experiment(
    name="delay",
    question="Does it pay to use gradients k updates late, to hide their exchange?",
    expected=(
        "Daily et al., 8 GPUs: delayed exchange makes 1.7 times the iterations a second with "
        "AlexNet (k = 2) and 1.17 times with GoogLeNet, and all come to the same accuracy in the "
        "end. By their own table AlexNet needs more time to an early accuracy with a delay of 2 "
        "than without (about 298 s against 200 s, to 1.69 %)."
    ),
    measure=measure,
    draw=draw,
    tell=tell,
    needs=tiny_imagenet.SOURCES,
)
