# SPDX-License-Identifier: BSD-3-Clause
"""The gradient that a shard applies is the one that the core decided on, under every policy.

A real `Decider` runs through random schedules, and its actions go to a real `Shard`. The applied
gradient must be the sum of weight x scale x gradient over the contributions, with the decided
weights and scales, whenever the gradients were added.
"""

from dataclasses import replace
from random import Random

import pytest
import torch
import torch._dynamo  # an optimizer loads it, and it sets an environment variable
from torch import nn

from fakes import POLICY_TABLE, Cluster, random_steps
from paceline.core.events import Accept, ApplyUpdate, GradientArrived, SendParams, WorkerLeft
from paceline.errors import InternalError
from paceline.run.net.in_process import InProcessStore
from paceline.run.tensors.layout import gather
from paceline.run.tensors.shard import Shard
from paceline.run.tensors.sums import SlotGradient

STEPS = 120
SIZE = 3
TIMES = ["at the end", "immediately", "as the server does"]


class RecordingSGD(torch.optim.SGD):
    """Keeps the gradients that it stepped along."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=1e-3)
        self.applied = []

    def step(self, closure=None):
        [parameter] = self.param_groups[0]["params"]
        self.applied.append(parameter.grad.clone())
        super().step(closure)


class Mirror:
    """Performs the tensor actions of a decider on a real shard, as the executor does."""

    def __init__(self, policy, when, rng):
        self.when, self.rng = when, rng
        model = nn.Linear(SIZE, 1, bias=False, dtype=torch.float64)
        self.optimizer = RecordingSGD(model.parameters())
        state = gather([model], [self.optimizer])
        self.store = InProcessStore(state.spec)
        self.shard = Shard(state, [], self.store, versions_kept=policy.versions_kept)
        self.slots = {}
        self.gradients = {}  # by update, in the order of acceptance
        self.applied = []  # what was decided: update, expected gradient, sum of the magnitudes

    def perform(self, event, actions):
        if isinstance(event, WorkerLeft):
            self._release(event.worker)
            self.slots.pop(event.worker, None)
        for action in actions:
            match action:
                case Accept():
                    self._accept(action, event)
                case ApplyUpdate():
                    self._apply(action)
                case SendParams(worker=worker):
                    self._release(worker)
                    self._overwrite(worker)
                case _:
                    pass
        if self.when == "as the server does" and self.rng.random() < 0.3:
            self.shard.sum_early(self.shard.version + 1, self.rng.choice([2, float("inf")]))

    def _accept(self, action, event):
        assert isinstance(event, GradientArrived)
        worker = action.worker
        if self.when == "at the end" or worker not in self.slots:
            self.slots[worker] = self.store.new_accumulator()
        slot = self.slots[worker]
        values = torch.tensor([self.rng.gauss(0, 1) for _ in range(SIZE)], dtype=torch.float64)
        slot.parameters[0][0].copy_(values[None])
        gradient = SlotGradient(worker, 0, action.samples, action.scale, frozenset(), slot)
        self.shard.add(action.update, gradient)
        self.gradients.setdefault(action.update, []).append(values)
        if self.when == "immediately":
            self._release(worker)
            self._overwrite(worker)

    def _apply(self, action):
        self.shard.reduce(action)
        self.shard.step(action.update)
        self.shard.publish(action.update)
        gradients = self.gradients.pop(action.update)
        factors = [w * s for w, s in zip(action.weights, action.scales, strict=True)]
        terms = torch.stack([f * g for f, g in zip(factors, gradients, strict=True)])
        self.applied.append((action, terms.sum(0), terms.abs().sum(0)))

    def _release(self, worker):
        if self.when != "at the end":
            self.shard.release_slot(worker)

    def _overwrite(self, worker):
        """Let the worker begin its next gradient in the slot."""
        if self.when != "at the end" and worker in self.slots:
            self.slots[worker].parameters[0][0].fill_(torch.nan)


def run(policy, when, seed):
    cluster = Cluster.of(policy, workers=3)
    mirror = Mirror(cluster.decider.policy, when, Random(f"shard {seed}"))
    for event, actions in cluster.log:
        mirror.perform(event, actions)
    for event, actions in random_steps(cluster, Random(seed), STEPS):
        mirror.perform(event, actions)
    return mirror


@pytest.mark.parametrize("when", TIMES)
@pytest.mark.parametrize("policy", POLICY_TABLE)
def test_applied_gradient_has_exactly_the_decided_weights_and_scales(policy, when):
    samples = set()
    for seed in range(4):
        mirror = run(policy, when, seed)
        assert mirror.applied, f"seed {seed} made no update"
        pairs = zip(mirror.applied, mirror.optimizer.applied, strict=True)
        for (action, expected, magnitude), applied in pairs:
            error = (applied.flatten() - expected).abs()
            rounding = 1e-15 * (len(action.contributions) + 2)
            assert (error <= rounding * magnitude).all(), (seed, action)
            samples |= {contribution.samples for contribution in action.contributions}
    assert len(samples) > 1  # the schedules were unequal


@pytest.mark.parametrize("policy", ["softsync:2", "async:lr=inverse"])
def test_schedules_include_staleness_scales(policy):
    """Otherwise the test above would not check scales."""
    scales = {
        s for seed in range(4) for a, _, _ in run(policy, TIMES[2], seed).applied for s in a.scales
    }
    assert len(scales) > 1


class Tampering(Mirror):
    """Hands the shard decisions that differ from what was accepted."""

    def __init__(self, *parts, tamper):
        super().__init__(*parts)
        self.tamper = tamper
        self.was_refused = False

    def _apply(self, action):
        tampered = self.tamper(action)
        if tampered != action:
            with pytest.raises(InternalError):
                self.shard.reduce(tampered)
            self.was_refused = True
        elif not self.was_refused:
            super()._apply(action)


def other_samples(action):
    first, *rest = action.contributions
    return replace(action, contributions=(replace(first, samples=first.samples + 1), *rest))


def other_scale(action):
    return replace(action, scales=(0.75, *action.scales[1:]))


def other_weights(action):
    """Shift weight between two contributions."""
    if len(action.weights) < 2:
        return action
    first, second, *rest = action.weights
    return replace(action, weights=(first + second / 4, second - second / 4, *rest))


@pytest.mark.parametrize("when", TIMES)
@pytest.mark.parametrize("tamper", [other_samples, other_scale, other_weights])
@pytest.mark.parametrize("policy", ["sync", "backup:1", "softsync:2", "delayed:1"])
def test_decision_that_does_not_match_the_accepted_gradients_is_an_internal_error(
    policy, tamper, when
):
    cluster = Cluster.of(policy, workers=3)
    mirror = Tampering(cluster.decider.policy, when, Random(0), tamper=tamper)
    for event, actions in cluster.log:
        mirror.perform(event, actions)
    for event, actions in random_steps(cluster, Random(0), STEPS, faults=False):
        if not mirror.was_refused:
            mirror.perform(event, actions)
    assert mirror.was_refused
