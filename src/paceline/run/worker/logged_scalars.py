# SPDX-License-Identifier: BSD-3-Clause
"""Numbers that a worker's script has logged and that aren't part of an update yet."""

from paceline.core.events import Fate

__all__ = ["LoggedScalars"]


class LoggedScalars:
    """What one worker has logged and isn't part of an update yet.

    Numbers that were sent with a dropped gradient are sent again with the next one, unless the
    script has logged newer ones of the same name. So the result of an evaluation isn't lost when
    the evaluation itself makes the worker late.

    When the server is lost, the run returns to an earlier version. What was logged until then
    belongs to no update of the next server, and neither does what the script logs about its last
    turn before it begins another.
    """

    def __init__(self) -> None:
        self._new: dict[str, tuple[float, int]] = {}  # sum and count
        self._handed_in: dict[str, float] = {}
        self._is_void = False  # what is logged belongs to a turn that was lost

    def log(self, name: str, value: float) -> None:
        """Log a number; numbers of one name are averaged."""
        if self._is_void:
            return
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

    def forget(self) -> None:
        """Forget everything, because the server was lost, and what is logged before `begin`."""
        self._new, self._handed_in, self._is_void = {}, {}, True

    def begin(self) -> None:
        """Note that the script computes on another batch."""
        self._is_void = False
