# SPDX-License-Identifier: BSD-3-Clause
"""Which worker each interval of waiting is charged to."""

import pytest

from paceline.core.decider import Decider
from paceline.core.events import Fate
from paceline.core.policies import parse_policy
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.event_records import record_gap
from paceline.trace.schema import (
    Awaited,
    Ended,
    Gap,
    Gradient,
    Header,
    Joined,
    Left,
    Paused,
    Record,
    Restored,
    Resumed,
    Timer,
    Trace,
    Update,
)
from paceline.watch.audit import audit
from paceline.watch.summary import summarize
from paceline.watch.waiting import DEADLINE, Unanswered, unanswered, waited_for, waits

ACCEPTED, CANCELLED, NON_FINITE = Fate.ACCEPTED, Fate.CANCELLED, Fate.NON_FINITE


def traced(policy: str, *records: Record, workers: int = 3, **header: object) -> Trace:
    """Return a sound trace of workers that join at 0."""
    joined = [Joined(0.0, worker) for worker in range(workers)]
    head = Header(source="run", policy=policy, workers=workers, **header)
    # The run begins once the policy has enough workers; the others join after that.
    for begin in range(1, workers + 1):
        trace = Trace(head, [*joined[:begin], Resumed(0.0), *joined[begin:], *records])
        try:
            audit(trace)
        except ValueError:
            continue
        return trace
    audit(trace)
    raise AssertionError


def test_each_interval_is_charged_to_the_worker_that_ended_it() -> None:
    trace = traced(
        "sync",
        Gradient(1.0, 0, 1, 0, ACCEPTED, 0, 0.0, 1.0),
        Gradient(2.0, 1, 1, 0, ACCEPTED, 0, 0.0, 2.0),
        Gradient(10.0, 2, 1, 0, ACCEPTED, 0, 0.0, 10.0),
        Update(10.0, 1, (0, 1, 2), 3),
        Gradient(11.0, 2, 2, 1, ACCEPTED, 0, 10.0, 1.0),
        Gradient(13.0, 0, 2, 1, ACCEPTED, 0, 10.0, 3.0),
        Gradient(13.5, 1, 2, 1, ACCEPTED, 0, 10.0, 3.5),
        Update(13.5, 2, (2, 0, 1), 3),
    )
    assert waited_for(trace) == {2: 8.0, 0: 2.0, 1: 1.5}


def test_report_on_an_old_version_ends_no_interval() -> None:
    """Worker 2 reports on an old version while worker 0 waits for worker 1."""
    trace = traced(
        "backup:1",
        Gradient(1.0, 0, 1, 0, ACCEPTED, 0, 0.0, 1.0),
        Gradient(2.0, 1, 1, 0, ACCEPTED, 0, 0.0, 2.0),
        Update(2.0, 1, (0, 1), 2),
        Gradient(3.0, 0, 2, 1, ACCEPTED, 0, 2.0, 1.0),
        Gradient(4.0, 2, 1, 0, CANCELLED, 1, 0.0, 2.0, 0),
        Gradient(6.0, 1, 2, 1, ACCEPTED, 0, 2.0, 4.0),
        Update(6.0, 2, (0, 1), 2),
    )
    assert waited_for(trace) == {1: 4.0}


def test_worker_whose_leaving_releases_the_others_is_charged() -> None:
    trace = traced(
        "sync",
        Gradient(1.0, 0, 1, 0, ACCEPTED, 0, 0.0, 1.0),
        Left(5.0, 1, "killed", 0.0),
        Update(5.0, 1, (0,), 2),
        workers=2,
    )
    assert waited_for(trace) == {1: 4.0}


def test_gradient_that_is_not_finite_ends_an_interval() -> None:
    trace = traced(
        "sync",
        Gradient(1.0, 0, 1, 0, ACCEPTED, 0, 0.0, 1.0),
        Gradient(3.0, 1, 1, 0, NON_FINITE, 0, 0.0, 3.0),
        Update(3.0, 1, (0,), 2),
        workers=2,
    )
    assert waited_for(trace) == {1: 2.0}


def test_interval_ended_by_a_deadline_is_charged_to_the_deadline() -> None:
    trace = traced(
        "deadline:after=4s",
        Gradient(1.0, 0, 1, 0, ACCEPTED, 0, 0.0, 1.0),
        Gradient(2.0, 1, 1, 0, ACCEPTED, 0, 0.0, 2.0),
        Timer(4.0, 1),
        Update(4.0, 1, (0, 1), 3),
        Gradient(4.0, 2, 1, 0, CANCELLED, 1, 0.0, 4.0, 0),
    )
    assert waited_for(trace) == {DEADLINE: 2.0, 1: 1.0}


def test_pause_does_not_count_as_waiting() -> None:
    trace = traced(
        "sync",
        Gradient(1.0, 0, 1, 0, ACCEPTED, 0, 0.0, 1.0),
        Left(2.0, 1, "killed", 0.0),
        Paused(2.0, "1 of at least 2 workers; waits for 1"),
        Joined(7.0, 1),
        Resumed(7.0),
        Gradient(9.0, 1, 2, 0, ACCEPTED, 0, 7.0, 2.0),
        Update(9.0, 1, (0, 1), 2),
        workers=2,
        min_workers=2,
    )
    assert waited_for(trace) == {1: 1.0 + 2.0}


def test_time_without_a_server_does_not_count_as_waiting() -> None:
    header = Header(source="run", policy="sync", workers=2)
    trace = traced(
        "sync",
        Gradient(1.0, 0, 1, 0, ACCEPTED, 0, 0.0, 1.0),
        Restored(3.0, 0, header),
        Joined(8.0, 0),
        Joined(8.0, 1),
        Resumed(8.0),
        Gradient(9.0, 0, 1, 0, ACCEPTED, 0, 8.0, 1.0),
        Gradient(9.5, 1, 1, 0, ACCEPTED, 0, 8.0, 1.5),
        Update(9.5, 1, (0, 1), 2),
        workers=2,
    )
    assert waited_for(trace) == {1: 0.5}


def test_worker_of_a_killed_server_does_not_wait_at_the_next_one() -> None:
    header = Header(source="run", policy="sync", workers=2)
    trace = traced(
        "sync",
        Gradient(1.0, 0, 1, 0, ACCEPTED, 0, 0.0, 1.0),
        Gradient(1.5, 1, 1, 0, ACCEPTED, 0, 0.0, 1.5),
        Update(1.5, 1, (0, 1), 2),
        Restored(3.0, 1, header),
        Joined(8.0, 0),
        Joined(8.0, 1),
        Resumed(8.0),
        Gradient(9.0, 0, 1, 1, ACCEPTED, 0, 8.0, 1.0),
        Gradient(9.5, 1, 1, 1, ACCEPTED, 0, 8.0, 1.5),
        Update(9.5, 2, (0, 1), 2),
        workers=2,
    )
    assert waited_for(trace) == {1: 0.5 + 0.5}


def test_waiting_under_ssp_goes_on_after_a_restart() -> None:
    """Worker 0 waited when the server was killed; at the next one it waits from 9 s to 12 s."""
    header = Header(source="run", policy="ssp:0", workers=2)
    trace = traced(
        "ssp:0",
        Gradient(1.0, 0, 1, 0, ACCEPTED, 0, 0.0, 1.0),
        Update(1.0, 1, (0,), 1),
        Restored(3.0, 1, header),
        Joined(8.0, 0),
        Resumed(8.0),
        Joined(8.0, 1),
        Gradient(9.0, 0, 1, 1, ACCEPTED, 0, 8.0, 1.0),
        Update(9.0, 2, (0,), 1),
        Gradient(12.0, 1, 1, 1, ACCEPTED, 1, 8.0, 4.0),
        Update(12.0, 3, (1,), 1),
        Gradient(13.0, 0, 2, 3, ACCEPTED, 0, 12.0, 1.0),
        Update(13.0, 4, (0,), 1),
        workers=2,
    )
    assert waited_for(trace) == {1: 3.0}


def test_worker_that_hangs_does_not_wait() -> None:
    """Worker 2 is never heard of again, and the others go on without it."""
    trace = traced(
        "backup:1",
        Gradient(1.0, 0, 1, 0, ACCEPTED, 0, 0.0, 1.0),
        Gradient(1.5, 2, 1, 0, ACCEPTED, 0, 0.0, 1.5),
        Update(1.5, 1, (0, 2), 2),
        Gradient(1.5, 1, 1, 0, CANCELLED, 1, 0.0, 1.5, 0),
        Gradient(2.5, 0, 2, 1, ACCEPTED, 0, 1.5, 1.0),
        Gradient(3.0, 1, 2, 1, ACCEPTED, 0, 1.5, 1.5),
        Update(3.0, 2, (0, 1), 2),
        Gradient(4.0, 0, 3, 2, ACCEPTED, 0, 3.0, 1.0),
        Gradient(4.5, 1, 3, 2, ACCEPTED, 0, 3.0, 1.5),
        Update(4.5, 3, (0, 1), 2),
    )
    assert waited_for(trace) == {2: 0.5, 1: 0.5 + 0.5}


def test_reports_after_the_last_update_are_not_charged() -> None:
    trace = traced(
        "backup:1",
        Gradient(1.0, 0, 1, 0, ACCEPTED, 0, 0.0, 1.0),
        Gradient(2.0, 1, 1, 0, ACCEPTED, 0, 0.0, 2.0),
        Update(2.0, 1, (0, 1), 2),
        Gradient(9.0, 2, 1, 0, CANCELLED, 1, 0.0, 2.0, 0),
        Left(10.0, 2),
        Ended(2.0, 1),
        steps=1,
    )
    assert waited_for(trace) == {1: 1.0}


def test_leaving_after_the_end_is_not_charged() -> None:
    """Workers leave one after the other when their scripts end."""
    trace = traced(
        "sync",
        Gradient(1.0, 0, 1, 0, ACCEPTED, 0, 0.0, 1.0),
        Gradient(1.5, 1, 1, 0, ACCEPTED, 0, 0.0, 1.5),
        Update(1.5, 1, (0, 1), 2),
        Left(8.0, 0),
        Left(9.0, 1),
        Ended(1.5, 1),
        workers=2,
        steps=1,
    )
    assert waited_for(trace) == {1: 0.5}


@pytest.mark.parametrize("policy", ["sync", "backup:1", "deadline", "delayed:1", "ssp:1"])
def test_waiting_is_at_most_the_time_of_the_run(policy: str) -> None:
    spec = RunSpec(workers=4, steps=5)
    trace = simulate(policy, Cluster.parse("50ms + exp:10ms; worker 2 x3"), spec)
    *records, end = trace.records
    left = [Left(end.t + 10.0 + worker, worker) for worker in range(4)]
    after = Trace(trace.header, [*records, *left, end])
    assert sum(waited_for(after).values()) <= summarize(after).seconds


def test_delayed_waits_only_when_a_worker_has_no_work_left() -> None:
    """Worker 0 computes for the second update meanwhile; from 2 s on it has nothing to do."""
    trace = traced(
        "delayed:1",
        Gradient(1.0, 0, 1, 0, ACCEPTED, 0, 0.0, 1.0),
        Gradient(2.0, 0, 2, 0, ACCEPTED, 1, 1.0, 1.0),
        Gradient(5.0, 1, 1, 0, ACCEPTED, 0, 0.0, 5.0),
        Update(5.0, 1, (0, 1), 2),
        workers=2,
    )
    assert waited_for(trace) == {1: 3.0}


def test_ssp_charges_the_worker_that_releases_the_others() -> None:
    """Worker 0 is one gradient ahead at 1 s, and waits until worker 1 reports its first."""
    trace = traced(
        "ssp:0",
        Gradient(1.0, 0, 1, 0, ACCEPTED, 0, 0.0, 1.0),
        Update(1.0, 1, (0,), 1),
        Gradient(4.0, 1, 1, 0, ACCEPTED, 1, 0.0, 4.0),
        Update(4.0, 2, (1,), 1),
        Gradient(5.0, 0, 2, 2, ACCEPTED, 0, 4.0, 1.0),
        Update(5.0, 3, (0,), 1),
        workers=2,
    )
    assert waited_for(trace) == {1: 3.0}


@pytest.mark.parametrize("policy", ["async", "softsync:3", "batchsync:5", "softsync:3,lr=constant"])
def test_policies_without_barriers_never_wait(policy: str) -> None:
    trace = simulate(policy, Cluster.parse("50ms + exp:30ms"), RunSpec(workers=3, steps=40))
    assert not waits(policy)
    assert waited_for(trace) == {}


@pytest.mark.parametrize("policy", ["sync", "backup:1", "deadline", "delayed:1", "ssp:1"])
def test_charges_never_exceed_the_time_of_the_run(policy: str) -> None:
    spec = RunSpec(workers=4, steps=100)
    trace = simulate(policy, Cluster.parse("50ms + exp:10ms; worker 2 x3"), spec)
    waited = waited_for(trace)
    assert waits(policy)
    assert 0 < sum(waited.values()) <= trace.records[-1].t
    if policy != "backup:1":  # it doesn't wait for the slow worker
        assert max(waited, key=lambda worker: waited[worker]) in (2, DEADLINE)


def test_charges_add_up_to_the_time_from_first_report_to_update() -> None:
    trace = simulate("sync", Cluster.parse("50ms + exp:30ms"), RunSpec(workers=5, steps=50))
    first: dict[int, float] = {}
    for gradient in trace.gradients():
        first.setdefault(gradient.version, gradient.t)
    waited = sum(update.t - first[update.update - 1] for update in trace.updates())
    assert sum(waited_for(trace).values()) == pytest.approx(waited)


HUNG = (
    Gradient(1.0, 0, 1, 0, ACCEPTED, 0, 0.0, 1.0),
    Gradient(1.0, 1, 1, 0, ACCEPTED, 0, 0.0, 1.0),
    Update(1.0, 1, (0, 1), 2),
    Gradient(2.0, 0, 2, 1, ACCEPTED, 0, 1.0, 1.0),
    Awaited(6.0, 1, 1.0),
    Awaited(11.0, 1, 1.0),
)


def test_worker_that_never_reported_is_found() -> None:
    assert unanswered(traced("sync", *HUNG, workers=2)) == [Unanswered(1, 1.0, 10.0)]


def test_hung_worker_was_waited_for_until_it_left() -> None:
    left = (Left(14.0, 1, "killed", 1.0), Update(14.0, 2, (0,), 2))
    assert unanswered(traced("sync", *HUNG, *left, workers=2)) == [Unanswered(1, 1.0, 13.0)]


def test_answer_that_a_killed_server_may_have_got_is_not_known() -> None:
    header = Header(source="run", policy="sync", workers=2)
    restored = Restored(12.0, 1, header)
    assert unanswered(traced("sync", *HUNG, restored, workers=2)) == []
    left = (Left(11.5, 1, "killed", 1.0), Update(11.5, 2, (0,), 2))
    trace = traced("sync", *HUNG, *left, restored, workers=2)
    assert unanswered(trace) == [Unanswered(1, 1.0, 10.5)]


def gap_after(trace: Trace, *hidden: Record) -> Trace:
    """Return the trace with a gap that hides these records."""
    decider = Decider(parse_policy(trace.header.policy), trace.header.spec())
    for event in Trace(trace.header, [*trace.records, *hidden]).events():
        decider.handle(event)
    gap = record_gap(20.0, decider.policy, decider.ledger, [])
    return Trace(trace.header, [*trace.records, gap])


def test_answer_in_a_gap_counts() -> None:
    hung = traced("sync", *HUNG, workers=2)
    assert unanswered(gap_after(hung)) == [Unanswered(1, 1.0, 19.0)]  # it has not answered yet
    late = (Gradient(12.0, 1, 2, 1, ACCEPTED, 0, 1.0, 11.0), Update(12.0, 2, (0, 1), 2))
    assert unanswered(gap_after(hung, *late)) == []
    assert unanswered(gap_after(hung, Left(12.0, 1, "killed", 1.0))) == []
    assert unanswered(Trace(hung.header, [*hung.records, Gap(20.0, 1)])) == []


def test_worker_that_reported_at_last_has_answered() -> None:
    late = (Gradient(12.0, 1, 2, 1, ACCEPTED, 0, 1.0, 11.0), Update(12.0, 2, (0, 1), 2))
    assert unanswered(traced("sync", *HUNG, *late, workers=2)) == []
