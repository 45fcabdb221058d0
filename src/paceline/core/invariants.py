# SPDX-License-Identifier: BSD-3-Clause
"""What always holds for a ledger between two events, under every rule.

`Decider.check` evaluates these, and the tests call it after every event. If one doesn't hold, that
is a bug in Paceline, never the mistake of a worker or a shell.
"""

from collections.abc import Callable, Iterator

from paceline.core.ledger import Ledger
from paceline.core.policy import Policy
from paceline.core.verdicts import can_update

__all__ = ["invariants"]


def invariants(
    policy: Policy,
    ledger: Ledger,
    would_accept: Callable[[int], bool],
) -> Iterator[tuple[str, bool]]:
    """Yield each invariant as a sentence, and whether it holds."""
    members, tallies = ledger.members, ledger.tallies
    idle = sorted(worker for worker, member in members.items() if member.work is None)
    busy = {worker: member for worker, member in members.items() if member.work is not None}
    versions = [member.work.version for member in members.values() if member.work]
    yield "a member is idle iff it has no work", sorted(ledger.idle) == idle
    yield (
        "members work on versions that exist",
        all(ledger.oldest <= version <= ledger.version for version in versions),
    )
    yield (
        "only work can be cancelled",
        all(worker in busy for worker, member in members.items() if member.cancelled),
    )
    yield (
        "useless work is cancelled",
        all(member.cancelled or would_accept(worker) for worker, member in busy.items()),
    )
    yield "tallies are of updates to come", all(update > ledger.version for update in tallies)
    for tally in tallies.values():
        contributors = [c.worker for c in tally.contributions]
        yield (
            "workers that are done or excused are members",
            tally.done | tally.excused <= members.keys(),
        )
        yield "no worker is both done and excused", not tally.done & tally.excused
        yield "members that contributed are done", set(contributors) & members.keys() <= tally.done
        yield (
            "no worker counts twice in an update",
            policy.repeats or len(contributors) == len(set(contributors)),
        )
    yield "there is a next update", ledger.version + 1 in tallies
    newest = range(ledger.version + 1 - len(ledger.applying), ledger.version + 1)
    yield "only the newest updates are being applied", [*ledger.applying] == [*newest]
    is_last = ledger.last is None or ledger.version <= ledger.last
    yield "no update is made after the last", is_last
    yield "every update that is due is made", ledger.finished or not can_update(policy, ledger)
    is_pending = any(tally.contributions for tally in tallies.values())
    yield "a finished run has no pending contributions", not (ledger.finished and is_pending)
