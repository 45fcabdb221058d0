# SPDX-License-Identifier: BSD-3-Clause
"""What a rule decides about a run, now or after other gradients have arrived.

A policy knows neither the end of the run nor its pauses. `judge` and `can_update` add them to the
policy's answers, and `Decider` decides by these two. A `Forecast` asks the same questions of a copy
of the ledger in which gradients that are still in transit have arrived already. It works for every
policy, including your own, because it only asks what the decider would ask.
"""

from copy import copy

from paceline.core.events import Contribution, Fate
from paceline.core.ledger import Ledger, Tally, Work
from paceline.core.policy import Policy

__all__ = ["Forecast", "can_update", "judge"]


def judge(policy: Policy, ledger: Ledger, work: Work) -> Fate:
    """Return the fate of a finite gradient if it arrived now, considering the run's end."""
    if ledger.last is not None and ledger.destination(work) > ledger.last:
        return Fate.LATE
    return policy.judge(ledger, work)


def can_update(policy: Policy, ledger: Ledger) -> bool:
    """Return whether an update is due; in a pause, only one with all its contributions is."""
    if ledger.version == ledger.last:
        return False
    if ledger.paused:
        return len(ledger.next_tally.contributions) >= policy.needed(ledger)
    return policy.is_due(ledger)


class Forecast:
    """What would count if certain gradients arrived first.

    The rule learns nothing from the supposed arrivals, and workers get no new work.
    """

    def __init__(self, policy: Policy, ledger: Ledger) -> None:
        self._policy = policy
        self._ledger = copy(ledger)
        self._ledger.tallies = {
            update: Tally([*tally.contributions], set(tally.done), set(tally.excused))
            for update, tally in ledger.tallies.items()
        }

    def accepts(self, worker: int) -> bool:
        """Return whether the gradient that this worker was asked for would count."""
        member = self._ledger.members.get(worker)
        if member is None or member.work is None:
            return False
        return judge(self._policy, self._ledger, member.work) is Fate.ACCEPTED

    def suppose_arrival(self, worker: int) -> None:
        """Suppose that the gradient of this worker arrives next, and is finite."""
        ledger = self._ledger
        if not self.accepts(worker):
            return
        work = ledger.members[worker].work
        assert work is not None  # otherwise it would not be accepted
        ledger.tally(ledger.destination(work)).add(Contribution(worker, work.version, samples=1))
        while can_update(self._policy, ledger):
            ledger.advance()
