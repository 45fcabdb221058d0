# SPDX-License-Identifier: BSD-3-Clause
"""What a rule decides about a run: does a gradient count, is an update due?

A policy knows neither the end of the run nor its pauses. `judge` and `can_update` add them to the
policy's answers, and `Decider` decides by these two.
"""

from paceline.core.events import Fate
from paceline.core.ledger import Ledger, Work
from paceline.core.policy import Policy

__all__ = ["can_update", "judge"]


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
