# SPDX-License-Identifier: BSD-3-Clause
"""Summaries of traces small enough to check by hand."""

import msgspec
import pytest

from paceline.core.events import Fate
from paceline.errors import TraceError
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import (
    Ended,
    Gradient,
    Header,
    Joined,
    Left,
    Paused,
    Restored,
    Resumed,
    Stopped,
    Trace,
    Update,
)
from paceline.watch.audit import audit
from paceline.watch.segments import kept_updates, split, without_lost
from paceline.watch.summary import (
    Restoration,
    Spread,
    Summary,
    WorkerSummary,
    end_reason,
    outcomes,
    summarize,
)
from paceline.watch.traffic import Traffic

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
"""Two workers; worker 1 is still computing when the run ends."""

SYNC = Header(source="run", policy="sync", workers=2, steps=3)


def sync_round(update: int, turn: int, asked_at: float) -> list[Gradient | Update]:
    """Return a second of two workers: one computes all the time, the other half of it."""
    t, version = asked_at + 1.0, update - 1
    return [
        Gradient(t - 0.5, 0, turn, version, ACCEPTED, 0, asked_at, 0.5, 32),
        Gradient(t, 1, turn, version, ACCEPTED, 0, asked_at, 1.0, 32),
        Update(t, update, (0, 1), 2),
    ]


def begin(t: float) -> list[Joined | Resumed]:
    return [Joined(t, 0), Joined(t, 1), Resumed(t)]


TURNS = {0: 1, 1: 1}

LOST = Trace(
    SYNC,
    [
        *begin(0.0),
        *sync_round(1, 1, 0.0),
        *sync_round(2, 2, 1.0),
        Gradient(2.5, 0, 3, 2, ACCEPTED, 0, 2.0, 0.5, 32),  # for an update that is never made
        Restored(2.5, 1, SYNC, 10.0, TURNS),
        *begin(4.0),
        *sync_round(2, 2, 4.0),
        *sync_round(3, 3, 5.0),
        Ended(6.0, 3),
    ],
)
"""The server dies after update 2 while update 3 is pending, and continues from update 1."""


@pytest.mark.parametrize("trace", [BACKUP, ASYNC, LOST], ids=["backup", "async", "lost"])
def test_handmade_traces_are_sound(trace: Trace) -> None:
    audit(trace)


def test_step_time_is_the_time_between_updates() -> None:
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


def test_waiting_worker_is_idle_and_absent_worker_is_not() -> None:
    """Worker 2 is here for 4 s and asked for 2 of them; the others are asked all the time."""
    summary = summarize(BACKUP)
    assert [w.idle_share for w in summary.by_worker] == [0.0, 0.0, 0.5]
    assert summary.idle_share == pytest.approx(1 / 6)


def test_only_late_work_is_wasted() -> None:
    """4 s of worker 1, of 12.5 s of computation; the last second was under way at the end."""
    assert summarize(BACKUP).wasted_share == pytest.approx(4 / 12.5)


def test_bytes_are_counted_both_ways() -> None:
    """4 gradients in full, and twice the parameters alone."""
    summary = summarize(BACKUP)
    assert summary.traffic == Traffic(600.0, 400.0, 0.0)
    assert summary.traffic_per_update == Traffic(300.0, 200.0, 0.0)
    assert [w.traffic for w in summary.by_worker] == [
        Traffic(200.0, 200.0, 0.0),
        Traffic(200.0, 0.0, 0.0),
        Traffic(200.0, 200.0, 0.0),
    ]


def test_bytes_of_dropped_gradients_are_in_vain_unless_they_were_under_way_at_the_end() -> None:
    """The late gradient was sent in part, and so was the one that the end cancelled."""
    records = [
        msgspec.structs.replace(r, pushed_bytes=40.0)
        if isinstance(r, Gradient) and r.worker == 1
        else r
        for r in BACKUP.records
    ]
    summary = summarize(Trace(BACKUP.header, records))
    assert summary.traffic == Traffic(600.0, 480.0, 40.0)
    assert summary.by_worker[1].traffic == Traffic(200.0, 80.0, 40.0)


def test_bytes_of_lost_updates_are_in_vain() -> None:
    """Update 2 and the gradient for update 3 are lost with the server."""
    records = [
        msgspec.structs.replace(r, pushed_bytes=10.0) if isinstance(r, Gradient) else r
        for r in LOST.records
    ]
    assert summarize(Trace(LOST.header, records)).traffic == Traffic(0.0, 90.0, 30.0)


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
    assert one.compute_s == Spread(4.0, 4.0, 4.0, 4.0, 4.0)  # abandoned work has no full time
    assert (zero.wasted_share, two.wasted_share) == (0.0, 0.0)


def test_work_under_way_at_the_end_is_not_waste() -> None:
    assert summarize(ASYNC).wasted_share == 0.0


def test_work_under_way_at_the_end_is_not_the_waste_of_a_worker() -> None:
    assert [w.wasted_share for w in summarize(ASYNC).by_worker] == [0.0, 0.0]
    assert summarize(BACKUP).by_worker[1].wasted_share == pytest.approx(4 / 5)


@pytest.mark.parametrize("policy", ["async", "softsync:2", "ssp:3", "sync", "delayed:1"])
def test_policy_that_drops_nothing_wastes_nothing(policy: str) -> None:
    cluster = Cluster.parse("50ms + exp:30ms", "model=1MB,bandwidth=50MB,delay=1ms")
    summary = summarize(simulate(policy, cluster, RunSpec(workers=3, steps=40)))
    assert summary.wasted_share == 0.0
    assert summary.traffic
    assert summary.traffic.vain_bytes == 0.0


def test_worker_that_finished_nothing_has_no_computation_time() -> None:
    records = [r for r in ASYNC.records if not isinstance(r, Gradient) or r.worker == 0]
    idle = summarize(Trace(ASYNC.header, records)).by_worker[1]
    assert idle == WorkerSummary(1, {}, 0, 0, None, 1.0, 0.0, 0.0, 0.0)
    assert idle.acceptance == 0.0


def test_absence_is_not_idleness() -> None:
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


def test_trace_without_an_end_breaks_off_unless_it_is_growing() -> None:
    header, records = BACKUP.header, BACKUP.records
    assert summarize(Trace(header, records[:-1])).ended == "the trace breaks off"
    assert summarize(Trace(header, records[:-1], is_growing=True)).ended == "still running"
    assert summarize(Trace(header, records, is_growing=True)).ended == "finished"


def test_end_reason_is_reported() -> None:
    records = [*BACKUP.records[:-1], Ended(6.0, 2, reason="stalled: for a reason")]
    assert summarize(Trace(BACKUP.header, records)).ended == "stalled: for a reason"


@pytest.mark.parametrize("records", [[], BACKUP.records[:6]], ids=["nothing", "no update"])
def test_trace_without_updates_has_no_summary(records: list[object]) -> None:
    with pytest.raises(TraceError, match="no update"):
        summarize(Trace(BACKUP.header, records))


def test_updates_in_zero_time_have_an_infinite_rate() -> None:
    trace = simulate("sync", Cluster.parse("0ms"), RunSpec(workers=2, steps=3))
    summary = summarize(trace)
    assert summary.updates_per_s == float("inf")
    assert (summary.idle_share, summary.wasted_share) == (0.0, 0.0)


def test_summary_survives_json() -> None:
    summary = summarize(BACKUP)
    assert msgspec.json.decode(msgspec.json.encode(summary), type=Summary) == summary


# ---- restorations ----


def test_only_kept_updates_are_counted() -> None:
    summary = summarize(LOST)
    assert summary.updates == 3
    assert [u.t for u in kept_updates(split(LOST))] == [1.0, 5.0, 6.0]
    assert summary.staleness == {0: 6}
    assert summary.contributions == 2.0


def test_each_restoration_has_its_losses() -> None:
    summary = summarize(LOST)
    assert summary.lost_updates == 1
    assert summary.restorations == [
        Restoration(t=2.5, version=1, lost=1, down_s=10.0, resumed=False)
    ]


def test_time_of_lost_updates_is_part_of_the_run() -> None:
    summary = summarize(LOST)
    assert summary.seconds == 6.0
    assert summary.updates_per_s == 0.5
    assert summary.step_s.max == 3.0  # from update 2 to the second update 2


def test_work_for_lost_updates_is_wasted_but_was_accepted() -> None:
    """1.5 s for update 2 and 0.5 s for update 3, of 6.5 s that were computed."""
    summary = summarize(LOST)
    assert summary.wasted_share == pytest.approx(2 / 6.5)
    assert summary.fates == {ACCEPTED: 9}
    assert summary.acceptance == 1.0


def test_lost_gradients_do_not_count_as_accepted() -> None:
    """Of nine gradients, one was for the pending update 3, and two for the lost update 2."""
    summary = summarize(LOST)
    assert (summary.lost_gradients, outcomes(summary)) == (3, {"accepted": 6, "lost": 3})
    assert [outcomes(w) for w in summary.by_worker] == [
        {"accepted": 3, "lost": 2},
        {"accepted": 3, "lost": 1},
    ]
    assert [w.samples for w in summary.by_worker] == [96, 96]
    assert summary.samples == 192


def test_samples_that_several_gradients_use_count_once() -> None:
    """As in a GAN, whose two optimizers use each batch; a trace may lack `new_samples`."""
    records = [
        msgspec.structs.replace(record, new_samples=new) if isinstance(record, Gradient) else record
        for update, new in ((1, 32), (2, 0), (3, None))
        for record in sync_round(update, update, float(update))
    ]
    summary = summarize(Trace(SYNC, [*begin(0.0), *records]))
    assert [w.samples for w in summary.by_worker] == [64, 64]
    assert summary.samples == 128


def test_gradients_for_an_update_after_the_end_are_lost() -> None:
    """It was accepted for update 2, which was never made."""
    early = Gradient(1.5, 0, 2, 1, ACCEPTED, 0, 1.0, 0.5, 7)
    records = [*begin(0.0), *sync_round(1, 1, 0.0), early, Stopped(2.0)]
    summary = summarize(Trace(SYNC, [*records, Ended(2.0, 1, (0,), "stopped")]))
    assert outcomes(summary) == {"accepted": 2, "lost": 1}
    assert summary.samples == 64
    assert summarize(Trace(SYNC, records, is_growing=True)).lost_gradients == 0  # not yet


def test_time_without_a_server_is_not_idleness() -> None:
    """Both are here for 2 s in each segment; worker 0 works half of the time."""
    assert [w.idle_share for w in summarize(LOST).by_worker] == [0.5, 0.0]


def test_updates_can_be_lost_repeatedly() -> None:
    records = [
        *begin(0.0),
        *sync_round(1, 1, 0.0),
        *sync_round(2, 2, 1.0),
        *sync_round(3, 3, 2.0),
        Restored(3.0, 2, SYNC),
        *begin(3.0),
        *sync_round(3, 3, 3.0),
        Restored(4.0, 1, SYNC),
        *begin(4.0),
        *sync_round(2, 2, 4.0),
    ]
    summary = summarize(Trace(SYNC, records))
    assert summary.updates == 2
    assert [(r.version, r.lost) for r in summary.restorations] == [(2, 1), (1, 2)]
    assert summary.lost_updates == 3
    assert [u.t for u in kept_updates(split(Trace(SYNC, records)))] == [1.0, 5.0]


def test_restoration_right_before_the_end_keeps_earlier_updates() -> None:
    cut = next(i for i, r in enumerate(LOST.records) if isinstance(r, Restored))
    trace = Trace(SYNC, LOST.records[: cut + 1])
    summary = summarize(trace)
    assert (summary.updates, summary.seconds) == (1, 2.0)
    assert summary.ended == "the trace breaks off"


def test_run_that_lost_all_updates_has_no_summary() -> None:
    records = [*begin(0.0), *sync_round(1, 1, 0.0), Restored(1.0, 0, SYNC)]
    with pytest.raises(TraceError, match="no update"):
        summarize(Trace(SYNC, records))


def test_resumed_run_has_the_last_end() -> None:
    stopped = [*begin(0.0), *sync_round(1, 1, 0.0), Ended(1.0, 1, reason="stopped")]
    goes_on = [*stopped, Restored(1.0, 1, SYNC), *begin(2.0), *sync_round(2, 2, 2.0)]
    assert end_reason(Trace(SYNC, stopped)) == "stopped"
    assert end_reason(Trace(SYNC, goes_on)) == "the trace breaks off"
    summary = summarize(Trace(SYNC, [*goes_on, Ended(3.0, 2)]))
    assert (summary.updates, summary.ended, summary.lost_updates) == (2, "finished", 0)


def test_resumed_run_has_the_last_policy() -> None:
    other = Header(source="run", policy="backup:1", workers=2, steps=5)
    records = [*begin(0.0), *sync_round(1, 1, 0.0), Restored(1.0, 1, other)]
    assert summarize(Trace(SYNC, records)).policy == "backup:1"


def test_trace_without_losses_has_each_update_once() -> None:
    kept = without_lost(LOST)
    assert [u.update for u in kept.updates()] == [1, 2, 3]
    assert [g.t for g in kept.gradients()] == [0.5, 1.0, 4.5, 5.0, 5.5, 6.0]
    assert without_lost(BACKUP) == BACKUP


def test_leaving_after_the_end_is_not_idleness() -> None:
    """A real run's workers leave some time after the last update."""
    records = [*LOST.records[:-1], Left(60.0, 0), Left(60.0, 1), LOST.records[-1]]
    assert [w.idle_share for w in summarize(Trace(SYNC, records)).by_worker] == [0.5, 0.0]


def test_summary_with_restorations_survives_json() -> None:
    summary = summarize(LOST)
    assert msgspec.json.decode(msgspec.json.encode(summary), type=Summary) == summary
