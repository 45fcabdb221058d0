# SPDX-License-Identifier: BSD-3-Clause
"""Check that a trace is sound: replaying it with its own policy must give the same records.

Every event of the trace goes through a fresh `Decider`, and its decisions are turned into records
again; the first record that differs is reported. So a trace that passes has exactly one fate for
each gradient, one set of contributors with their weights for each update, and no decision that its
rule would not make. If the run was interrupted and restored, each part is replayed separately, and
so are the parts before and after a gap. `gaps` says which records are missing, and `batch_audit`
checks that every batch was used once.
"""

from copy import deepcopy

import msgspec

from paceline.core.decider import NOTHING, Decider
from paceline.core.events import Event, Finish, StartTimer
from paceline.core.ledger import Origin
from paceline.core.policies import parse_policy
from paceline.core.policy_import import Folders
from paceline.errors import PacelineError, SpecError, TraceError
from paceline.trace.event_records import Measured, record_event
from paceline.trace.schema import (
    Awaited,
    Ended,
    Gap,
    Gradient,
    Header,
    Left,
    Record,
    Restored,
    Skipped,
    Timer,
    Trace,
    Update,
    event_of,
)
from paceline.watch.batch_audit import BatchAudit

__all__ = ["audit"]

ROUNDING_S = 1e-6  # tolerance for clocks and sums of times


def audit(trace: Trace, name: str = "trace", folders: Folders = ("",)) -> None:
    """Raise `TraceError`, which names the line, if the trace isn't sound.

    The module of a user's own rule is searched in these folders.
    """
    if trace.changed_before:
        raise TraceError(
            f"{name}:{trace.changed_before}: lines before this one were changed or removed"
        )
    if not trace.records and not trace.is_growing:
        raise TraceError(f"{name} has a header but no records")
    header = trace.header
    decider = _decider(header, f"{name}:1 (the header)", NOTHING, folders)
    replay: _Replay | None = _Replay(header, decider)
    batches = BatchAudit()
    version, now = 0, 0.0
    for line, record in enumerate(trace.records, start=2):
        place = f"{name}:{line}"
        batches.check(record, place)
        if isinstance(record, Skipped | Awaited):
            continue
        if isinstance(record, Restored | Gap) and record.t < now:
            raise TraceError(f"{place}: time must not go backwards, got {record.t}")
        if isinstance(record, Restored):
            if record.version > version:
                raise TraceError(
                    f"{place}: the run continues from version {record.version}, but the lines "
                    f"before it end at version {version}"
                )
            # The last decisions of the killed server may be missing.
            header = record.header
            replay = _Replay(header, _decider(header, place, record.origin(), folders))
            replay.decider.ledger.now = record.t
        elif isinstance(record, Gap):
            decider = _decider(header, place, NOTHING, folders)
            replay = _after_gap(record, header, decider, place)
        elif replay is not None:
            replay.check(record, place, line)
        version = _version_after(record, version)
        now = max(now, record.t)
    if replay is not None and replay.expected and not trace.is_growing:
        raise TraceError(
            f"{name}: ends before the record {_kind(replay.expected[0])!r} that its rule gives"
        )


def _decider(header: Header, place: str, origin: Origin, folders: Folders) -> Decider:
    try:
        return Decider(parse_policy(header.policy, folders), header.spec(), origin)
    except SpecError as error:
        raise TraceError(f"{place}: {error}") from None


def _version_after(record: Record, version: int) -> int:
    """Return the newest version after this record."""
    match record:
        case Update():
            return record.update
        case Restored() | Gap():
            return record.version
        case _:
            return version


def _after_gap(gap: Gap, header: Header, decider: Decider, place: str) -> "_Replay | None":
    """Return a replay from the state that a gap gives; None: it doesn't give the whole state."""
    ledger, policy = gap.ledger, decider.policy
    if ledger is None:  # a restoration follows
        return None
    if ledger.memory is None and policy.fresh_memory(ledger.spec) is not None:
        return None  # a user's own rule whose memory isn't in the trace
    decider.ledger = deepcopy(ledger)  # replaying changes it
    try:
        decider.ledger.memory = policy.recall(ledger.spec, ledger.memory)
    except SpecError as error:
        raise TraceError(f"{place}: {error}") from None
    return _Replay(header, decider)


class _Replay:
    """Replays a run, or the part of it between two restorations."""

    def __init__(self, header: Header, decider: Decider) -> None:
        self.decider = decider
        self._has_weights = header.has_weights
        self.expected: list[Record] = []  # decided, but not yet seen in the trace
        self._end: Ended | None = None
        self._ended_at = 0  # the line
        self._timers: dict[int, float] = {}  # when each timer is due

    def check(self, record: Record, place: str, line: int) -> None:
        """Raise `TraceError` if this record doesn't follow from those before it."""
        if self._ended_at:
            raise TraceError(f"{place}: the run has already ended in line {self._ended_at}")
        if isinstance(record, Ended):
            _check_end(record, self._end, self.decider, place)
            self._ended_at = line
            return
        event = event_of(record)
        if event is not None and not self.expected and not isinstance(record, Update):
            if isinstance(record, Gradient):
                _check_times(record, self.decider, place)
            if isinstance(record, Timer):
                _check_timer(record, self._timers.get(record.timer), place)
            self._decide(event, record, place)
        expected = self.expected.pop(0) if self.expected else None
        if isinstance(expected, Update) and not self._has_weights:
            expected = msgspec.structs.replace(expected, weights=None, scales=None)
        decided = _decided(record)
        if decided != expected:
            raise TraceError(f"{place}: {_difference(decided, expected)}")
        if event is not None and isinstance(record, Update):
            self._decide(event, record, place)

    def _decide(self, event: Event, record: Record, place: str) -> None:
        version = self.decider.ledger.version
        try:
            actions = self.decider.handle(event)
        except PacelineError as error:
            raise TraceError(f"{place}: {error}") from None
        self.expected += record_event(event, actions, version, _measured(record))
        self._timers |= {a.timer: a.at for a in actions if isinstance(a, StartTimer)}
        ends = [_end(event.time, a) for a in actions if isinstance(a, Finish)]
        self._end = ends[0] if ends else self._end


def _end(time: float, action: Finish) -> Ended:
    return Ended(time, action.version, tuple(c.worker for c in action.unused))


def _check_end(record: Ended, expected: Ended | None, decider: Decider, place: str) -> None:
    """Raise `TraceError` if the run didn't end like this; a stalled run has only its version."""
    if expected is None:
        is_known = not decider.ledger.finished  # otherwise the decision is in a gap
        sound = record.version == decider.ledger.version
        sound = sound and (record.t >= decider.ledger.now or not is_known)
    else:
        shown = {name: getattr(record, name) for name in ("reason", "data", "checksum")}
        sound = record == msgspec.structs.replace(expected, **shown)
    if not sound:
        raise TraceError(f"{place}: {_difference(record, expected)}")


def _kind(record: Record) -> str:
    return type(record).__name__.lower()


def _difference(record: Record, expected: Record | None) -> str:
    """Describe how the record differs from the one that the policy gives."""
    if expected is None:
        return f"has a record {_kind(record)!r} where its rule gives none"
    if type(record) is not type(expected):
        return f"has a record {_kind(record)!r} where its rule gives {_kind(expected)!r}"
    was, now = msgspec.structs.asdict(record), msgspec.structs.asdict(expected)
    wrong = next(field for field in was if was[field] != now[field])
    return f"has {wrong} {was[wrong]}, but its rule gives {now[wrong]}"


def _check_times(record: Gradient, decider: Decider, place: str) -> None:
    """Raise `TraceError` if the gradient wasn't asked for at that time, or took too long."""
    member = decider.ledger.members.get(record.worker)
    if member is None or member.work is None or member.turn != record.turn:
        return
    if abs(record.asked_at - member.asked_at) > ROUNDING_S:
        raise TraceError(f"{place}: has asked_at {record.asked_at}, but it was {member.asked_at}")
    if record.compute_s > record.t - record.asked_at + ROUNDING_S:
        raise TraceError(
            f"{place}: has compute_s {record.compute_s}, which is more than the time since asked_at"
        )


def _check_timer(record: Timer, due_at: float | None, place: str) -> None:
    if due_at is not None and record.t < due_at - ROUNDING_S:
        raise TraceError(f"{place}: timer {record.timer} fired at {record.t}, before {due_at}")


def _measured(record: Record) -> Measured | None:
    """Return what only the shell knew, taken from the trace itself."""
    if isinstance(record, Left) and record.working_since is not None:
        return Measured(record.working_since)
    if isinstance(record, Gradient):
        return Measured(
            record.asked_at,
            record.compute_s,
            record.pulled_bytes,
            record.pushed_bytes,
            record.sq_norm,
            record.uses,
            record.cpu_s,
        )
    return None


def _decided(record: Record) -> Record:
    """Return the record without what no policy can know."""
    if isinstance(record, Update):
        return msgspec.structs.replace(record, sq_norm=None, apply_s=0, scalars={}, skipped=False)
    return record
