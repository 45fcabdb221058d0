# SPDX-License-Identifier: BSD-3-Clause
"""Numbers that a worker's script has logged and that haven't reached an update yet."""

from paceline.core.events import Fate

__all__ = ["LoggedScalars"]


class LoggedScalars:
    """What one worker has logged and the server does not have yet.

    What goes with a gradient that is dropped goes with the next one again, unless something newer
    of that name was logged: an accuracy that took its worker so long that it came too late counts.
    """

    def __init__(self) -> None:
        self._new: dict[str, tuple[float, int]] = {}  # sum and count
        self._handed_in: dict[str, float] = {}

    def log(self, name: str, value: float) -> None:
        """A number; several of a name are averaged."""
        total, count = self._new.get(name, (0.0, 0))
        self._new[name] = (total + value, count + 1)

    def hand_in(self) -> dict[str, float]:
        """What goes with the gradient that is about to be pushed."""
        self._handed_in |= {name: total / count for name, (total, count) in self._new.items()}
        self._new.clear()
        return self._handed_in

    def settle(self, fate: Fate) -> None:
        """This became of the gradient that was pushed last."""
        if fate is Fate.ACCEPTED:
            self._handed_in = {}
