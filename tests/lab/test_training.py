# SPDX-License-Identifier: BSD-3-Clause
"""Training according to a schedule."""

from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from torch import nn

import fakes
from paceline.errors import SpecError
from paceline.lab.problem import Draw, Problem
from paceline.lab.recipe import Recipe
from paceline.lab.training import Training
from paceline.lab.updates_of_trace import Step, StepPart, schedule
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from toys import Clouds

RECIPE = Recipe(0.1, momentum=0.9)


def steps_of(policy, *, workers=5, steps=30):
    spec = RunSpec(workers=workers, steps=steps, seed=1)
    return schedule(simulate(policy, Cluster.parse("10ms + exp:10ms", batch=4), spec))


def weights(training):
    return torch.cat([p.detach().flatten() for p in training.model.parameters()])


def trained(problem, steps, recipe=RECIPE):
    training = Training(problem, steps, recipe)
    training.run()
    return training


def test_sync_is_plain_training_with_a_large_batch():
    problem = Clouds()
    torch.manual_seed(problem.seed)
    model = problem.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(30):
        optimizer.zero_grad()
        problem.losses(model, [Draw(worker, number) for worker in range(5)]).mean().backward()
        optimizer.step()
    plain = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.allclose(weights(trained(problem, steps_of("sync"))), plain, rtol=1e-12)


def test_stale_gradient_is_computed_at_its_own_version():
    """Two updates, both computed at the initial weights: the second step uses its own gradient."""
    problem = Clouds()
    steps = [
        Step(1, 0.1, (StepPart(Draw(0, 0), 0, 4, 1.0, 1.0),)),
        Step(2, 0.2, (StepPart(Draw(1, 0), 0, 4, 1.0, 0.5),)),
    ]
    torch.manual_seed(problem.seed)
    model = problem.build()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    for draw, scale in ((Draw(0, 0), 1.0), (Draw(1, 0), 0.5)):
        model.zero_grad()
        problem.losses(model, [draw]).sum().backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters()])
        expected -= 0.1 * scale * grads
    assert torch.allclose(weights(trained(problem, steps, Recipe(0.1))), expected, rtol=1e-12)


@pytest.mark.parametrize("policy", ["backup:1", "softsync:3", "batchsync:7", "delayed:1"])
def test_gradients_computed_together_equal_those_computed_alone(monkeypatch, policy):
    together = weights(trained(Clouds(), steps_of(policy)))
    monkeypatch.setattr(Clouds, "pass_samples", 1)
    assert torch.allclose(weights(trained(Clouds(), steps_of(policy))), together, rtol=1e-12)


def test_mini_batches_are_weighted_by_samples():
    problem = Clouds()
    parts = StepPart(Draw(0, 0), 0, 4, 0.25, 1.0), StepPart(Draw(1, 0), 0, 12, 0.75, 1.0)
    steps = [Step(1, 0.1, parts)]
    torch.manual_seed(problem.seed)
    model = problem.build()
    (
        problem.losses(model, [Draw(0, 0), Draw(1, 0)]) @ torch.tensor([0.25, 0.75]).double()
    ).backward()
    expected = torch.cat([(p - 0.1 * p.grad).detach().flatten() for p in model.parameters()])
    assert torch.allclose(weights(trained(problem, steps, Recipe(0.1))), expected, rtol=1e-12)


@dataclass(frozen=True, kw_only=True)
class OneHot(Problem):
    """The gradient of each draw is a unit vector of its own, so an update shows its weights."""

    name = "one-hot"
    batch: int = 1
    places: dict[Draw, int]
    samples = 1

    def build(self):
        model = nn.Module()
        model.theta = nn.Parameter(torch.zeros(len(self.places), dtype=torch.float64))
        return model

    def losses(self, model, draws):
        return model.theta[[self.places[draw] for draw in draws]]

    def evaluate(self, model):
        return {}


@pytest.mark.parametrize("policy", fakes.POLICY_TABLE)
def test_law_5_lab_applies_the_weights_that_the_policy_decided(policy):
    cluster = fakes.Cluster.of(policy, steps=10)
    for _ in fakes.random_steps(cluster, Random(6), 600):
        pass
    steps = schedule(fakes.trace_of(cluster))
    draws = [part.draw for step in steps for part in step.parts]
    problem = OneHot(places={draw: place for place, draw in enumerate(draws)})

    training = trained(problem, steps, Recipe(1.0))

    decided = [
        weight * scale
        for update in cluster.updates
        for weight, scale in zip(update.weights, update.scales, strict=True)
    ]
    assert decided
    assert (-weights(training)).tolist() == decided


def test_dropped_gradients_are_never_computed(monkeypatch):
    computed = []
    losses = Clouds.losses

    def counted(self, model, draws):
        computed.extend(draws)
        return losses(self, model, draws)

    monkeypatch.setattr(Clouds, "losses", counted)
    steps = steps_of("backup:2")
    trained(Clouds(), steps)
    assert len(computed) == 3 * len(steps)


@pytest.mark.parametrize("policy", ["sync", "async", "softsync:3", "delayed:2"])
def test_training_continued_from_a_state_is_bit_identical(policy):
    problem, steps = Clouds(dropout=0.3), steps_of(policy)
    recipe = replace(RECIPE, ema=0.9)
    whole = trained(problem, steps, recipe)
    first = Training(problem, steps, recipe)
    first.run(17)
    second = Training(problem, steps, recipe)
    second.load_state(first.state())
    second.run()
    assert torch.equal(weights(whole), weights(second))
    assert whole.average is not None
    assert second.average is not None
    for mine, other in zip(whole.average.parameters(), second.average.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_learning_rate_follows_the_data_used():
    recipe = Recipe(0.8, fall_from=0.5)
    assert recipe.rate(0.0, 10.0) == 0.8
    assert recipe.rate(5.0, 10.0) == 0.8
    assert recipe.rate(7.5, 10.0) == pytest.approx(0.4)
    assert recipe.rate(10.0, 10.0) == 0.0
    with pytest.raises(SpecError, match="rate must be > 0"):
        Recipe(0.0)


def test_clipping_applies_to_the_average():
    steps = steps_of("sync", steps=1)
    before = weights(Training(Clouds(), steps, RECIPE))
    moved = weights(trained(Clouds(), steps, Recipe(0.1, clip_norm=0.01))) - before
    assert moved.norm().item() == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_training_stops_at_a_non_finite_gradient(monkeypatch):
    steps = steps_of("async")
    losses = Clouds.losses
    bad = steps[11].parts[0].draw

    def exploding(self, model, draws):
        return losses(self, model, draws) * (torch.inf if bad in draws else 1.0)

    monkeypatch.setattr(Clouds, "losses", exploding)
    training = trained(Clouds(), steps)
    assert training.is_diverged
    assert training.version == 11


def test_models_are_trained_in_training_mode_and_scored_in_evaluation_mode():
    seen = []

    class Watched(Clouds):
        def evaluate(self, model):
            seen.append(("evaluate", model.training, torch.is_grad_enabled()))
            return super().evaluate(model)

        def losses(self, model, draws):
            seen.append(("losses", model.training, torch.is_grad_enabled()))
            return super().losses(model, draws)

    training = Training(Watched(), steps_of("sync", steps=2), RECIPE)
    training.run(1)
    row = training.score()
    training.run()
    assert seen == [("losses", True, True), ("evaluate", False, False), ("losses", True, True)]
    assert (row.update, row.epochs) == (1, 20 / 400)
    assert row.scores["accuracy"] >= 0


def test_schedule_without_updates_is_refused():
    with pytest.raises(SpecError, match="no update"):
        Training(Clouds(), [], RECIPE)


def test_integer_buffers_are_not_averaged():
    class Counted(Clouds):
        def build(self):
            model = super().build()
            model.register_buffer("count", torch.zeros(1, dtype=torch.long))
            return model

    assert isinstance(trained(Counted(), steps_of("async")).model, nn.Module)


def test_frozen_parameters_do_not_change():
    class Frozen(Clouds):
        def build(self):
            model = super().build()
            next(model.parameters()).requires_grad_(False)
            return model

    steps = steps_of("async")
    recipe = replace(RECIPE, weight_decay=0.1, ema=0.9)
    first = next(Training(Frozen(), steps, recipe).model.parameters())
    training = trained(Frozen(), steps, recipe)
    assert torch.equal(next(training.model.parameters()), first)
    assert not torch.equal(weights(training), weights(Training(Frozen(), steps, recipe)))


def test_model_with_several_dtypes_is_refused():
    class Mixed(Clouds):
        def build(self):
            return nn.Sequential(super().build(), nn.Linear(2, 2).float())

    with pytest.raises(SpecError, match=r"one type, got .*float32.*float64"):
        Training(Mixed(), steps_of("sync"), RECIPE)
