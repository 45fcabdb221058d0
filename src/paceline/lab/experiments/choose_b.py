# SPDX-License-Identifier: BSD-3-Clause
"""How many of 100 workers should be backups? Time of an update x updates needed, and the planner.

Updates to a target are counted for every number N of gradients in an update, with N workers and a
learning rate in proportion to N. The simulator tells how long waiting for N of 100 takes. The
product says for every b when the target is reached; training with a few b, directly, checks it.
Then the planner chooses b from a short pilot, and we look at what its choice costs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import isfinite
from statistics import fmean

import numpy as np

from paceline.lab.data import mnist
from paceline.lab.experiment import Experiment, Lab, Rows, Tables
from paceline.lab.experiments.choose_b_shown import draw, tell
from paceline.lab.experiments.curves import Moment, reached
from paceline.lab.experiments.settings import CHEN, picked
from paceline.lab.law import Law
from paceline.lab.pilot import with_norms
from paceline.lab.problems.images import Digits
from paceline.lab.recipe import Recipe
from paceline.lab.trial import Trial
from paceline.latency import Recorded, parse_latency
from paceline.sim.cluster import Cluster
from paceline.sim.convergence import (
    Convergence,
    estimate_noise_scale,
    every_gradient_counts,
    measured,
    noise_scale,
)
from paceline.sim.fast import closing_times, draw_times
from paceline.sim.planner import plan
from paceline.sim.recording import recorded_times
from paceline.sim.simulate import simulate
from paceline.spec import Late, RunSpec
from paceline.trace.schema import Trace

__all__ = ["CHOOSE_B"]

Row = dict[str, float | str]

RATE = 0.0005  # for each sample of an update
AVERAGED = 1000  # samples that the moving average of the weights reaches back over
SCORED_EVERY = 400  # samples
PILOT = 50  # updates
NORMS_EVERY = 5  # of them
LATES: tuple[Late, Late] = ("cancel", "finish")


@dataclass(frozen=True)
class Scale:
    """How much of it is done."""

    workers: int
    batch: int
    needed: Sequence[int]
    """Each N that is tried with as many workers, all of them included."""
    backups: Sequence[int]
    """Each b that is tried with all workers; the N that belongs to it is tried as well."""
    repeats: int
    """Trainings for each seed of the lab: how soon a target is reached depends on luck."""
    target: float
    scored: int
    width: float
    rounds: int
    """Updates that are simulated."""


FULL = Scale(
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
QUICK = Scale(
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


def _problem(lab: Lab, scale: Scale, seed: int) -> Digits:
    return Digits(
        batch=scale.batch, seed=seed, data=lab.data, scored=scale.scored, width=scale.width
    )


def _recipe(samples: int) -> Recipe:
    """For updates of so many samples."""
    return Recipe(RATE * samples, ema=1 - samples / AVERAGED)


def _trial(lab: Lab, scale: Scale, workers: int, backups: int, seed: int) -> Trial:
    problem = _problem(lab, scale, seed)
    epochs = 1.0  # several times what is needed
    return Trial(
        problem=problem,
        recipe=_recipe((workers - backups) * scale.batch),
        policy=f"backup:{backups}" if backups else "sync",
        workers=workers,
        latency=CHEN,
        epochs=epochs,
        rows=round(epochs * problem.samples / SCORED_EVERY),
        target=f"accuracy>={scale.target}",
    )


# ----------------------------------------------------------------------------------- measurements


def measure(lab: Lab) -> Tables:
    """Count updates, simulate times, multiply, check; then let the planner choose."""
    scale = QUICK if lab.quick else FULL
    seeds = [scale.repeats * seed + again for seed in lab.seeds for again in range(scale.repeats)]
    counted = [(needed, 0, seed) for needed, seed in product(scale.needed, seeds)]
    direct = [(scale.workers, backups, seed) for backups, seed in product(scale.backups, seeds)]
    outcomes = lab.outcomes([_trial(lab, scale, *case) for case in counted + direct])
    found = [reached(outcome.rows, scale.target) for outcome in outcomes]
    updates: Rows = [
        {"needed": needed, "seed": seed, "updates": there.updates}
        for (needed, _, seed), there in zip(counted, found, strict=False)
    ]
    counts = np.array([picked(updates, name) for name in ("needed", "seed", "updates")])
    law = Law.of(*counts[:, np.isfinite(counts[2])])  # some may never have come to the target
    predicted = _predicted(law, scale)
    return {
        "updates": updates,
        "law": [
            {
                "workers": scale.workers,
                "target": scale.target,
                "floor": law.floor,
                "scale": law.scale,
                "scale_samples": law.scale * scale.batch,
            }
        ],
        "predicted": predicted,
        "direct": [
            _checked(backups, seed, there, updates, predicted)
            for (_, backups, seed), there in zip(direct, found[len(counted) :], strict=True)
        ],
        "choices": list(_choices(lab, scale, updates, predicted)),
    }


def _predicted(law: Law, scale: Scale) -> Rows:
    """For every b: the time of an update, updates, and their product."""
    workers = scale.workers
    times = draw_times(parse_latency(CHEN), workers, scale.rounds, seed=0)
    needed = np.arange(1, workers + 1)
    cancelled, finished = (
        closing_times(times, needed, late)[20:].mean(axis=0)  # lateness has settled by then
        for late in LATES
    )
    updates = law.updates(needed.astype(float))
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


def _checked(backups: int, seed: int, there: Moment, updates: Rows, predicted: Rows) -> Row:
    """A direct training, beside the product of what `sync` with N workers and the simulator say."""
    [step_s] = picked(predicted, "cancel_step_s", backups=backups)
    [needed] = picked(predicted, "needed", backups=backups)
    [count] = picked(updates, "updates", needed=needed, seed=seed)
    return {
        "backups": backups,
        "seed": seed,
        "updates": there.updates,
        "seconds": there.seconds,
        "product_s": count * step_s,
    }


# ------------------------------------------------------------------------------------ the planner


def _pilot(lab: Lab, scale: Scale, seed: int) -> Trace:
    """A short run of `sync` with all workers, and norms of gradients; its luck is its own."""
    spec = RunSpec(workers=scale.workers, steps=PILOT, seed=10_000 + seed)
    trace = simulate("sync", Cluster.parse(CHEN, batch=scale.batch), spec)
    recipe = _recipe(scale.workers * scale.batch)
    return with_norms(trace, _problem(lab, scale, seed), recipe, NORMS_EVERY)


def _choices(lab: Lab, scale: Scale, updates: Rows, predicted: Rows) -> Iterator[Row]:
    """What the planner chooses, and what it costs by what was measured."""
    workers, batch = scale.workers, scale.batch
    means = {n: fmean(picked(updates, "updates", needed=n)) for n in scale.needed}
    table = {n: mean for n, mean in means.items() if isfinite(mean)}
    [whole] = picked(predicted, "updates", backups=0)
    for seed in lab.seeds:
        pilot = _pilot(lab, scale, seed)
        times = recorded_times(pilot, seed=0, with_travel=True).times
        noise = estimate_noise_scale(pilot)
        models: dict[str, Convergence] = {
            "every gradient counts": every_gradient_counts(workers, whole),
            "noise scale": noise_scale(noise, batch, workers, whole),
            "measured table": measured(table),
        }
        lates = LATES[:1] if lab.quick else LATES
        for late, (name, model) in product(lates, models.items()):
            seconds = picked(predicted, f"{late}_s")  # by b, from 0
            best = int(np.argmin(seconds))
            spec = RunSpec(workers=workers, late=late)
            chosen = plan(Cluster(Recorded(times), batch=batch), spec, model).best.backups
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
    question="How many of 100 workers should be backups, and does the planner find it?",
    expected=(
        "Chen et al., section 3.1: the time to converge is estimated as the mean time until N of "
        "100 gradients are there times the updates that N needs. The last four gradients cost half "
        "as much again as the first 96, so a few backups should pay, and many should not. That "
        "estimate takes no notice of workers that are still busy with late work."
    ),
    measure=measure,
    draw=draw,
    tell=tell,
    needs=mnist.SOURCES,
)
