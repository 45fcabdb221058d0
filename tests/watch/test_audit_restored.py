# SPDX-License-Identifier: BSD-3-Clause
"""Traces of restored runs, and of runs with missing workers."""

import re
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import POLICY_TABLE, Cluster, random_steps
from paceline.core.decider import Decider
from paceline.core.events import (
    ApplyUpdate,
    Finish,
    GradientArrived,
    SendParams,
    WorkAbandoned,
    WorkerMissing,
)
from paceline.core.ledger import Origin
from paceline.core.policies import parse_policy
from paceline.errors import TraceError
from paceline.spec import RunSpec
from paceline.trace.event_records import Measured, record_event
from paceline.trace.reader import read_trace
from paceline.trace.schema import (
    Ended,
    Gap,
    Gradient,
    Header,
    Joined,
    Missing,
    Record,
    Restored,
    Timer,
    Trace,
    Update,
    event_of,
    write_trace,
)
from paceline.watch.audit import audit

every_policy = pytest.mark.parametrize("policy", POLICY_TABLE)


def header(policy: str, **spec: Any) -> Header:
    described = RunSpec(**{"workers": 3, **spec})
    return Header.of("run", parse_policy(policy), described, {})


def recorded(cluster: Cluster) -> list[Record]:
    """Return what a server would have recorded of a cluster's events."""
    records: list[Record] = []
    asked_at: dict[int, float] = {}
    version = cluster.origin
    for event, actions in cluster.log:
        measured = None
        if isinstance(event, GradientArrived | WorkAbandoned):
            measured = Measured(asked_at.get(event.worker, event.time))
        records += record_event(event, actions, version, measured)
        version += sum(isinstance(action, ApplyUpdate) for action in actions)
        asked_at |= {a.worker: event.time for a in actions if isinstance(a, SendParams)}
        for action in actions:
            if isinstance(action, Finish):
                unused = tuple(c.worker for c in action.unused)
                records.append(Ended(event.time, action.version, unused))
    return records


class Part:
    """A part of a run, from one start of the server to the next."""

    def __init__(
        self, policy: str, origin: Origin | None = None, now: float = 0.0, **spec: Any
    ) -> None:
        self.header = header(policy, **spec)
        decider = Decider(parse_policy(policy), self.header.spec(), origin or Origin())
        self.cluster = Cluster(decider)
        self.cluster.now = now
        self.records: list[Record] = []
        if origin is not None:
            told = (origin.version, self.header, 1.5, dict(origin.turns), origin.memory)
            self.records = [Restored(now, *told)]

    def train(self, updates: int, silent: tuple[int, ...] = ()) -> "Part":
        """Let all workers join and make this many updates; the silent ones never report."""
        for worker in range(3):
            self.cluster.join(worker)
        self.cluster.run_until(self.cluster.version + updates, silent)
        return self

    def restored(self, version: int, policy: str = "", **spec: Any) -> "Part":
        """Return the part after this one, restored from a checkpoint of that version."""
        ledger, rule = self.cluster.decider.ledger, self.cluster.decider.policy
        memory = msgspec.json.decode(msgspec.json.encode(rule.plain_memory(ledger.memory)))
        origin = Origin(version, dict(ledger.turns), memory)
        return Part(policy or self.header.policy, origin, self.cluster.now, **spec)

    def all_records(self) -> list[Record]:
        return [*self.records, *recorded(self.cluster)]


def joined(*parts: Part) -> Trace:
    return Trace(parts[0].header, [record for part in parts for record in part.all_records()])


def restored_once(policy: str, **spec: Any) -> Trace:
    """Return a run of seven updates, of which two are lost, and four more after a restore."""
    first = Part(policy, **spec).train(7)
    return joined(first, first.restored(5, **spec).train(4))


def newest(records: list[Record]) -> int:
    """Return the newest version after these records."""
    version = 0
    for record in records:
        if isinstance(record, Update):
            version = record.update
        elif isinstance(record, Restored | Gap):
            version = record.version
    return version


def index_of(trace: Trace, kind: type) -> int:
    """Return the index of the first record of this kind."""
    return next(i for i, record in enumerate(trace.records) if isinstance(record, kind))


def changed(trace: Trace, index: int, **fields: Any) -> Trace:
    records = list(trace.records)
    records[index] = msgspec.structs.replace(records[index], **fields)
    return Trace(trace.header, records)


def reported(trace: Trace) -> tuple[int, str]:
    """Return the index of the record that the audit reports, and its message."""
    with pytest.raises(TraceError) as caught:
        audit(trace, "run.jsonl")
    found = re.match(r"run\.jsonl:(\d+):? (.*)$", str(caught.value))
    assert found, str(caught.value)
    return int(found[1]) - 2, found[2]


# ------------------------------------------------------------------------------------ sound traces


@every_policy
def test_restored_run_is_sound_and_its_numbers_continue(policy: str) -> None:
    trace = restored_once(policy)
    audit(trace)
    numbers = [update.update for update in trace.updates()]
    assert numbers == [1, 2, 3, 4, 5, 6, 7, 6, 7, 8, 9]


@every_policy
@pytest.mark.parametrize("seed", range(2))
def test_run_restored_at_any_point_and_often_is_sound(policy: str, seed: int) -> None:
    """The server may be killed after any record, even in the middle of an event."""
    rng = Random(seed)
    part = Part(policy)
    records: list[Record] = []
    for _ in range(5):
        for _ in random_steps(part.cluster, rng, 40):
            pass
        whole = part.all_records()
        records += whole[: rng.randrange(1, len(whole) + 1)]
        version = rng.randint(part.cluster.origin, part.cluster.version)
        part = part.restored(version)
        if newest(records) < version:
            records.append(Gap(part.cluster.now, version))
    audit(Trace(part.header, [*records, *part.all_records()]))


@every_policy
def test_run_restored_at_its_last_update_ends_immediately(policy: str) -> None:
    first = Part(policy, steps=4).train(4)
    second = first.restored(4, steps=4)
    second.cluster.join(0)
    trace = joined(first, second)
    ends = [record.version for record in trace.records if isinstance(record, Ended)]
    assert ends == [4, 4]
    audit(trace)


@every_policy
def test_ended_run_can_be_resumed_to_a_later_end(policy: str) -> None:
    first = Part(policy, steps=4).train(4)
    trace = joined(first, first.restored(4, steps=6).train(2))
    assert isinstance(trace.records[-1], Ended)
    audit(trace)


def test_run_can_be_resumed_under_another_rule() -> None:
    first = Part("backup:1", steps=4).train(4)
    audit(joined(first, first.restored(4, "async", workers=2).train(5)))


def test_run_without_a_checkpoint_starts_again() -> None:
    first = Part("sync").train(3)
    audit(joined(first, first.restored(0).train(3)))


def test_run_whose_server_died_before_any_event_is_sound() -> None:
    first = Part("sync")
    audit(joined(first, first.restored(0).train(3)))
    audit(joined(first, first.restored(0), first.restored(0)))


def test_trace_with_only_the_later_part_of_a_run_begins_with_a_gap() -> None:
    """Its trace was moved away; its checkpoint was not."""
    second = Part("sync").train(3).restored(3).train(3)
    gap = Gap(second.records[0].t, 3)
    audit(Trace(second.header, [gap, *second.all_records()]))
    assert reported(joined(second)) == (
        0,
        "the run continues from version 3, but the lines before it end at version 0",
    )


def test_checkpoint_that_is_newer_than_the_trace_needs_a_gap() -> None:
    first = Part("sync").train(7)
    second = first.restored(7).train(2)
    known = first.all_records()[:9]
    gap = Gap(second.records[0].t, 7)
    audit(Trace(first.header, [*known, gap, *second.all_records()]))
    found, why = reported(Trace(first.header, [*known, *second.all_records()]))
    assert found == len(known)
    assert why.startswith("the run continues from version 7, but")


def test_learned_deadline_survives_a_restore() -> None:
    first = Part("deadline:0.5").train(12)
    trace = joined(first, first.restored(12).train(6, silent=(2,)))
    assert any(isinstance(record, Timer) for record in trace.records)
    audit(trace)


# ------------------------------------------------------------------------------------ broken traces


@pytest.mark.parametrize("policy", ["sync", "async", "backup:1", "delayed:2"])
def test_wrong_version_is_found_by_later_records(policy: str) -> None:
    trace = restored_once(policy)
    index = index_of(trace, Restored)
    for version in (4, 6, 0, 1000):
        found, why = reported(changed(trace, index, version=version))
        assert found > index or version == 1000
        assert "version" in why


def test_wrong_turns_are_found_by_later_records() -> None:
    trace = restored_once("sync")
    index = index_of(trace, Restored)
    for turns in ({}, {0: 6}, {0: 8, 1: 7, 2: 7}):
        found, why = reported(changed(trace, index, turns=turns))
        assert isinstance(trace.records[found], Gradient)
        assert "turn" in why or "asked" in why or "duplicate" in why


def test_wrong_memory_is_found_by_later_records() -> None:
    first = Part("deadline:0.5").train(12)
    trace = joined(first, first.restored(12).train(6, silent=(2,)))
    index = index_of(trace, Restored)
    slow = [[100.0, True]] * 12  # with this it would have waited longer
    found, why = reported(changed(trace, index, memory=slow))
    assert isinstance(trace.records[found], Timer)
    assert why.startswith("timer 1 fired at ")
    found, why = reported(changed(trace, index, memory="nonsense"))
    assert (found, "expected pairs of a time" in why) == (index, True)


def test_time_that_goes_backwards_is_found() -> None:
    trace = restored_once("sync")
    index = index_of(trace, Restored)
    before, restored = trace.records[index - 1], trace.records[index]
    assert isinstance(restored, Restored)
    found, why = reported(changed(trace, index, t=before.t - 0.5))
    assert found == index
    assert why == f"time must not go backwards, got {before.t - 0.5}"
    found, why = reported(changed(trace, index + 1, t=restored.t - 0.5))
    assert found == index + 1
    assert why.startswith("time must")


def test_wrong_rule_of_a_restored_part_is_found() -> None:
    trace = restored_once("sync")
    index = index_of(trace, Restored)
    assert reported(changed(trace, index, header=header("async")))[0] > index
    assert reported(changed(trace, index, header=header("sync", steps=7)))[0] > index


@pytest.mark.parametrize("policy", ["nonsense", "backup:9"])
def test_invalid_rule_of_a_restored_part_is_found_at_its_line(policy: str) -> None:
    trace = restored_once("sync")
    index = index_of(trace, Restored)
    wrong = msgspec.structs.replace(header("sync"), policy=policy)
    assert reported(changed(trace, index, header=wrong))[0] == index


def test_restored_part_starts_without_workers() -> None:
    """A trace in which workers continue without joining again is not sound."""
    first = Part("async").train(3)
    records = first.all_records()
    gradient = next(record for record in reversed(records) if isinstance(record, Gradient))
    restored = first.restored(3).all_records()
    found, why = reported(Trace(first.header, [*records, *restored, gradient]))
    assert found == len(records) + 1
    assert "has not joined" in why or "time must" in why


def test_only_a_restore_may_follow_an_end() -> None:
    first = Part("sync", steps=2).train(2)
    trace = joined(first, first.restored(2, steps=3).train(1))
    audit(trace)
    index = index_of(trace, Restored)
    without = Trace(trace.header, trace.records[:index] + trace.records[index + 1 :])
    found, why = reported(without)
    assert found == index
    assert why.startswith("the run has already ended")


def test_trace_that_ends_in_the_middle_of_an_event_is_found() -> None:
    trace = restored_once("sync")
    last = max(i for i, record in enumerate(trace.records) if isinstance(record, Update))
    with pytest.raises(TraceError, match="ends before the record 'update' that its rule gives"):
        audit(Trace(trace.header, trace.records[:last]))


# ---------------------------------------------------------------------------------- missing workers


@pytest.mark.parametrize("policy", ["sync", "backup:1", "deadline", "delayed:1"])
def test_run_with_missing_workers_is_sound(policy: str) -> None:
    part = Part(policy)
    part.cluster.join(0)
    part.cluster.handle(WorkerMissing(2.0, 1, "it fails"))
    part.cluster.handle(WorkerMissing(2.0, 2, "it fails too"))
    part.cluster.run_until(4)
    trace = joined(part)
    assert Missing(2.0, 1, "it fails") in trace.records
    audit(trace)
    index = index_of(trace, Missing)
    assert reported(Trace(trace.header, trace.records[:index] + trace.records[index + 1 :]))[0] > 0


def test_member_cannot_be_recorded_as_missing() -> None:
    trace = restored_once("sync")
    index = index_of(trace, Joined) + 1
    records = [*trace.records[:index], Missing(1.0, 0), *trace.records[index:]]
    found, why = reported(Trace(trace.header, records))
    assert found == index
    assert "worker 0 has joined" in why


# ------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("policy", ["sync", "deadline:0.5", "delayed:2"])
def test_trace_of_two_parts_survives_writing_and_reading(policy: str, tmp_path: Path) -> None:
    trace = restored_once(policy)
    write_trace(trace, tmp_path / "run.jsonl")
    assert read_trace(tmp_path / "run.jsonl") == trace


times = st.floats(0, 1e9)
numbers = st.integers(0, 2**53)
plain = st.recursive(
    st.none() | st.booleans() | st.floats(-1e9, 1e9) | numbers | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
restorations = st.builds(
    Restored,
    t=times,
    version=numbers,
    header=st.sampled_from([header("sync"), header("deadline:0.5", steps=9, late="finish")]),
    down_s=times,
    turns=st.dictionaries(numbers, numbers, max_size=4),
    memory=plain,
)


@settings(deadline=None)
@given(restorations | st.builds(Missing, t=times, worker=numbers, reason=st.text(max_size=9)))
def test_any_restore_survives_writing_and_reading(record: Restored | Missing) -> None:
    line = msgspec.json.encode(record)
    assert msgspec.json.decode(line, type=Record) == record


def test_restore_is_not_an_event_and_has_the_origin_of_its_part() -> None:
    record = Restored(3.0, 7, header("sync"), 1.0, {0: 4}, [[0.5, True]])
    assert event_of(record) is None
    assert record.origin() == Origin(7, {0: 4}, [[0.5, True]])
    assert event_of(Missing(3.0, 1, "it fails")) == WorkerMissing(3.0, 1, "it fails")


@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"restored","t":1.0,"version":2}',  # what is run?
        b'{"type":"restored","t":1.0,"version":-2,"header":HEADER}',
        b'{"type":"restored","t":1.0,"version":2,"header":HEADER,"down_s":-1}',
        b'{"type":"restored","t":1.0,"version":2,"header":HEADER,"turns":{"x":1}}',
        b'{"type":"restored","t":1.0,"version":2,"header":HEADER,"other":1}',
        b'{"type":"missing","t":1.0}',
        b'{"type":"missing","t":1.0,"worker":-1}',
    ],
)
def test_bad_line_is_named(line: bytes, tmp_path: Path) -> None:
    head = msgspec.json.encode(header("sync"))
    path = tmp_path / "run.jsonl"
    path.write_bytes(head + b"\n" + line.replace(b"HEADER", head) + b"\n")
    with pytest.raises(TraceError, match=re.escape(f"{path}:2: ")):
        read_trace(path)
