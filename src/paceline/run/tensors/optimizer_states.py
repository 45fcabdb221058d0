# SPDX-License-Identifier: BSD-3-Clause
"""Load states into optimizers: exactly from a checkpoint, and with care from a worker.

A worker's script may upload any `state_dict()`. What the optimizer couldn't step with is refused,
and the optimizer stays as it was: options of another type, tensors of another shape, numbers that
aren't finite or out of range. Of an optimizer that the script defines itself, only those shapes are
known that its present state has.
"""

from collections.abc import Iterator
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import ProtocolError
from paceline.run.tensors.group_options import problem_with
from paceline.run.tensors.trial_step import FAILURES, step_failure

__all__ = ["check_kind", "load_checked", "load_exactly"]


def load_exactly(optimizer: Optimizer, parameters: list[Tensor], saved: dict[str, Any]) -> None:
    """Load a state bit for bit; torch alone would round it to the types of the parameters."""
    optimizer.load_state_dict(saved)
    for number, parameter in enumerate(parameters):
        loaded = optimizer.state.get(parameter, {})
        for name, value in saved["state"].get(number, {}).items():
            rounded = loaded.get(name)
            if isinstance(rounded, Tensor) and rounded.dtype != value.dtype:
                loaded[name] = value.to(rounded.device)


def load_checked(optimizer: Optimizer, parameters: dict[str, Tensor], state: Any) -> None:
    """Load a state that a worker has sent; `parameters`: those of the optimizer, by name.

    Raises ProtocolError, and leaves the optimizer as it was, if the state isn't one of it.
    """
    check_kind(state)
    before = optimizer.state, optimizer.param_groups
    try:
        optimizer.load_state_dict(state)
        _check_options(optimizer, before[1])
        for name, parameter in parameters.items():
            _check_state(optimizer, name, parameter, before[0].get(parameter, {}))
        _check_keys(optimizer)
        _check_step(optimizer, *before)
    except FAILURES as error:
        optimizer.state, optimizer.param_groups = before
        raise ProtocolError(
            f"the optimizer cannot load this state: {error}; load a state_dict() of the same "
            "optimizer and model"
        ) from None


def check_kind(state: Any) -> None:
    """Raise ProtocolError if this isn't the `state_dict()` of an optimizer."""
    if not isinstance(state, dict) or not {"state", "param_groups"} <= state.keys():
        raise ProtocolError(
            "expected the state_dict() of an optimizer, with the keys state and param_groups"
        )


def _check_options(optimizer: Optimizer, before: list[dict[str, Any]]) -> None:
    """Raise ValueError if an option has a bad value; keep those that a scheduler has added."""
    for number, (old, new) in enumerate(zip(before, optimizer.param_groups, strict=True)):
        for name, value in old.items():
            if name in ("params", "param_names"):
                continue
            if name not in new and name in optimizer.defaults:
                raise ValueError(f"parameter group {number} has no {name}")
            loaded = new.setdefault(name, value)
            problem = "" if loaded is value else problem_with(optimizer, name, loaded, value)
            if problem:
                raise ValueError(f"{name} of parameter group {number} {problem}")


def _check_step(
    optimizer: Optimizer, state: dict[Tensor, Any], groups: list[dict[str, Any]]
) -> None:
    """Raise ValueError if the optimizer can't step now; `state`, `groups`: before it loaded."""
    for group, old in zip(optimizer.param_groups, groups, strict=True):
        failure = step_failure(optimizer, group["params"], group, optimizer.state)
        # If it couldn't step before, either, then the trial says nothing about what was loaded.
        if failure and not step_failure(optimizer, old["params"], old, state):
            raise ValueError(f"the next step would fail with {failure}")


def _check_keys(optimizer: Optimizer) -> None:
    """Raise ValueError if there is a state of a parameter that the optimizer doesn't have."""
    keys: list[Any] = list(optimizer.state)
    unknown = [key for key in keys if isinstance(key, int)]  # torch replaces the others
    if unknown:
        raise ValueError(f"there is no parameter {unknown[0]}")


def _check_state(
    optimizer: Optimizer, name: str, parameter: Tensor, before: dict[str, Any]
) -> None:
    """Raise ValueError if the optimizer can't step a parameter with the state that was loaded."""
    loaded = optimizer.state.get(parameter, {})
    if not isinstance(loaded, dict):
        raise TypeError(f"the state of {name} is a {type(loaded).__qualname__}")
    if loaded and (missing := sorted(set(before) - set(loaded))):
        raise ValueError(f"the state of {name} has no {missing[0]}")
    for what, value in loaded.items():
        if not all(_is_finite(part) for part in _numbers(value)):
            raise ValueError(f"{what} of {name} contains NaN or infinity")
        if what == "step" and _is_made_by_torch(optimizer) and not _is_count(value):
            raise ValueError(f"step of {name} must be a whole number >= 0, got {value}")
        old = before.get(what)
        if isinstance(old, Tensor) and not isinstance(value, Tensor | None):
            raise TypeError(f"{what} of {name} is a {type(value).__qualname__}")
        shapes = [old.shape] if isinstance(old, Tensor) else _usual_shapes(optimizer, parameter)
        if isinstance(value, Tensor) and shapes and value.shape not in shapes:
            raise ValueError(
                f"{what} of {name} has the shape {list(value.shape)}, expected {list(shapes[0])}"
            )


def _is_made_by_torch(optimizer: Optimizer) -> bool:
    """Return whether its state is that of an optimizer of torch, or of a subclass of one."""
    bases = [kind for kind in type(optimizer).__mro__ if kind not in (Optimizer, object)]
    return any(kind.__module__.startswith("torch.optim.") for kind in bases)


def _is_count(value: Any) -> bool:
    """Return whether this is a number of steps."""
    if isinstance(value, Tensor):
        return all(_is_count(number) for number in value.flatten().tolist())
    return isinstance(value, int | float) and value >= 0 and value == int(value)


def _usual_shapes(optimizer: Optimizer, parameter: Tensor) -> list[torch.Size]:
    """Return the shapes that a tensor of a parameter's state may have; none: unknown."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim.") or kind.__name__ == "Adafactor":
        return []
    return [parameter.shape, torch.Size(()), torch.Size((1,))]


def _numbers(value: Any) -> Iterator[float | Tensor]:
    """Yield the numbers in a part of a state."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point()):
        yield value


def _is_finite(number: float | Tensor) -> bool:
    return bool(number.isfinite().all()) if isinstance(number, Tensor) else isfinite(number)
