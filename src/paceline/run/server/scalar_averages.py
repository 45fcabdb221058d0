# SPDX-License-Identifier: BSD-3-Clause
"""Numbers that scripts log, averaged over the contributors to an update."""

from collections import defaultdict

__all__ = ["ScalarAverages"]


class ScalarAverages:
    """The numbers logged for updates that aren't made yet."""

    def __init__(self) -> None:
        self._given: defaultdict[int, list[tuple[int, dict[str, float]]]] = defaultdict(list)

    def give(self, update: int, samples: int, scalars: dict[str, float]) -> None:
        """Keep what a contributor to this update logged."""
        if scalars:
            self._given[update].append((samples, scalars))

    def take(self, update: int) -> dict[str, float]:
        """Remove and return the averages over the workers that logged, weighted by samples."""
        given = self._given.pop(update, [])
        found = {}
        for name in dict.fromkeys(name for _, scalars in given for name in scalars):
            logged = [(samples, scalars[name]) for samples, scalars in given if name in scalars]
            found[name] = sum(s * value for s, value in logged) / sum(s for s, _ in logged)
        return found
