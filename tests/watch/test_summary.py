# SPDX-License-Identifier: BSD-3-Clause
"""The numbers in a trace, against traces small enough to be summed up by hand."""

import msgspec
import pytest

from paceline.core.events import Fate
from paceline.errors import TraceError
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.watch.audit import audit
from paceline.watch.summary import Spread, Summary, WorkerSummary, summarize
from paceline.watch.trace import (
    Ended,
    Gradient,
    Header,
    Joined,
    Left,
    Paused,
    Resumed,
    Trace,
    Update,
)

ACCEPTED, LATE, CANCELLED = Fate.ACCEPTED, Fate.LATE, Fate.CANCELLED

BACKUP = Trace(
    Header(source="run", policy="backup:1", workers=3, steps=2, late="finish"),
    [
        Joined(0.0, 0),
        Joined(0.0, 1),
        Resumed(0.0),
        Joined(0.0, 2),
        # Worker 2 computes 0.5 s of its first second; the rest is on the way.
        Gradient(1.0, 2, 1, 0, ACCEPTED, 0, 0.0, 0.5, 32, 100, 100),
        Gradient(2.0, 0, 1, 0, ACCEPTED, 0, 0.0, 2.0, 32, 100, 100),
        Update(2.0, 1, (2, 0), 2),
        Gradient(3.0, 2, 2, 1, ACCEPTED, 0, 2.0, 1.0, 32, 100, 100),
        Left(4.0, 2, "killed"),  # while it waits
        Gradient(5.0, 1, 1, 0, LATE, 1, 0.0, 4.0, 32, 100, 0),
        Gradient(6.0, 0, 2, 1, ACCEPTED, 0, 2.0, 4.0, 32, 100, 100),
        Update(6.0, 2, (2, 0), 2),
        Gradient(6.0, 1, 2, 1, CANCELLED, 1, 5.0, 1.0, 0, 100, 0),
        Ended(6.0, 2),
    ],
)
"""Three workers, N = 2: worker 0 is always busy, 1 is late, 2 leaves in the middle."""

ASYNC = Trace(
    Header(source="run", policy="async", workers=2, steps=4),
    [
        Joined(0.0, 0),
        Resumed(0.0),
        Joined(0.0, 1),
        Gradient(1.0, 0, 1, 0, ACCEPTED, 0, 0.0, 1.0),
        Update(1.0, 1, (0,), 1),
        Gradient(2.0, 0, 2, 1, ACCEPTED, 0, 1.0, 1.0),
        Update(2.0, 2, (0,), 1),
        Gradient(3.0, 1, 1, 0, ACCEPTED, 2, 0.0, 3.0),
        Update(3.0, 3, (1,), 1),
        Gradient(5.0, 0, 3, 2, ACCEPTED, 1, 2.0, 3.0),
        Update(5.0, 4, (0,), 1),
        Gradient(5.0, 1, 2, 3, CANCELLED, 1, 3.0, 2.0, 0),
        Ended(5.0, 4),
    ],
)
"""Two workers; worker 1 is under way when the run ends."""


@pytest.mark.parametrize("trace", [BACKUP, ASYNC], ids=["backup", "async"])
def test_the_traces_made_by_hand_could_be_real(trace: Trace) -> None:
    audit(trace)


def test_the_time_of_updates_is_between_one_and_the_next() -> None:
    summary = summarize(BACKUP)  # made at 2 and at 6
    assert summary.updates == 2
    assert summary.seconds == 6.0
    assert summary.updates_per_s == pytest.approx(1 / 3)
    assert summary.step_s == Spread(
        mean=3.0, p50=3.0, p90=pytest.approx(3.8), p99=pytest.approx(3.98), max=4.0
    )


def test_contributions_and_fates_are_counted() -> None:
    summary = summarize(BACKUP)
    assert (summary.policy, summary.workers) == ("backup:1", 3)
    assert summary.contributions == 2.0
    assert summary.fates == {ACCEPTED: 4, LATE: 1, CANCELLED: 1}
    assert (summary.staleness_mean, summary.staleness) == (0.0, {0: 4})
    assert (summary.pauses, summary.ended) == (0, "finished")


def test_staleness_is_that_of_accepted_gradients() -> None:
    summary = summarize(ASYNC)
    assert summary.staleness == {0: 2, 1: 1, 2: 1}
    assert summary.staleness_mean == 0.75


def test_who_waits_is_idle_and_who_is_gone_is_not() -> None:
    """Worker 2 is here for 4 s and asked for 2 of them; the others are asked all the time."""
    summary = summarize(BACKUP)
    assert [w.idle_share for w in summary.by_worker] == [0.0, 0.0, 0.5]
    assert summary.idle_share == pytest.approx(1 / 6)


def test_only_late_work_is_wasted() -> None:
    """4 s of worker 1, of 12.5 s that were computed; the last second was under way."""
    assert summarize(BACKUP).wasted_share == pytest.approx(4 / 12.5)


def test_bytes_are_counted_both_ways() -> None:
    """4 gradients in full, and twice the parameters alone: 1000 bytes, 100 of them for a late one.

    Those of the work under way at the end are not in vain.
    """
    summary = summarize(BACKUP)
    assert summary.sent_bytes_per_update == 500.0
    assert summary.vain_bytes_per_update == 50.0


def test_each_worker_has_its_own_numbers() -> None:
    zero, one, two = summarize(BACKUP).by_worker
    assert [w.worker for w in (zero, one, two)] == [0, 1, 2]
    assert [w.fates for w in (zero, one, two)] == [
        {ACCEPTED: 2},
        {LATE: 1, CANCELLED: 1},
        {ACCEPTED: 2},
    ]
    assert [w.acceptance for w in (zero, one, two)] == [1.0, 0.0, 1.0]
    assert zero.compute_s == Spread(
        mean=3.0, p50=3.0, p90=pytest.approx(3.8), p99=pytest.approx(3.98), max=4.0
    )
    assert one.compute_s == Spread(4.0, 4.0, 4.0, 4.0, 4.0)  # what was given up is not the whole
    assert (zero.wasted_share, two.wasted_share) == (0.0, 0.0)


def test_work_under_way_at_the_end_is_not_waste() -> None:
    assert summarize(ASYNC).wasted_share == 0.0


def test_work_under_way_at_the_end_is_not_the_waste_of_a_worker() -> None:
    assert [w.wasted_share for w in summarize(ASYNC).by_worker] == [0.0, 0.0]
    assert summarize(BACKUP).by_worker[1].wasted_share == pytest.approx(4 / 5)


@pytest.mark.parametrize("policy", ["async", "softsync:2", "ssp:3", "sync", "delayed:1"])
def test_a_rule_that_drops_nothing_wastes_nothing(policy: str) -> None:
    cluster = Cluster.parse("50ms + exp:30ms", "model=1MB,bandwidth=50MB,delay=1ms")
    summary = summarize(simulate(policy, cluster, RunSpec(workers=3, steps=40)))
    assert summary.wasted_share == 0.0
    assert summary.vain_bytes_per_update == 0.0


def test_a_worker_that_finished_nothing_has_no_computation_time() -> None:
    records = [r for r in ASYNC.records if not isinstance(r, Gradient) or r.worker == 0]
    idle = summarize(Trace(ASYNC.header, records)).by_worker[1]
    assert idle == WorkerSummary(1, {}, None, 1.0, 0.0, 0.0, 0.0)
    assert idle.acceptance == 0.0


def test_the_time_between_leaving_and_returning_is_nobodys_idleness() -> None:
    """Worker 0 is here for 1 s and for 2 s, and computes all of that."""
    trace = Trace(
        Header(source="run", policy="async", workers=1, steps=2),
        [
            Joined(0.0, 0),
            Resumed(0.0),
            Gradient(1.0, 0, 1, 0, ACCEPTED, 0, 0.0, 1.0),
            Update(1.0, 1, (0,), 1),
            Left(1.0, 0, "killed"),
            Paused(1.0, "nobody is here"),
            Joined(3.0, 0),
            Resumed(3.0),
            Gradient(5.0, 0, 1, 1, ACCEPTED, 0, 3.0, 2.0),
            Update(5.0, 2, (0,), 1),
            Ended(5.0, 2),
        ],
    )
    summary = summarize(trace)
    assert summary.idle_share == 0.0
    assert summary.pauses == 1
    assert summary.step_s.max == 4.0


def test_a_trace_without_an_end_breaks_off() -> None:
    assert summarize(Trace(BACKUP.header, BACKUP.records[:-1])).ended == "the trace breaks off"


def test_the_reason_of_the_end_is_told() -> None:
    records = [*BACKUP.records[:-1], Ended(6.0, 2, reason="stalled: for a reason")]
    assert summarize(Trace(BACKUP.header, records)).ended == "stalled: for a reason"


@pytest.mark.parametrize("records", [[], BACKUP.records[:6]], ids=["nothing", "no update"])
def test_a_trace_without_updates_cannot_be_summed_up(records: list[object]) -> None:
    with pytest.raises(TraceError, match="no update"):
        summarize(Trace(BACKUP.header, records))


def test_an_update_that_took_no_time_has_no_finite_rate() -> None:
    trace = simulate("sync", Cluster.parse("0ms"), RunSpec(workers=2, steps=3))
    summary = summarize(trace)
    assert summary.updates_per_s == float("inf")
    assert (summary.idle_share, summary.wasted_share) == (0.0, 0.0)


def test_a_summary_can_be_written_as_json_and_read_again() -> None:
    summary = summarize(BACKUP)
    assert msgspec.json.decode(msgspec.json.encode(summary), type=Summary) == summary
