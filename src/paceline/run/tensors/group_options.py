# SPDX-License-Identifier: BSD-3-Clause
"""The settings of parameter groups (learning rate, momentum, ...) that a script may change.

The server's optimizers have the settings that count. What a script changes in its own groups
travels with its next gradient, and from the server to the other workers, so that a learning rate
set by hand, by whichever worker, holds for all.
"""

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import msgspec
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import ProtocolError
from paceline.run.tensors.state_spec import OptionChange

__all__ = ["KnownOptions", "OptionBook", "all_options", "as_it_is", "group_of", "set_option"]

Key = tuple[int, int, str]  # optimizer, group, name


class KnownOptions:
    """The settings of a worker's optimizers, as far as the server knows them."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self.read()

    def read(self) -> None:
        """The server knows everything as it is now."""
        self._known = [
            (number, place, group, _settings(group))
            for number, optimizer in enumerate(self._optimizers)
            for place, group in enumerate(optimizer.param_groups)
        ]

    def changed(self) -> list[OptionChange]:
        """What the script has changed since; from now on the server knows it."""
        found = []
        for number, place, group, known in self._known:
            for name, value in group.items():
                if value is known.get(name, _NEW) or name in _NOT_OPTIONS:
                    continue
                scalar = _scalar(value)
                if scalar is not _NEW and scalar != known.get(name, _NEW):
                    found.append(OptionChange(number, place, name, scalar))
        if found:
            self.read()
        return found


_NOT_OPTIONS = ("params", "param_names")
_NEW: Any = object()  # unlike any value


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    found = {name: _scalar(value) for name, value in group.items() if name not in _NOT_OPTIONS}
    return {name: value for name, value in found.items() if value is not _NEW}


def _scalar(value: Any) -> Any:
    """The value as it travels; what cannot travel is never changed."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Real):  # a number of NumPy, even one that is also a float
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, tuple | list) and all(isinstance(part, Real) for part in value):
        return tuple([float(part) for part in value])
    return _NEW


def group_of(optimizers: Sequence[Optimizer], option: OptionChange) -> dict[str, Any]:
    """The group that it is for; raises ProtocolError if there is none, or it is not an option."""
    try:
        group = optimizers[option.optimizer].param_groups[option.group]
    except IndexError:
        raise ProtocolError(f"there is no such group of parameters: {option}") from None
    if option.name in _NOT_OPTIONS:
        raise ProtocolError(f"the parameters of a group are not an option: {option}")
    return group


def set_option(optimizers: Sequence[Optimizer], option: OptionChange) -> None:
    """Put it into its group; raises ProtocolError as `group_of` does."""
    group = group_of(optimizers, option)
    old = group.get(option.name)
    value: Any = option.value
    if isinstance(old, Tensor) and isinstance(value, int | float):
        old.fill_(value)
    else:
        group[option.name] = value


def as_it_is(optimizers: Sequence[Optimizer], option: OptionChange) -> OptionChange:
    """The option with the value that it has now: a scheduler may have gone on from it."""
    value = _scalar(group_of(optimizers, option)[option.name])
    return OptionChange(option.optimizer, option.group, option.name, value)


def all_options(optimizers: Sequence[Optimizer]) -> tuple[OptionChange, ...]:
    """Every setting that can travel, for somebody who may know others."""
    return tuple(
        [
            OptionChange(number, place, name, value)
            for number, optimizer in enumerate(optimizers)
            for place, group in enumerate(optimizer.param_groups)
            for name, value in _settings(group).items()
        ]
    )


class OptionBook:
    """What scripts have changed, so that every worker can be told what it does not know yet."""

    def __init__(self) -> None:
        self.edition = 0  # how many changes there were
        self._changes: dict[Key, tuple[int, int, OptionChange]] = {}  # edition, version, what

    def enter(self, option: OptionChange, version: int) -> bool:
        """A script changed this while it computed at `version`; whether it is the newest word."""
        key = (option.optimizer, option.group, option.name)
        if key in self._changes and self._changes[key][1] > version:
            return False
        self.edition += 1
        self._changes[key] = (self.edition, version, option)
        return True

    def saved(self) -> list[Any]:
        """All of it, oldest first, as plain values."""
        return [
            [version, *msgspec.structs.astuple(option)]
            for _, version, option in sorted(self._changes.values(), key=lambda change: change[0])
        ]

    def restore(self, saved: list[Any]) -> None:
        """Know what was saved."""
        for version, *option in saved:
            self.enter(msgspec.convert(option, OptionChange), version)

    def since(self, edition: int) -> tuple[OptionChange, ...]:
        """The changes after that edition."""
        if edition == self.edition:
            return ()
        return tuple([o for when, _, o in self._changes.values() if when > edition])
