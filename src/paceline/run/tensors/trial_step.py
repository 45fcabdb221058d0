# SPDX-License-Identifier: BSD-3-Clause
"""Find out whether an optimizer can step, without stepping it.

If a step fails on the server, the run ends for every worker. So what one worker sends is tried
first, on a copy of the optimizer that has a single element of each parameter. The copy calls no
hooks, and the optimizer itself doesn't change.

Only torch's own optimizers can be tried. The constructor of a script's own optimizer may take any
arguments, and its step may do anything.
"""

import inspect
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["FAILURES", "can_be_tried", "refusal_of_value", "step_failure"]

FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What an optimizer raises if it can't use its options or state."""


def can_be_tried(optimizer: Optimizer) -> bool:
    """Return whether this is one of torch's own optimizers, not a subclass of one."""
    kind = type(optimizer)
    return getattr(torch.optim, kind.__name__, None) is kind


def refusal_of_value(optimizer: Optimizer, name: str, value: Any) -> str:
    """Return why the optimizer's constructor refuses this value of an option; "" if it doesn't.

    It refuses numbers that are out of range. The other options are left at their defaults, because
    a script may change several options one by one.
    """
    kind: Any = type(optimizer)
    if not can_be_tried(optimizer) or name not in _arguments(kind):
        return ""
    if value is None or isinstance(value, bool):  # valid on its own, so `step_failure` must tell
        return ""
    try:
        kind([torch.zeros(1, 1)], **{name: value})
    except FAILURES as error:
        return str(error)
    return ""


@cache
def _arguments(kind: type[Optimizer]) -> frozenset[str]:
    return frozenset(inspect.signature(kind).parameters)


@torch.no_grad()
def step_failure(
    optimizer: Optimizer,
    parameters: Iterable[Tensor],
    options: Mapping[str, Any],
    state: Mapping[Tensor, dict[str, Any]],
) -> str:
    """Return the error of a step with these parameters, options and states; "" if there is none."""
    if not can_be_tried(optimizer):
        return ""
    kind: Any = type(optimizer)
    try:
        copies = {parameter: _one_element(parameter) for parameter in parameters}
        trial = kind(copies.values())
        own = {name: value for name, value in options.items() if name != "params"}
        trial.param_groups[0].update(own)
        for parameter, copy in copies.items():
            if parameter.numel():  # otherwise another server may have it, and step it there
                copy.grad = torch.zeros_like(copy)
            if parameter in state:
                trial.state[copy] = {k: _one_element(v) for k, v in state[parameter].items()}
        inspect.unwrap(kind.step)(trial)  # without the hooks that a script may have for all steps
    except FAILURES as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _one_element(value: Any) -> Any:
    """Return a copy of a tensor's first element, with as many dimensions; other values as is."""
    if not isinstance(value, Tensor):
        return value
    return value.detach()[(slice(0, 1),) * value.dim()].clone()
