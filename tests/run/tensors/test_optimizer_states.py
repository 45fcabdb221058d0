# SPDX-License-Identifier: BSD-3-Clause
"""A state that an optimizer can't step with is refused, and the optimizer stays as it was."""

from copy import deepcopy

import pytest
import torch
import torch._dynamo  # an optimizer loads it, and it sets an environment variable
from torch import nn

from paceline.errors import ProtocolError
from paceline.run.tensors.optimizer_states import load_checked

NAN, INF = float("nan"), float("inf")


class Own(torch.optim.SGD):
    """An optimizer that a script defines."""


class Foreign(torch.optim.Optimizer):
    """An optimizer that has nothing in common with torch's."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["step"] = 0.1


class Training:
    """A model and its optimizer, after some steps."""

    def __init__(self, kind=torch.optim.Adam, steps=1, **options):
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = kind(self.model.parameters(), lr=0.1, **options)
        for _ in range(steps):
            self.step()

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.ones(4, 3)).square().sum().backward()
        self.optimizer.step()

    def load(self, state):
        load_checked(self.optimizer, dict(self.model.named_parameters()), state)

    @property
    def state(self):
        return deepcopy(self.optimizer.state_dict())


KINDS = [torch.optim.Adam, torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop]
KINDS += [torch.optim.Adafactor, torch.optim.NAdam, torch.optim.ASGD, Own]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [0, 1])
def test_state_of_the_same_optimizer_is_loaded(kind, steps):
    saved = Training(kind, steps=3)
    other = Training(kind, steps=steps)
    other.load(saved.state)
    assert str(other.state) == str(saved.state)
    other.step()


def test_momentum_that_has_no_buffer_yet_is_loaded():
    training = Training(torch.optim.SGD, momentum=0.9)
    training.load(Training(torch.optim.SGD, momentum=0.0).state)
    training.step()


@pytest.mark.parametrize("kind", KINDS)
def test_option_that_a_scheduler_has_added_need_not_be_in_the_state(kind):
    training = Training(kind)
    scheduler = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: 0.5**step)
    state = Training(kind, steps=3).state
    assert "initial_lr" not in state["param_groups"][0]
    training.load(state)
    assert training.optimizer.param_groups[0]["initial_lr"] == 0.1
    training.step()
    scheduler.step()


def test_options_that_cannot_be_sent_one_by_one_are_loaded():
    """Adafactor has a None among the numbers of an option."""
    state = Training(torch.optim.Adafactor).state
    state["param_groups"][0]["eps"] = (None, *[0.001])
    Training(torch.optim.Adafactor).load(state)
    state["param_groups"][0]["eps"] = ("a", "b")
    with pytest.raises(ProtocolError, match="eps of parameter group 0 can't be"):
        Training(torch.optim.Adafactor).load(state)


def test_number_of_steps_of_a_script_s_own_optimizer_may_be_anything():
    state = Training(Foreign).state
    changed(("state", 0, "step"), -0.5)(state)
    Training(Foreign).load(state)


def test_optimizer_that_cannot_be_tried_is_loaded():
    """LBFGS can't step without a closure."""
    Training(torch.optim.LBFGS, steps=0).load(Training(torch.optim.LBFGS, steps=0).state)


def test_option_that_only_the_loaded_state_has_is_kept():
    state = Training().state
    state["param_groups"][0]["initial_lr"] = 0.5
    training = Training()
    training.load(state)
    assert training.optimizer.param_groups[0]["initial_lr"] == 0.5


def changed(path, value):
    """Return a function that replaces a part of a state."""

    def change(state):
        *parents, last = path
        for key in parents:
            state = state[key]
        if value is None:
            del state[last]
        else:
            state[last] = value

    return change


AVERAGE = ("state", 0, "exp_avg")
GROUP = ("param_groups", 0)

REFUSED = {
    "a tensor of a wrong shape": (
        changed(AVERAGE, torch.zeros(3, 2)),
        r"exp_avg of weight has the shape \[3, 2\], expected \[2, 3\]",
    ),
    "a vector for a matrix": (changed(AVERAGE, torch.zeros(3)), "expected"),
    "NaN": (changed(AVERAGE, torch.full((2, 3), NAN)), "exp_avg of weight contains NaN"),
    "infinity": (changed(AVERAGE, torch.full((2, 3), INF)), "exp_avg of weight contains NaN"),
    "a number that is NaN": (changed(("state", 1, "own"), [1.0, NAN]), "own of bias contains NaN"),
    "text": (changed(("state", 0), "text"), ""),
    "an unknown parameter": (changed(("state", 7), {}), "there is no parameter 7"),
    "a rate that is text": (
        changed((*GROUP, "lr"), "0.1"),
        "lr of parameter group 0 must be a finite number like 0.1, got '0.1'",
    ),
    "a rate that is NaN": (changed((*GROUP, "lr"), NAN), "must be a finite number like 0.1, got"),
    "a negative rate": (
        changed((*GROUP, "lr"), -1.0),
        "lr of parameter group 0 can't be -1.0: Invalid learning rate: -1.0",
    ),
    "an impossible beta": (changed((*GROUP, "betas"), (1.0, 0.999)), "Invalid beta parameter"),
    "an option for another device": (
        changed((*GROUP, "capturable"), True),
        "the next step would fail with AssertionError: If capturable=True",
    ),
    "an option without its tensors": (
        changed((*GROUP, "amsgrad"), True),
        "the next step would fail with KeyError: 'max_exp_avg_sq'",
    ),
    "a negative number of steps": (
        changed(("state", 1, "step"), torch.tensor(-1.0)),
        r"step of bias must be a whole number >= 0, got -1",
    ),
    "half a step": (changed(("state", 1, "step"), torch.tensor(0.5)), "whole number >= 0, got 0.5"),
    "steps that are a number": (changed(("state", 1, "step"), -2), "step of bias"),
    "no rate": (changed((*GROUP, "lr"), None), "parameter group 0 has no lr"),
    "a wrong number of betas": (changed((*GROUP, "betas"), [0.9]), "betas of parameter group 0"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("steps", [0, 1])
def test_state_is_refused_and_changes_nothing(what, steps):
    change, reason = REFUSED[what]
    state = Training().state
    change(state)
    training = Training(steps=steps)
    parts = training.optimizer.state, training.optimizer.param_groups
    before = str(training.state)
    with pytest.raises(ProtocolError, match=rf"cannot load this state: .*{reason}") as error:
        training.load(state)
    assert str(error.value).endswith("load a state_dict() of the same optimizer and model")
    assert str(training.state) == before
    assert parts[0] is training.optimizer.state
    assert parts[1] is training.optimizer.param_groups
    training.step()


@pytest.mark.parametrize("value", [None, 3.0])
def test_part_that_the_optimizer_has_must_be_there(value):
    training, state = Training(), Training().state
    changed(AVERAGE, value)(state)
    with pytest.raises(ProtocolError, match=r"has no exp_avg|exp_avg of weight is a float"):
        training.load(state)


def test_shapes_of_a_script_s_own_optimizer_are_those_that_it_has():
    state = Training(Own, momentum=0.9).state
    changed(("state", 0, "momentum_buffer"), torch.zeros(5, 5))(state)
    Training(Own, steps=0, momentum=0.9).load(state)  # it may mean anything
    with pytest.raises(ProtocolError, match=r"has the shape \[5, 5\], expected \[2, 3\]"):
        Training(Own, momentum=0.9).load(state)
