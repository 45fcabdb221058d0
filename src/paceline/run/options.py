# SPDX-License-Identifier: BSD-3-Clause
"""The settings of parameter groups (learning rate, momentum, ...) that a script may change.

The server's optimizers have the settings that count. What a script changes in its own groups
travels with its next gradient, and from the server to the other workers, so that a learning rate
set by hand, by whichever worker, holds for all.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import ProtocolError
from paceline.run.wire import Option, Scalar

__all__ = ["OptionBook", "changed_options", "read_options", "set_option"]

Key = tuple[int, int, str]  # optimizer, group, name


def read_options(optimizers: Sequence[Optimizer]) -> dict[Key, Scalar]:
    """All settings that can travel."""
    return dict(_options(optimizers))


def _options(optimizers: Sequence[Optimizer]) -> Iterator[tuple[Key, Scalar]]:
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if name in ("params", "param_names"):
                    continue
                if isinstance(value, Tensor) and value.numel() == 1:
                    yield (number, place, name), float(value)
                elif (
                    value is None
                    or isinstance(value, bool | int | float | str)
                    or (isinstance(value, tuple) and all(isinstance(v, int | float) for v in value))
                ):
                    yield (number, place, name), value


def changed_options(known: dict[Key, Scalar], optimizers: Sequence[Optimizer]) -> list[Option]:
    """What the script has changed since these were read."""
    return [
        Option(*key, value) for key, value in _options(optimizers) if known.get(key, _NEW) != value
    ]


_NEW = object()  # unlike any value


def set_option(optimizers: Sequence[Optimizer], option: Option) -> None:
    """Put it into its group; raises ProtocolError if there is no such group."""
    try:
        group = optimizers[option.optimizer].param_groups[option.group]
    except IndexError:
        raise ProtocolError(f"there is no such group of parameters: {option}") from None
    if option.name in ("params", "param_names"):
        raise ProtocolError(f"the parameters of a group are not an option: {option}")
    old = group.get(option.name)
    value: Any = option.value
    if isinstance(old, Tensor) and isinstance(value, int | float):
        old.fill_(value)
    else:
        group[option.name] = value


class OptionBook:
    """What scripts have changed, so that every worker can be told what it does not know yet."""

    def __init__(self) -> None:
        self.edition = 0  # how many changes there were
        self._changes: dict[Key, tuple[int, int, Option]] = {}  # edition, version, what

    def enter(self, option: Option, version: int) -> bool:
        """A script changed this while it computed at `version`; whether it is the newest word."""
        key = (option.optimizer, option.group, option.name)
        if key in self._changes and self._changes[key][1] > version:
            return False
        self.edition += 1
        self._changes[key] = (self.edition, version, option)
        return True

    def since(self, edition: int) -> tuple[Option, ...]:
        """The changes after that edition."""
        if edition == self.edition:
            return ()
        return tuple([o for when, _, o in self._changes.values() if when > edition])
