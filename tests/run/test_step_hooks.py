# SPDX-License-Identifier: BSD-3-Clause
"""A step is noticed once, however many classes of the optimizer it passes through."""

import pytest
import torch
import torch._dynamo  # optimizers import it, and it sets an environment variable
from torch import nn

from paceline.run.step_hooks import call_after_step


class Derived(torch.optim.SGD):
    """Its step calls that of its base class, as many times as `repeats` says."""

    repeats = 1

    def step(self, closure=None):
        for _ in range(self.repeats):
            super().step(closure)


class MoreDerived(Derived):
    """Its step passes through three classes."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.fixture
def counted():
    """Return a function that makes an optimizer, and a list that grows with its steps."""

    def make(kind):
        model = nn.Linear(1, 1)
        for other in (torch.optim.SGD, Derived):  # torch wraps `step` when it makes the first one
            other(model.parameters(), lr=0.1)
        optimizer, steps = kind(model.parameters(), lr=0.1), []
        call_after_step(optimizer, lambda: steps.append(1))
        return optimizer, steps

    return make


@pytest.mark.parametrize("kind", [torch.optim.SGD, Derived, MoreDerived, torch.optim.Adam])
def test_each_step_is_noticed_once(counted, kind):
    optimizer, steps = counted(kind)
    for count in range(1, 4):
        optimizer.step()
        assert len(steps) == count


def test_step_that_calls_its_base_class_often_is_noticed_once(counted):
    optimizer, steps = counted(Derived)
    optimizer.repeats = 3
    optimizer.step()
    assert len(steps) == 1


def test_step_with_a_closure_is_noticed_once(counted):
    optimizer, steps = counted(torch.optim.LBFGS)
    [weight, _] = optimizer.param_groups[0]["params"]
    evaluations = []

    def closure():
        evaluations.append(1)
        optimizer.zero_grad()
        loss = (weight - 3).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert len(evaluations) > 1
    assert len(steps) == 1


@pytest.mark.parametrize("kind", [torch.optim.SGD, MoreDerived])
def test_step_that_raises_is_not_noticed_and_the_next_one_is(counted, kind):
    optimizer, steps = counted(kind)

    def closure():
        raise ValueError("bad luck")

    for count in (1, 2):
        with pytest.raises(ValueError, match="bad luck"):
            optimizer.step(closure)
        assert len(steps) == count - 1
        optimizer.step()
        assert len(steps) == count


def test_steps_of_two_optimizers_are_noticed_separately(counted):
    (one, ones), (two, twos) = counted(Derived), counted(torch.optim.SGD)

    def closure():
        two.step()
        return torch.zeros(())

    one.step(closure)
    assert (len(ones), len(twos)) == (1, 1)
