# SPDX-License-Identifier: BSD-3-Clause
"""What always holds of a ledger between two events, whatever the rule.

`Decider.check` evaluates these; the tests do so after every event. If one doesn't hold, that is a
bug of ours, never a mistake of a worker or a shell.
"""

from collections.abc import Callable, Iterator

from paceline.core.ledger import Ledger
from paceline.core.policy import Policy

__all__ = ["invariants"]


def invariants(
    policy: Policy,
    ledger: Ledger,
    can_update: Callable[[], bool],
    would_accept: Callable[[int], bool],
) -> Iterator[tuple[str, bool]]:
    """Yield each invariant in words, and whether it holds."""
    members, tallies = ledger.members, ledger.tallies
    idle = sorted(worker for worker, member in members.items() if member.work is None)
    busy = {worker: member for worker, member in members.items() if member.work is not None}
    versions = [member.work.version for member in members.values() if member.work]
    yield "idle are those without work", sorted(ledger.idle) == idle
    yield (
        "nobody works on a version that does not exist",
        all(ledger.oldest <= version <= ledger.version for version in versions),
    )
    yield (
        "only work can be cancelled",
        all(worker in busy for worker, member in members.items() if member.cancelled),
    )
    yield (
        "work that is useless was cancelled",
        all(member.cancelled or would_accept(worker) for worker, member in busy.items()),
    )
    yield "tallies lie ahead", all(update > ledger.version for update in tallies)
    for tally in tallies.values():
        givers = [c.worker for c in tally.contributions]
        yield "those done or excused are here", tally.done | tally.excused <= members.keys()
        yield "nobody is both done and excused", not tally.done & tally.excused
        yield "those who gave are done", set(givers) & members.keys() <= tally.done
        yield "nobody counts twice", policy.repeats or len(givers) == len(set(givers))
    yield "there is a next update", ledger.version + 1 in tallies
    newest = range(ledger.version + 1 - len(ledger.applying), ledger.version + 1)
    yield "only the newest updates are being applied", [*ledger.applying] == [*newest]
    is_last = ledger.last is None or ledger.version <= ledger.last
    yield "the last update is the last", is_last
    yield "no update lies undone", ledger.finished or not can_update()
    is_pending = any(tally.contributions for tally in tallies.values())
    yield "a finished run has nothing in the making", not (ledger.finished and is_pending)
