# SPDX-License-Identifier: BSD-3-Clause
"""What scripts log, averaged over the contributors of an update by their samples."""

from collections import defaultdict

from paceline.core.events import Fate

__all__ = ["Logged", "Scalars"]


class Logged:
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


class Scalars:
    """Logged numbers on their way into updates."""

    def __init__(self) -> None:
        self._given: defaultdict[int, list[tuple[int, dict[str, float]]]] = defaultdict(list)

    def give(self, update: int, samples: int, scalars: dict[str, float]) -> None:
        """A contributor to this update logged these."""
        if scalars:
            self._given[update].append((samples, scalars))

    def take(self, update: int) -> dict[str, float]:
        """The averages over those that logged; the update is forgotten."""
        given = self._given.pop(update, [])
        found = {}
        for name in dict.fromkeys(name for _, scalars in given for name in scalars):
            logged = [(samples, scalars[name]) for samples, scalars in given if name in scalars]
            found[name] = sum(s * value for s, value in logged) / sum(s for s, _ in logged)
        return found
