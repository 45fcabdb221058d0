# SPDX-License-Identifier: BSD-3-Clause
"""What would count after other gradients have arrived.

A `Forecast` asks what the decider would ask, of a copy of the ledger in which gradients that are
still in transit have arrived already. So it works for every policy, including your own. Under
`sync` and `backup` counting gives the same answers, without a copy for every gradient of thousands
of workers.
"""

from collections.abc import Iterable
from copy import copy

from paceline.core.events import Contribution, Fate
from paceline.core.ledger import Ledger, Tally
from paceline.core.policies.backup import Backup
from paceline.core.policies.sync import Sync
from paceline.core.policy import Policy
from paceline.core.verdicts import can_update, judge

__all__ = ["Forecast", "room_for"]


def room_for(policy: Policy, ledger: Ledger) -> int | None:
    """Return for how many more gradients the next update has room; None: not only that decides.

    It is known under `sync` and `backup`, by exact type: a subclass may answer differently. If a
    worker was excused, the update may be made before its second try, so the order of arrivals
    matters too.
    """
    if type(policy) not in (Sync, Backup) or ledger.next_tally.excused:
        return None
    return policy.needed(ledger) - len(ledger.next_tally.contributions)


class Forecast:
    """What would count if certain gradients arrived first.

    The rule learns nothing from the supposed arrivals, and workers get no new work.
    """

    def __init__(self, policy: Policy, ledger: Ledger, ahead: Iterable[int] = ()) -> None:
        """`ahead`: the workers whose gradients arrive first, in this order."""
        self._policy = policy
        self._ledger = ledger  # of the decider, until something is supposed in a copy
        self._tallies = ledger.tallies  # of the decider
        self._ahead = [*ahead]  # supposed to arrive, not considered yet
        self._room = room_for(policy, ledger)

    def suppose_arrival(self, worker: int) -> None:
        """Suppose that the gradient of this worker arrives next, and is finite."""
        self._ahead.append(worker)

    def accepts(self, worker: int) -> bool:
        """Return whether the gradient that this worker was asked for would count."""
        if self._room is None:
            while self._ahead:
                self._record_arrival(self._ahead.pop(0))
        elif len(self._ahead) >= self._room:
            self._room -= sum(map(self._counts, self._ahead))
            self._ahead.clear()
        return (self._room is None or self._room > 0) and self._counts(worker)

    def destination(self, worker: int) -> int | None:
        """Return the update that this worker's gradient would count for; None: it wouldn't."""
        if not self.accepts(worker):
            return None
        work = self._ledger.members[worker].work
        return None if work is None else self._ledger.destination(work)

    def _counts(self, worker: int) -> bool:
        member = self._ledger.members.get(worker)
        if member is None or member.work is None:
            return False
        return judge(self._policy, self._ledger, member.work) is Fate.ACCEPTED

    def _record_arrival(self, worker: int) -> None:
        if not self._counts(worker):
            return
        if self._ledger.tallies is self._tallies:
            self._ledger = copy(self._ledger)
            self._ledger.tallies = {
                update: Tally([*tally.contributions], set(tally.done), set(tally.excused))
                for update, tally in self._tallies.items()
            }
        ledger = self._ledger
        work = ledger.members[worker].work
        assert work is not None  # otherwise it would not count
        ledger.tally(ledger.destination(work)).add(Contribution(worker, work.version, samples=1))
        while can_update(self._policy, ledger):
            ledger.advance()
