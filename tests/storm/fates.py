# SPDX-License-Identifier: BSD-3-Clause
"""Every gradient has exactly one fate, the trace has it, and its worker was told.

What a worker learned is compared with the trace in both directions. There are good reasons for a
difference: a server that is killed takes records with it that it hadn't written, and a worker that
loses its server, or its connection, never learns what became of its gradient. It then reports to
its script that the gradient was late.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator

from paceline.core.events import Fate
from paceline.trace.schema import Ended, Gap, Gradient, Left, Restored, Trace
from storm.script import Told

__all__ = ["problems_with_fates"]

Turn = tuple[int, int]  # a worker, and the number of its turn


def problems_with_fates(
    trace: Trace, computed: Iterable[Turn], told: Iterable[Told], killed: Collection[str]
) -> Iterator[str]:
    """Yield what is wrong with the fates of gradients; `killed`: servers that lost records."""
    fates: dict[Turn, Gradient] = {}
    for gradient in trace.gradients():
        if (gradient.worker, gradient.turn) in fates:
            yield f"two fates: {gradient} and {fates[gradient.worker, gradient.turn]}"
        fates[gradient.worker, gradient.turn] = gradient
    records = _Records(trace)
    if records.has_gap:
        return
    for one in told:
        found = fates.get((one.worker, one.turn))
        if one.server and one.server not in killed and not _is_right(one, found, records):
            yield f"{one}, but the fate is {found}"
    records.may_lack_turns |= bool(killed)
    yield from _without_fate(computed, fates, records)


class _Records:
    """What the trace says about losses."""

    def __init__(self, trace: Trace) -> None:
        records = trace.records
        self.has_gap = any(isinstance(one, Gap) for one in records)
        self.was_restored = any(isinstance(one, Restored) for one in records)
        self.has_ended = any(isinstance(one, Ended) for one in records)
        self.is_cut = not records or not isinstance(records[-1], Ended)
        self.may_lack_turns = self.was_restored or self.is_cut  # of its last server
        self.left = Counter(one.worker for one in records if isinstance(one, Left))
        self.left_at_work = Counter(
            one.worker for one in records if isinstance(one, Left) and one.working_since is not None
        )
        self._contributors: dict[int, set[int]] = defaultdict(set)  # numbers of them, by update
        for update in trace.updates():
            self._contributors[update.update].add(len(update.contributors))

    def contributors(self, gradient: Gradient) -> set[int]:
        """Return how many contributors the update of a gradient may have; 0: it isn't made yet."""
        return {0, *self._contributors[gradient.version + gradient.staleness + 1]}


def _is_right(told: Told, gradient: Gradient | None, records: _Records) -> bool:
    """Return whether a worker was told what the trace says about its gradient.

    After the end is written, nothing more is. And a worker that doesn't know the fate, because it
    has left the run or the run has ended, says "late" to its script.
    """
    last, has_left = told.last, records.left[told.worker] > 0
    if last.fate is Fate.LATE and not last.contributors and (has_left or records.has_ended):
        return True
    if gradient is None:
        return records.has_ended
    if (gradient.fate, gradient.version, gradient.staleness) != (
        last.fate,
        last.version,
        last.staleness,
    ):
        return False
    if last.fate is not Fate.ACCEPTED:
        return not last.contributors
    # Otherwise the update may be lost, and made again by other workers.
    return records.was_restored or last.contributors in records.contributors(gradient)


def _without_fate(
    computed: Iterable[Turn], fates: dict[Turn, Gradient], records: _Records
) -> Iterator[str]:
    """Yield which gradients have no fate, although nothing explains that.

    A worker that leaves at work loses one turn, and so does each worker at the end of the run. A
    server that is killed loses the turns after those that it has recorded; the next one assigns
    turns of the same numbers again.
    """
    last = Counter[int]()
    for worker, turn in fates:
        last[worker] = max(last[worker], turn)
    missing: dict[int, list[int]] = defaultdict(list)
    for worker, turn in computed:
        is_at_end = records.may_lack_turns and turn > last[worker]
        if (worker, turn) not in fates and not is_at_end:
            missing[worker].append(turn)
    for worker, turns in missing.items():
        if len(turns) > records.left_at_work[worker] + 1:
            yield f"turns {turns} of worker {worker} have no fate"
