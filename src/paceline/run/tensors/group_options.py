# SPDX-License-Identifier: BSD-3-Clause
"""The options of parameter groups (learning rate, momentum, ...) that a script may change.

The options of the server's optimizers take effect. What a script changes in a worker's parameter
groups is sent to the server with the next gradient, and from there to the other workers. So a
learning rate that any worker sets by hand applies to all of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from numbers import Integral, Real
from textwrap import shorten
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import ProtocolError, SpecError
from paceline.run.tensors.state_spec import OptionChange
from paceline.run.tensors.trial_step import refusal_of_value, step_failure

__all__ = [
    "KnownOptions",
    "OptionLog",
    "all_options",
    "check_options",
    "current_option",
    "group_of",
    "ignored_changes",
    "problem_with",
    "set_option",
]

Key = tuple[int, int, str]  # optimizer, group, name

USUAL_LR_MAX = 1.0  # an optimizer may divide it by a small number before it multiplies gradients


class KnownOptions:
    """The options of a worker's optimizers, as the server knows them."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._kept: list[OptionChange] = []  # made by the script before other changes
        # The server has only these. A scheduler that isn't prepared adds others to the groups.
        self._names = self._all_names()
        self.read()

    def _all_names(self) -> set[Key]:
        return {_key(one) for one in all_options(self._optimizers)}

    def read_all(self) -> None:
        """Note that the server has all current options, including new ones."""
        self._names = self._all_names()
        self.read()

    def read(self) -> None:
        """Note that the server knows all options as they are now."""
        self._known = [
            (number, index, group, _options(group))
            for number, optimizer in enumerate(self._optimizers)
            for index, group in enumerate(optimizer.param_groups)
        ]

    def changed(self) -> list[OptionChange]:
        """Return what the script has changed since `read` or the last call; mark it as known."""
        changes, self._kept = self.unreported(), []
        if changes:
            self.read()
        return changes

    def unreported(self) -> list[OptionChange]:
        """Return what the script has changed since `read` or the last call of `changed`.

        Raises SpecError if an option has got a value that can't be sent.
        """
        changes = list(self._kept)
        for number, index, group, known in self._known:
            for name, value in group.items():
                if value is known.get(name, _MISSING) or (number, index, name) not in self._names:
                    continue
                scalar = _scalar(value)
                if scalar is _MISSING:
                    raise _unsendable(index, name, value, known.get(name, _MISSING))
                if scalar != known.get(name, _MISSING):
                    changes.append(OptionChange(number, index, name, scalar))
        return changes

    @contextmanager
    def change(self) -> Iterator[None]:
        """Make changes that the server knows of inside a `with` block."""
        self._kept = self.changed()
        yield
        self.read()

    def learn(self, options: Iterable[OptionChange]) -> None:
        """Note that the server has sent these options, so it has them."""
        self._names |= {_key(one) for one in options}


def _unsendable(index: int, name: str, value: Any, known: Any) -> SpecError:
    """Return the error for a value that can't be sent."""
    wanted = "a number, a tuple of numbers, True, False, None or a string"
    if known is not _MISSING:
        wanted = _expected(known)
    got = shorten(repr(value), 80, placeholder=" ...")  # a tensor may have several lines
    return SpecError(f"{name} of parameter group {index} must be {wanted}, got {got}")


def _key(option: OptionChange) -> Key:
    return option.optimizer, option.group, option.name


_NOT_OPTIONS = ("params", "param_names")
_MISSING: Any = object()  # unlike any value


def _options(group: dict[str, Any]) -> dict[str, Any]:
    found = {name: _scalar(value) for name, value in group.items() if name not in _NOT_OPTIONS}
    return {name: value for name, value in found.items() if value is not _MISSING}


def _scalar(value: Any) -> Any:
    """Return the value as it can be sent; _MISSING if it can't be sent."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Real):  # a NumPy number, even one that is a float, too
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value)
    if isinstance(value, tuple | list) and all(isinstance(part, Real) for part in value):
        return tuple([float(part) for part in value])
    return _MISSING


def group_of(optimizers: Sequence[Optimizer], option: OptionChange) -> dict[str, Any]:
    """Return the group that the change is for; raises ProtocolError if it isn't for an option."""
    try:
        group = optimizers[option.optimizer].param_groups[option.group]
    except IndexError:
        raise ProtocolError(f"no such parameter group: {option}") from None
    if option.name in _NOT_OPTIONS:
        raise ProtocolError(f"the parameters of a group can't be changed: {option}")
    return group


def check_options(optimizers: Sequence[Optimizer], options: Iterable[OptionChange]) -> None:
    """Raise ProtocolError if there is no such option, or they can't have these values together."""
    changes: dict[tuple[int, int], dict[str, Any]] = {}
    for option in options:
        if _is_change(optimizers, option) and not _is_usual_lr(option):
            changes.setdefault((option.optimizer, option.group), {})[option.name] = option.value
    for (number, index), values in changes.items():
        if problem := _step_problem(optimizers[number], index, values):
            named = ", ".join(f"{name}={value!r}" for name, value in values.items())
            raise ProtocolError(f"parameter group {index} can't have {named}: {problem}")


def _is_usual_lr(option: OptionChange) -> bool:
    """Return whether it is a learning rate that needs no trial: many scripts set one at every step.

    It is only a factor, so a step can fail only if it is so large that it overflows.
    """
    is_large = isinstance(option.value, int | float) and option.value > USUAL_LR_MAX
    return option.name == "lr" and not is_large


def _is_change(optimizers: Sequence[Optimizer], option: OptionChange) -> bool:
    """Return whether it changes the option; raises ProtocolError if it can't have this value."""
    group = group_of(optimizers, option)
    if option.name not in group:
        raise ProtocolError(
            f"parameter group {option.group} has no option {option.name!r}; add it before "
            "run.prepare()"
        )
    optimizer, now = optimizers[option.optimizer], _scalar(group[option.name])
    if type(option.value) is type(now) and option.value == now:
        return False  # another worker has made the same change
    if problem := problem_with(optimizer, option.name, option.value, group[option.name]):
        raise ProtocolError(f"{option.name} of parameter group {option.group} {problem}")
    return True


def problem_with(optimizer: Optimizer, name: str, new: Any, old: Any) -> str:
    """Return why an option can't get the value `new` in place of `old`; "" if it can.

    It must have the same type, where int and float are the same, a finite number must stay finite,
    and torch must accept the value. None stands for a default: of a bool, or of something that
    isn't known.
    """
    scalar = _scalar(new)
    if not _is_like(scalar, _scalar(old)):
        return f"must be {_expected(old)}, got {new!r}"
    refusal = refusal_of_value(optimizer, name, new if scalar is _MISSING else scalar)
    return refusal and f"can't be {new!r}: {refusal}"


def _is_like(new: Any, old: Any) -> bool:
    """Return whether `new` is of the same type as `old`, and is finite if that is."""
    if new is None:
        return old is None or type(old) is bool
    if old is None:
        return type(new) is bool or (_is_number(new) and isfinite(new))
    if isinstance(old, tuple) and isinstance(new, tuple):
        return len(new) == len(old) and all(map(_is_like, new, old))
    if _is_number(old) and _is_number(new):
        return isfinite(new) or not isfinite(old)
    return type(new) is type(old)  # also if neither can be sent


def _expected(old: Any) -> str:
    """Return what the value of an option must be that is `old` now."""
    scalar = _scalar(old)
    if scalar is None:
        return "a finite number, True, False or None"
    if isinstance(scalar, bool):
        return "True, False or None"
    if isinstance(scalar, tuple):
        return f"a tuple of finite numbers like {scalar!r}"
    if _is_number(scalar):
        return f"a finite number like {scalar!r}"
    return f"a string like {scalar!r}" if isinstance(scalar, str) else f"a {type(old).__name__}"


def _step_problem(optimizer: Optimizer, index: int, values: dict[str, Any]) -> str:
    """Return why the optimizer couldn't step with these values in a group; "" if it could."""
    group, state = optimizer.param_groups[index], optimizer.state
    changed = dict(group)
    for name, new in values.items():
        is_tensor = isinstance(group[name], Tensor) and isinstance(new, int | float)
        try:
            changed[name] = torch.full_like(group[name], new) if is_tensor else new
        except RuntimeError as error:  # it is too large for the tensor
            return str(error)
    parameters = group["params"]
    tried = [parameter for parameter in parameters if parameter in state][:1] or parameters[:1]
    failure = step_failure(optimizer, tried, changed, state)
    if not failure or step_failure(optimizer, tried, group, state):
        return ""  # in the latter case, the trial says nothing about the change
    return f"the optimizer's next step would fail with {failure}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def set_option(optimizers: Sequence[Optimizer], option: OptionChange) -> None:
    """Set an option in its group; raises ProtocolError as `group_of` does."""
    group = group_of(optimizers, option)
    old = group.get(option.name)
    value: Any = option.value
    if isinstance(old, Tensor) and isinstance(value, int | float):
        old.fill_(value)
    else:
        group[option.name] = value


def current_option(optimizers: Sequence[Optimizer], option: OptionChange) -> OptionChange:
    """Return the option with the value it has now: a scheduler may have changed it again."""
    value = _scalar(group_of(optimizers, option)[option.name])
    return OptionChange(option.optimizer, option.group, option.name, value)


def all_options(optimizers: Sequence[Optimizer]) -> tuple[OptionChange, ...]:
    """Return every option that can be sent, for a worker that may have other values."""
    return tuple(
        [
            OptionChange(number, index, name, value)
            for number, optimizer in enumerate(optimizers)
            for index, group in enumerate(optimizer.param_groups)
            for name, value in _options(group).items()
        ]
    )


def ignored_changes(
    script: Iterable[OptionChange], first: Iterable[OptionChange], optimizers: Sequence[Optimizer]
) -> str:
    """Return a line on options of the script that a resumed run doesn't use; "" if there are none.

    `script`, `first`: the options in the script now, and when the run first began. The optimizers
    have those of the checkpoint.
    """
    before = {_key(one): one.value for one in first}
    wanted, used, places = [], [], []
    for one in script:
        if before.get(_key(one), one.value) == one.value or one.name == "initial_lr":
            continue  # a scheduler derives the latter from lr
        current = current_option(optimizers, one).value
        if current != one.value:
            wanted.append(f"{one.name}={one.value}")
            used.append(f"{one.name}={current}")
            places.append(f"param_groups[{one.group}]['{one.name}']")
    if not wanted:
        return ""
    now, then = (", ".join(dict.fromkeys(texts)) for texts in (wanted, used))
    return (
        f"the script has {now}, but the run continues with {then} from its checkpoint; to change "
        f"it, set optimizer.{places[0]} after run.prepare()"
    )


class OptionLog:
    """The changes that scripts have made; each worker is sent those it doesn't know yet."""

    def __init__(self) -> None:
        self.edition = 0  # number of changes so far
        self._changes: dict[Key, tuple[int, int, OptionChange]] = {}  # edition, version, change

    def add(self, option: OptionChange, version: int) -> bool:
        """Add a change that a script made while it computed at `version`.

        Returns False, and ignores it, if another script has changed the option at a later version.
        """
        key = _key(option)
        if key in self._changes and self._changes[key][1] > version:
            return False
        self.edition += 1
        self._changes[key] = (self.edition, version, option)
        return True

    def saved(self) -> list[Any]:
        """Return all changes as plain values, oldest first."""
        return [
            [version, *msgspec.structs.astuple(option)]
            for _, version, option in sorted(self._changes.values(), key=lambda change: change[0])
        ]

    def restore(self, saved: list[Any]) -> None:
        """Add what `saved` returned."""
        for version, *option in saved:
            self.add(msgspec.convert(option, OptionChange), version)

    def since(self, edition: int) -> tuple[OptionChange, ...]:
        """Return the changes after this edition."""
        if edition == self.edition:
            return ()
        return tuple([o for when, _, o in self._changes.values() if when > edition])
