# SPDX-License-Identifier: BSD-3-Clause
"""What scripts log, averaged over the contributors of an update by their samples."""

from collections import defaultdict

__all__ = ["Scalars"]


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
