# SPDX-License-Identifier: BSD-3-Clause
"""How many of 100 workers should be backups? Time per update x updates needed, and the planner.

The experiment counts the updates to a target for each number N of gradients per update, with N
workers and a learning rate proportional to N. The simulator tells how long it takes to wait for N
of 100 workers. The product predicts, for every b, when training reaches the target; training
directly with a few values of b checks the prediction. Then the planner chooses b from a short
pilot, and the experiment measures what its choice costs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import isfinite
from statistics import fmean

import numpy as np

from paceline.lab.data import mnist
from paceline.lab.experiment import Experiment, Lab, Rows, Tables
from paceline.lab.experiments.choose_b_report import describe, draw
from paceline.lab.experiments.curves import CurvePoint, first_reached
from paceline.lab.experiments.settings import CHEN
from paceline.lab.experiments.tables import column
from paceline.lab.gradient_norms import with_norms
from paceline.lab.problems.images import Digits
from paceline.lab.recipe import Recipe
from paceline.lab.trial import Trial
from paceline.lab.updates_formula import UpdatesToTarget
from paceline.latency import parse_latency
from paceline.sim.cluster import Cluster
from paceline.sim.convergence import (
    Convergence,
    at_least,
    estimate_noise_scale,
    every_gradient_counts,
    measured,
    noise_scale,
)
from paceline.sim.fast import draw_times, version_durations
from paceline.sim.planner import plan
from paceline.sim.recorded_times import recorded_times
from paceline.sim.simulate import simulate
from paceline.spec import Late, RunSpec
from paceline.trace.schema import Trace

__all__ = ["CHOOSE_B"]

TableRow = dict[str, float | str]

RATE = 0.0005  # per sample of an update
AVERAGED = 1000  # samples that the moving average of the weights spans
SCORED_EVERY = 400  # samples
PILOT = 50  # updates
NORMS_EVERY = 5  # of them
LATES: tuple[Late, Late] = ("cancel", "finish")


@dataclass(frozen=True)
class ChooseBSettings:
    """The size of the experiment."""

    workers: int
    batch: int
    needed: Sequence[int]
    """Each N to try with N workers; includes the number of all workers."""
    backups: Sequence[int]
    """Each b to try with all workers; `needed` includes the N of each."""
    repeats: int
    """Trainings per seed of the lab, because the time to a target varies a lot."""
    target: float
    scored: int
    width: float
    rounds: int
    """Updates to simulate."""


FULL = ChooseBSettings(
    workers=100,
    batch=1,
    needed=(10, 25, 50, 75, 90, 94, 96, 98, 99, 100),
    backups=(0, 1, 2, 4, 6, 10, 25),
    repeats=3,
    target=0.93,
    scored=1000,
    width=1.0,
    rounds=4000,
)
QUICK = ChooseBSettings(
    workers=20,
    batch=5,
    needed=(10, 19, 20),
    backups=(0, 1, 10),
    repeats=1,
    target=0.85,
    scored=300,
    width=0.5,
    rounds=1000,
)


# ----------------------------------------------------------------------------------------- trials


def _problem(lab: Lab, settings: ChooseBSettings, seed: int) -> Digits:
    return Digits(
        batch=settings.batch,
        seed=seed,
        data=lab.data,
        scored=settings.scored,
        width=settings.width,
    )


def _recipe(samples: int) -> Recipe:
    """Return the recipe for updates of this many samples."""
    return Recipe(RATE * samples, ema=1 - samples / AVERAGED)


def _trial(lab: Lab, settings: ChooseBSettings, workers: int, backups: int, seed: int) -> Trial:
    problem = _problem(lab, settings, seed)
    epochs = 1.0  # several times what is needed
    return Trial(
        problem=problem,
        recipe=_recipe((workers - backups) * settings.batch),
        policy=f"backup:{backups}" if backups else "sync",
        workers=workers,
        latency=CHEN,
        epochs=epochs,
        rows=round(epochs * problem.samples / SCORED_EVERY),
        target=f"accuracy>={settings.target}",
    )


# ----------------------------------------------------------------------------------- measurements


def measure(lab: Lab) -> Tables:
    """Count updates, simulate times, multiply, check; then let the planner choose."""
    settings = QUICK if lab.quick else FULL
    repeats = settings.repeats
    seeds = [repeats * seed + again for seed in lab.seeds for again in range(repeats)]
    counted = [(needed, 0, seed) for needed, seed in product(settings.needed, seeds)]
    direct = [(settings.workers, backups, seed) for backups in settings.backups for seed in seeds]
    results = lab.run([_trial(lab, settings, *case) for case in counted + direct])
    reached = [first_reached(result.rows, settings.target) for result in results]
    updates: Rows = [
        {"needed": needed, "seed": seed, "updates": at.updates}
        for (needed, _, seed), at in zip(counted, reached, strict=False)
    ]
    counts = np.array([column(updates, name) for name in ("needed", "seed", "updates")])
    fit = UpdatesToTarget.fit(*counts[:, np.isfinite(counts[2])])  # some may miss the target
    predicted = _predict(fit, settings)
    return {
        "updates": updates,
        "law": [
            {
                "workers": settings.workers,
                "target": settings.target,
                "floor": fit.floor,
                "scale": fit.scale,
                "scale_samples": fit.scale * settings.batch,
            }
        ],
        "predicted": predicted,
        "direct": [
            _compare(backups, seed, at, updates, predicted)
            for (_, backups, seed), at in zip(direct, reached[len(counted) :], strict=True)
        ],
        "choices": list(_choices(lab, settings, updates, predicted)),
    }


def _predict(fit: UpdatesToTarget, settings: ChooseBSettings) -> Rows:
    """Return the time per update, the updates, and their product, for every b."""
    workers = settings.workers
    times = draw_times(parse_latency(CHEN), workers, settings.rounds, seed=0)
    needed = np.arange(1, workers + 1)
    cancelled, finished = (
        version_durations(times, needed, late)[20:].mean(
            axis=0
        )  # after the first few, it is steady
        for late in LATES
    )
    updates = fit.updates(needed.astype(float))
    return [
        {
            "backups": workers - int(needed[i]),
            "needed": int(needed[i]),
            "updates": float(updates[i]),
            "cancel_step_s": float(cancelled[i]),
            "finish_step_s": float(finished[i]),
            "cancel_s": float(cancelled[i] * updates[i]),
            "finish_s": float(finished[i] * updates[i]),
        }
        for i in reversed(range(workers))
    ]


def _compare(backups: int, seed: int, at: CurvePoint, updates: Rows, predicted: Rows) -> TableRow:
    """Put a direct training beside the product of counted updates and simulated time."""
    [step_s] = column(predicted, "cancel_step_s", backups=backups)
    [needed] = column(predicted, "needed", backups=backups)
    [count] = column(updates, "updates", needed=needed, seed=seed)
    return {
        "backups": backups,
        "seed": seed,
        "updates": at.updates,
        "seconds": at.seconds,
        "product_s": count * step_s,
    }


# ------------------------------------------------------------------------------------ the planner


def _pilot(lab: Lab, settings: ChooseBSettings, seed: int) -> Trace:
    """Return the trace of a short `sync` run of all workers, with gradient norms."""
    spec = RunSpec(workers=settings.workers, steps=PILOT, seed=10_000 + seed)
    trace = simulate("sync", Cluster.parse(CHEN, batch=settings.batch), spec)
    recipe = _recipe(settings.workers * settings.batch)
    return with_norms(trace, _problem(lab, settings, seed), recipe, NORMS_EVERY)


def _choices(
    lab: Lab, settings: ChooseBSettings, updates: Rows, predicted: Rows
) -> Iterator[TableRow]:
    """Yield what the planner chooses, and what the choice costs by the measurements."""
    workers, batch = settings.workers, settings.batch
    means = {n: fmean(column(updates, "updates", needed=n)) for n in settings.needed}
    table = {n: mean for n, mean in means.items() if isfinite(mean)}
    [without_backups] = column(predicted, "updates", backups=0)
    for seed in lab.seeds:
        pilot = _pilot(lab, settings, seed)
        cluster = Cluster(recorded_times(pilot, seed=0, with_travel=True).model(), batch=batch)
        noise = estimate_noise_scale(pilot)
        models: dict[str, Convergence] = {
            "every gradient counts": every_gradient_counts(workers, without_backups),
            "noise scale": noise_scale(noise, batch, workers, without_backups),
            "noise scale or more": at_least(noise, batch, workers, without_backups),
            "measured table": measured(table),
        }
        lates = LATES[:1] if lab.quick else LATES
        for late, (name, model) in product(lates, models.items()):
            seconds = column(predicted, f"{late}_s")  # by b, from 0
            best = int(np.argmin(seconds))
            spec = RunSpec(workers=workers, late=late)
            chosen = plan(cluster, spec, model).best.backups
            yield {
                "late": late,
                "seed": seed,
                "model": name,
                "pilot_updates": PILOT,
                "noise_samples": noise,
                "backups": chosen,
                "best_backups": best,
                "cost_percent": 100 * (seconds[chosen] / seconds[best] - 1),
            }


CHOOSE_B = Experiment(
    name="choose-b",
    question="How many of 100 workers should be backups, and does the planner find that number?",
    expected=(
        "Chen et al., section 3.1, estimate the time to converge as the mean time until N of 100 "
        "gradients have arrived, times the updates that N gradients per update need. Waiting for "
        "the last four gradients costs half as much again as waiting for the first 96, so a few "
        "backups should pay and many should not. The estimate ignores that late workers are still "
        "busy when the next update starts."
    ),
    measure=measure,
    draw=draw,
    describe=describe,
    needs=mnist.SOURCES,
)
