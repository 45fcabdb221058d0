# SPDX-License-Identifier: BSD-3-Clause
"""Does it pay to hide the gradient exchange behind computation, and use gradients k updates late?

The experiment trains small versions of AlexNet and GoogLeNet on twenty classes of Tiny-ImageNet at
32x32, with 8 workers, 8 images per gradient and momentum 0.9. The virtual clock is that of the
networks which Daily et al. measured on 8 GPUs: compute time, bandwidth and the number of servers
are fitted to their iterations per second. Every rule is trained with the best rate of `sync`, as in
the paper, and with its own best rate, out of the same few rates. The first seed decides which rate
is best.
"""

from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING, Literal, NamedTuple

from paceline.lab.data import tiny_imagenet
from paceline.lab.experiment import Experiment, Lab, Rows, Tables
from paceline.lab.experiments.curves import mean_curve, times_to
from paceline.lab.experiments.tables import (
    column,
    curve_rows,
    final_row,
    mean_and_sd,
    seed_count,
)
from paceline.lab.experiments.tuning import edge_note, prefer_high, tune
from paceline.lab.plotting import new_figure, show_percent
from paceline.lab.problems.tiny_imagenet import Tiny
from paceline.lab.recipe import Recipe
from paceline.lab.trial import Trial
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import Update
from paceline.watch.figure_style import WIDTH, describe_axes, legend_below, line_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["DELAY"]

WORKERS, BATCH = 8, 8
RATES = (0.001, 0.003, 0.01)
RULES = ("sync", "delayed:1", "delayed:2", "delayed:3")
NO_EXCHANGE = "nothing sent"
EARLY = 0.5  # of the final accuracy


@dataclass(frozen=True)
class TimedNetwork:
    """A network, and how long it takes on the paper's machines."""

    model: Literal["alexnet", "googlenet"]
    latency: str
    network: str
    paper: dict[str, float]
    """Iterations per second on 8 GPUs, read off figure 1."""
    width: float
    epochs: float


# Compute times vary by 5 %. Without that, all workers would send at the same time, and nothing
# could be hidden. The models have their published sizes. In the paper, workers send without being
# admitted.
NETWORKS: dict[str, TimedNetwork] = {
    one.model: one
    for one in (
        TimedNetwork(
            "alexnet",
            latency="lognormal:41.2ms,0.05",
            network="model=244MB,bandwidth=32.1GB,servers=2,transfers=all",
            paper=dict(zip((NO_EXCHANGE, *RULES), (22.6, 10.0, 13.8, 16.8, 16.7), strict=True)),
            width=0.5,
            epochs=10.0,
        ),
        TimedNetwork(
            "googlenet",
            latency="lognormal:34.9ms,0.05",
            network="model=28MB,bandwidth=6.35GB,servers=4,transfers=all",
            paper=dict(zip((NO_EXCHANGE, *RULES), (26.7, 19.2, 22.5, 22.1, 22.5), strict=True)),
            width=1.0,
            epochs=4.0,
        ),
    )
}


class DelayCase(NamedTuple):
    """One training run."""

    model: str
    rule: str
    rate: float
    seed: int

    def trial(self, lab: Lab) -> Trial:
        """Return the trial."""
        timed = NETWORKS[self.model]
        return Trial(
            problem=Tiny(
                batch=BATCH,
                seed=self.seed,
                data=lab.data,
                cache=lab.cache,
                model=timed.model,
                width=timed.width,
            ),
            recipe=Recipe(self.rate, momentum=0.9, fall_from=0.5),
            policy=self.rule,
            workers=WORKERS,
            latency=timed.latency,
            network=timed.network,
            epochs=1.0 if lab.quick else timed.epochs,
            rows=5 if lab.quick else 40,
        )


def measure(lab: Lab) -> Tables:
    """Find the best rates, then train with that of `sync` and with each rule's own."""
    models = ("alexnet",) if lab.quick else tuple(NETWORKS)
    rules = ("sync", "delayed:3") if lab.quick else RULES
    best, found = tune(
        lab,
        lab.seeds[:1],
        dict.fromkeys(product(models, rules), RATES[1:2] if lab.quick else RATES),
        lambda pair, rate, seed: DelayCase(*pair, rate, seed).trial(lab),
        prefer_high("accuracy"),
    )
    cases = [
        (kind, DelayCase(model, rule, best[model, "sync" if kind == "same" else rule], seed))
        for kind, model, rule, seed in product(("same", "own"), models, rules, lab.seeds)
    ]
    results = lab.run([case.trial(lab) for _, case in cases])
    done = list(zip(cases, results, strict=True))
    return {
        "rates": [row for model in models for row in _iteration_rates(NETWORKS[model])],
        "tried": [
            final_row(DelayCase(*pair, rate, seed)._asdict(), result, accuracy="accuracy")
            for (pair, rate, seed), result in found.items()
        ],
        "final": [
            final_row({"kind": kind, **case._asdict()}, result, accuracy="accuracy")
            for (kind, case), result in done
        ],
        "curves": [
            row
            for (kind, case), result in done
            for row in curve_rows(
                {"kind": kind, **case._asdict()}, result, accuracy="accuracy", loss="loss"
            )
        ],
    }


def _iteration_rates(timed: TimedNetwork) -> Rows:
    """Return the iterations per second of the simulator and of the paper."""
    return [
        {
            "model": timed.model,
            "rule": rule,
            "paper": paper,
            "simulated": iterations_per_s(timed, rule),
        }
        for rule, paper in timed.paper.items()
    ]


def iterations_per_s(timed: TimedNetwork, rule: str, steps: int = 1000) -> float:
    """Simulate a rule; under `NO_EXCHANGE`, nothing has to be sent."""
    sends = "" if rule == NO_EXCHANGE else timed.network
    cluster = Cluster.parse(timed.latency, sends, batch=BATCH)
    spec = RunSpec(workers=WORKERS, steps=steps)
    trace = simulate("sync" if rule == NO_EXCHANGE else rule, cluster, spec)
    return steps / max(record.t for record in trace.records if isinstance(record, Update))


def draw(tables: Tables) -> "Figure":
    """Draw accuracy against updates and time, and against time at each rule's own rate."""
    models = list(dict.fromkeys(str(row["model"]) for row in tables["final"]))
    figure = new_figure(WIDTH, 3.3 * len(models) + 0.7, f"Delayed gradients, {WORKERS} workers")
    panels = figure.subplots(len(models), 3, squeeze=False, sharey="row")
    for row, model in zip(panels, models, strict=True):
        for axes, kind, x in zip(
            row, ("same", "same", "own"), ("updates", "seconds", "seconds"), strict=True
        ):
            _draw_curves(axes, tables, model, kind, x)
        row[0].set(ylabel=f"{model}, accuracy on test images", ylim=(0, None))
        show_percent(row[0])
    legend_below(figure, panels[0][0])
    return figure


def _draw_curves(axes: "Axes", tables: Tables, model: str, kind: str, x: str) -> None:
    for rule in dict.fromkeys(str(row["rule"]) for row in tables["final"]):
        axes.plot(*_curve(tables, model, kind, rule, x), label=rule, **line_style(rule))
    same = column(tables["final"], "rate", model=model, kind="same")[0]
    rates = f"Learning rate {same:g} for all" if kind == "same" else "Best rate of each rule"
    describe_axes(axes, rates, x if x == "updates" else "virtual time (s)")


def _curve(
    tables: Tables, model: str, kind: str, rule: str, x: str = "seconds"
) -> tuple[list[float], list[float]]:
    """Return the accuracy, averaged over the seeds."""
    return mean_curve(_curves(tables, model, kind, rule), x, "accuracy")


def _curves(tables: Tables, model: str, kind: str, rule: str) -> Rows:
    wanted = (model, kind, rule)
    return [r for r in tables["curves"] if (r["model"], r["kind"], r["rule"]) == wanted]


def seconds_to(tables: Tables, model: str, kind: str, rule: str, part: float) -> list[float]:
    """Return when each seed reaches this part of the final accuracy of `sync`; NaN if never."""
    _, accuracy = _curve(tables, model, kind, "sync")
    own = _curves(tables, model, kind, rule)
    return times_to(own, "accuracy", part * accuracy[-1], is_high=True)


def describe(tables: Tables) -> str:
    """Summarize the tables in words."""
    models = dict.fromkeys(str(row["model"]) for row in tables["final"])
    own = [row for row in tables["final"] if row["kind"] == "own"]
    notes = f"{seed_count(tables['final'])}.{edge_note(tables['tried'], own, 'model', 'rule')}"
    return "\n\n".join([notes, *(_describe_model(tables, model) for model in models)])


def _describe_model(tables: Tables, model: str) -> str:
    speeds = ", ".join(
        f"{row['rule']} {float(row['simulated']):.1f} ({float(row['paper']):.1f})"
        for row in tables["rates"]
        if row["model"] == model
    )
    updates = max(column(tables["final"], "updates", model=model))
    rate = column(tables["final"], "rate", model=model, kind="same")[0]
    rules = [r for r in dict.fromkeys(str(row["rule"]) for row in tables["final"]) if r != "sync"]
    slower = [
        rule
        for rule in rules
        if not fmean(seconds_to(tables, model, "same", rule, EARLY))
        <= fmean(seconds_to(tables, model, "same", "sync", EARLY))
    ]
    return (
        f"{model}: iterations per second, simulated (in the paper): {speeds}. Accuracy after "
        f"{updates:g} updates, and in parentheses the seconds to half of sync's final accuracy and "
        f"to all of it:\n\n"
        f"- with sync's rate of {rate:g}: {_describe_kind(tables, model, 'same')}\n"
        f"- with the best rate of each: {_describe_kind(tables, model, 'own')}\n\n"
        f"With sync's rate, delayed rules that need more time than sync to half of its accuracy: "
        f"{_which(slower, rules)}."
    )


def _describe_kind(tables: Tables, model: str, kind: str) -> str:
    parts = []
    final = tables["final"]
    for rule in dict.fromkeys(str(row["rule"]) for row in final):
        accuracy = column(final, "accuracy", model=model, kind=kind, rule=rule)
        rate = column(final, "rate", model=model, kind=kind, rule=rule)[0]
        half, whole = (
            mean_and_sd(seconds_to(tables, model, kind, rule, part), 0) for part in (EARLY, 1.0)
        )
        own = f", rate {rate:g}" if kind == "own" else ""
        percent = mean_and_sd([100 * a for a in accuracy], 1)
        parts.append(f"{rule} {percent} % ({half}, {whole}{own})")
    return ", ".join(parts)


def _which(chosen: list[str], rules: list[str]) -> str:
    if not chosen:
        return "none"
    return "all" if chosen == rules else ", ".join(chosen)


DELAY = Experiment(
    name="delay",
    question="Does it pay to use gradients k updates late, to hide their exchange?",
    expected=(
        "Daily et al., 8 GPUs: delayed exchange gives 1.7 times as many iterations per second with "
        "AlexNet (k = 2) and 1.17 times with GoogLeNet, and all delays reach the same accuracy in "
        "the end. By their own table, AlexNet needs more time to an early accuracy with a delay of "
        "2 than without one (about 298 s against 200 s, to 1.69 %)."
    ),
    measure=measure,
    draw=draw,
    describe=describe,
    needs=tiny_imagenet.SOURCES,
)
