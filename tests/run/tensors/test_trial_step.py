# SPDX-License-Identifier: BSD-3-Clause
"""A trial step fails exactly where the real step would, and changes nothing."""

import pytest
import torch
import torch._dynamo  # an optimizer loads it, and it sets an environment variable
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.run.tensors.trial_step import can_be_tried, refusal_of_value, step_failure

NEEDS_MORE = {"LBFGS", "SparseAdam"}  # a closure, or sparse gradients
KINDS = [
    kind
    for name, kind in sorted(vars(torch.optim).items())
    if isinstance(kind, type) and name not in {"Optimizer", *NEEDS_MORE}
]


class Own(torch.optim.SGD):
    """An optimizer that a script defines."""


def weight(steps, kind, **options):
    """Return a parameter and its optimizer after some steps."""
    parameter = nn.Parameter(torch.ones(3, 2))
    optimizer = kind([parameter], **options)
    for _ in range(steps):
        parameter.grad = torch.ones(3, 2)
        optimizer.step()
    parameter.grad = None
    return parameter, optimizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [0, 2])
def test_trial_with_the_optimizer_s_own_options_succeeds(kind, steps):
    parameter, optimizer = weight(steps, kind)
    [group] = optimizer.param_groups
    assert can_be_tried(optimizer)
    assert step_failure(optimizer, [parameter], group, optimizer.state) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_constructor_accepts_the_options_that_it_made(kind):
    _, optimizer = weight(0, kind)
    for name, value in optimizer.defaults.items():
        assert refusal_of_value(optimizer, name, value) == ""
    assert refusal_of_value(optimizer, "lr", -1.0) != ""


def test_trial_changes_nothing():
    parameter, optimizer = weight(1, torch.optim.Adam)
    before = str(optimizer.state_dict())
    [group] = optimizer.param_groups
    step_failure(optimizer, [parameter], group | {"lr": 0.5}, optimizer.state)
    assert str(optimizer.state_dict()) == before
    assert parameter.grad is None
    assert list(optimizer.state) == [parameter]


def test_failure_names_the_error():
    parameter, optimizer = weight(1, torch.optim.Adam)
    options = optimizer.param_groups[0] | {"amsgrad": True}
    failure = step_failure(optimizer, [parameter], options, optimizer.state)
    assert failure == "KeyError: 'max_exp_avg_sq'"
    assert step_failure(optimizer, [parameter], options, {}) == ""


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (2, 3, 4)])
def test_parameter_may_have_any_shape(shape):
    parameter = nn.Parameter(torch.ones(shape))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones(shape)
    optimizer.step()
    [group] = optimizer.param_groups
    assert step_failure(optimizer, [parameter], group, optimizer.state) == ""


def test_hooks_of_the_script_are_not_called():
    parameter, optimizer = weight(0, torch.optim.SGD)
    calls = []
    with register_optimizer_step_pre_hook(lambda *_: calls.append(1)):
        assert step_failure(optimizer, [parameter], optimizer.param_groups[0], {}) == ""
    assert calls == []


def test_script_s_own_optimizer_is_not_tried():
    parameter, optimizer = weight(0, Own)
    assert not can_be_tried(optimizer)
    assert refusal_of_value(optimizer, "lr", -1.0) == ""
    assert step_failure(optimizer, [parameter], {"lr": "text"}, {}) == ""


def test_parameter_that_another_server_has_is_not_stepped():
    """Fused SGD couldn't: it has no momentum where others have one."""
    here, elsewhere = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(0))
    optimizer = torch.optim.SGD([here, elsewhere], momentum=0.9, fused=True)
    here.grad = torch.ones(2)
    optimizer.step()
    [group] = optimizer.param_groups
    assert step_failure(optimizer, [here, elsewhere], group, optimizer.state) == ""
