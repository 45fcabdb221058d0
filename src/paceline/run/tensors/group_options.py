# SPDX-License-Identifier: BSD-3-Clause
"""The options of parameter groups (learning rate, momentum, ...) that a script may change.

The options of the server's optimizers take effect. What a script changes in a worker's parameter
groups is sent to the server with the next gradient, and from there to the other workers. So a
learning rate that any worker sets by hand applies to all of them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any

import msgspec
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import ProtocolError
from paceline.run.tensors.state_spec import OptionChange

__all__ = ["KnownOptions", "OptionLog", "all_options", "current_option", "group_of", "set_option"]

Key = tuple[int, int, str]  # optimizer, group, name


class KnownOptions:
    """The options of a worker's optimizers, as the server knows them."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._kept: list[OptionChange] = []  # made by the script before other changes
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
        """Return what the script has changed since `read` or the last call of `changed`."""
        changes = list(self._kept)
        for number, index, group, known in self._known:
            for name, value in group.items():
                if value is known.get(name, _MISSING) or name in _NOT_OPTIONS:
                    continue
                scalar = _scalar(value)
                if scalar is not _MISSING and scalar != known.get(name, _MISSING):
                    changes.append(OptionChange(number, index, name, scalar))
        return changes

    @contextmanager
    def change(self) -> Iterator[None]:
        """Make changes that the server knows of inside a `with` block."""
        self._kept = self.changed()
        yield
        self.read()


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
    if isinstance(value, Tensor) and value.numel() == 1:
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


class OptionLog:
    """The changes that scripts have made; each worker is sent those it doesn't know yet."""

    def __init__(self) -> None:
        self.edition = 0  # number of changes so far
        self._changes: dict[Key, tuple[int, int, OptionChange]] = {}  # edition, version, change

    def add(self, option: OptionChange, version: int) -> bool:
        """Add a change that a script made while it computed at `version`.

        Returns False, and ignores it, if another script has changed the option at a later version.
        """
        key = (option.optimizer, option.group, option.name)
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
