# SPDX-License-Identifier: BSD-3-Clause
"""Numbers that a worker's script has logged and that aren't part of an update yet."""

from paceline.core.events import Fate

__all__ = ["LoggedScalars"]


class LoggedScalars:
    """What one worker has logged and isn't part of an update yet.

    Numbers that were sent with a dropped gradient are sent again with the next one, unless the
    script has logged newer ones of the same name. So the result of an evaluation isn't lost when
    the evaluation itself makes the worker late.
    """

    def __init__(self) -> None:
        self._new: dict[str, tuple[float, int]] = {}  # sum and count
        self._handed_in: dict[str, float] = {}

    def log(self, name: str, value: float) -> None:
        """Log a number; numbers of one name are averaged."""
        total, count = self._new.get(name, (0.0, 0))
        self._new[name] = (total + value, count + 1)

    def hand_in(self) -> dict[str, float]:
        """Return what to send with the gradient that is about to be pushed."""
        self._handed_in |= {name: total / count for name, (total, count) in self._new.items()}
        self._new.clear()
        return self._handed_in

    def settle(self, fate: Fate) -> None:
        """Record the fate of the gradient that was pushed last."""
        if fate is Fate.ACCEPTED:
            self._handed_in = {}
