# SPDX-License-Identifier: BSD-3-Clause
"""Computation times from a trace: exact if recorded, otherwise drawn and counted."""

import numpy as np
import pytest
from msgspec.structs import replace

from paceline.core.events import Fate
from paceline.errors import TraceError
from paceline.sim.cluster import Cluster
from paceline.sim.recorded_times import Replayed, recorded_times, recording_by_version
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import Gradient, Restored, Trace
from paceline.watch.summary import summarize

long = pytest.mark.uncounted

SPEC = RunSpec(workers=4, steps=60, seed=3)
UNEVEN = Cluster.parse("exp:20ms,shift=50ms; worker 2 x3")


def what_if(trace, policy, spec=SPEC):
    recording = recorded_times(trace, seed=0, with_travel=True)
    return simulate(policy, Cluster(Replayed(recording)), spec)


@pytest.mark.parametrize("policy", ["sync", "delayed:2"])
def test_same_rule_on_its_own_recording_is_the_same_run(policy):
    trace = simulate(policy, UNEVEN, SPEC)

    assert what_if(trace, policy).records == trace.records


def test_another_rule_sees_the_recorded_times():
    """Replaying a `sync` trace under `backup:1` gives what `backup:1` does with that seed."""
    recorded = simulate("sync", UNEVEN, SPEC)

    imagined = what_if(recorded, "backup:1")

    real = simulate("backup:1", UNEVEN, SPEC)
    assert imagined.records == real.records


def test_times_after_the_end_of_the_recording_are_drawn_from_it():
    recording = recorded_times(simulate("sync", UNEVEN, SPEC), seed=0, with_travel=True)

    times = Replayed(recording).stream(2, seed=0).draws(600)

    np.testing.assert_array_equal(times[:60], recording.times[2])
    assert set(times[60:]) <= set(recording.times[2])
    assert Replayed(recording).mean(2) == recording.times[2].mean()


def test_cancelled_times_are_completed_from_longer_ones_and_counted():
    trace = simulate("backup:1", UNEVEN, SPEC)

    recording = recorded_times(trace, seed=0, with_travel=True)

    gradients = list(trace.gradients())
    cancelled = [g for g in gradients if g.fate == "cancelled"]
    assert recording.drawn + recording.bounds == len(cancelled) > 0
    assert recording.total == len(gradients)
    for worker, times in recording.times.items():
        seen = [g.compute_s for g in gradients if g.worker == worker]
        assert np.all(times >= np.array(seen))
    words = f"{len(cancelled)} of {len(gradients)} computation times were cut short"
    assert words in recording.left_to_chance()


@long
def test_completed_times_are_close_to_the_true_ones():
    """Under `backup:1` most long times are cut short; `sync` is still within 20 % of the truth."""
    cluster = Cluster.parse("50ms + exp:1ms + 5% exp:500ms")
    spec = RunSpec(workers=8, steps=3000)
    truth = summarize(simulate("sync", cluster, spec)).step_s.mean

    imagined = summarize(what_if(simulate("backup:1", cluster, spec), "sync", spec)).step_s.mean

    assert imagined == pytest.approx(truth, rel=0.2)


NETWORK = "model=1MB,bandwidth=100MB,delay=1ms"


@pytest.mark.parametrize("network", ["", NETWORK])
@pytest.mark.parametrize("late", ["cancel", "finish"])
@pytest.mark.parametrize(
    "policy", ["sync", "backup:1", "batchsync:3", "async", "softsync:3", "ssp:2", "delayed:1"]
)
def test_rule_replayed_on_its_own_recording_makes_the_same_updates(policy, late, network):
    """Cancelled work takes longer than its bound, so it is cancelled again."""
    cluster = Cluster.parse("exp:20ms,shift=50ms; worker 2 x3", network)
    spec = RunSpec(workers=4, steps=60, seed=3, late=late)
    trace = simulate(policy, cluster, spec)
    recording = recorded_times(trace, seed=0, with_travel=False)

    again = simulate(policy, Cluster(Replayed(recording), cluster.network), spec)

    made = [(u.t, u.contributors) for u in trace.updates()]
    assert [(u.t, u.contributors) for u in again.updates()] == made


def test_all_times_are_as_recorded_if_nothing_was_cancelled():
    recording = recorded_times(simulate("sync", UNEVEN, SPEC), seed=0, with_travel=True)

    assert recording.left_to_chance() == "all 240 computation times are as recorded"


def test_cancelled_time_longer_than_any_finished_one_keeps_its_bound():
    """Worker 1 never finishes, and was cancelled after a longer time than any gradient took."""
    cluster = Cluster.parse("1s; worker 1 x100")
    trace = simulate("backup:1", cluster, RunSpec(workers=2, steps=1))

    recording = recorded_times(trace, seed=0, with_travel=True)

    assert recording.times[1].tolist() == [pytest.approx(1.0)]
    assert (recording.drawn, recording.bounds) == (0, 1)
    assert "1 is only known to be longer" in recording.left_to_chance()


def test_no_time_is_only_a_bound_if_longer_ones_were_finished():
    cluster = Cluster.parse("1s; worker 1 x1.5", faults="kill 0 at 3.1s")
    trace = simulate("backup:1", cluster, RunSpec(workers=2, steps=5))

    recording = recorded_times(trace, seed=0, with_travel=True)

    assert recording.drawn > 0
    assert recording.left_to_chance().endswith(f"{recording.drawn} are drawn from longer ones")


def test_transit_counts_as_computation_without_a_network():
    cluster = Cluster.parse("1s", "model=1MB,bandwidth=1MB,delay=100ms")
    trace = simulate("sync", cluster, RunSpec(workers=2, steps=3))

    with_it = recorded_times(trace, seed=0, with_travel=True)
    without = recorded_times(trace, seed=0, with_travel=False)

    np.testing.assert_allclose(with_it.times[0], [5.4] * 3)
    assert without.times[0].tolist() == [1.0] * 3


def test_duplicate_gradient_has_no_computation_time():
    trace = simulate("sync", UNEVEN, SPEC)
    again = next(trace.gradients())
    records = [*trace.records, replace(again, fate=Fate.DUPLICATE)]

    recording = recorded_times(Trace(trace.header, records), seed=0, with_travel=True)

    assert recording.total == 240


def test_trace_without_a_finished_gradient_is_refused():
    trace = simulate("sync", UNEVEN, SPEC)

    with pytest.raises(TraceError, match="no finished gradient"):
        recorded_times(Trace(trace.header, trace.records[:3]), seed=0, with_travel=True)


# ---- by version ----


def test_times_of_a_run_with_a_barrier_are_kept_by_version():
    trace = simulate("sync", UNEVEN, SPEC)

    recording = recorded_times(trace, seed=0, with_travel=True)

    assert recording.finished is None
    for worker in range(4):
        np.testing.assert_array_equal(recording.by_version[worker], recording.times[worker])
    model = recording.model()
    assert model.together
    assert model.mean(2) == recording.by_version[2].mean()


@pytest.mark.parametrize("policy", ["async", "softsync:2", "batchsync:6", "delayed:1"])
def test_run_without_a_barrier_has_no_times_by_version(policy):
    recording = recorded_times(simulate(policy, UNEVEN, SPEC), seed=0, with_travel=True)

    assert recording.by_version is None
    assert recording.finished is None
    assert not recording.model().together


def test_worker_that_skipped_a_version_has_one_of_its_other_times():
    """Worker 2 is three times as slow, so it is late, and takes part in few versions."""
    spec = RunSpec(workers=4, steps=60, seed=3, late="finish")
    trace = simulate("backup:1", UNEVEN, spec)

    recording = recorded_times(trace, seed=0, with_travel=True)

    assert len(recording.times[2]) < 40
    assert len(recording.by_version[2]) == 60
    assert set(recording.by_version[2]) <= set(recording.times[2])
    seen = {g.version: g.compute_s for g in trace.gradients() if g.worker == 2}
    [unknown] = {g.version for g in trace.gradients() if g.worker == 2 and g.fate == "cancelled"}
    kept = [recording.by_version[2][v] for v in seen if v != unknown]
    assert kept == pytest.approx([took_s for v, took_s in seen.items() if v != unknown])


def test_version_without_an_update_has_no_times():
    """The run was stopped while the last version was open."""
    trace = simulate("sync", UNEVEN, SPEC)
    records = [
        replace(r, fate=Fate.CANCELLED) if isinstance(r, Gradient) and r.version == 59 else r
        for r in trace.records
    ]

    recording = recorded_times(Trace(trace.header, records), seed=0, with_travel=True)

    assert [len(recording.by_version[worker]) for worker in range(4)] == [59] * 4
    assert recording.total == 240


def with_late_beginnings(trace, after_s):
    """Return the trace of workers that begin this much later after they were cancelled."""
    cancelled, records = set(), []
    for record in trace.records:
        later = record
        if isinstance(record, Gradient) and record.fate is Fate.CANCELLED:
            cancelled.add(record.worker)
        elif isinstance(record, Gradient) and record.worker in cancelled:
            cancelled.remove(record.worker)
            begun = record.asked_at + after_s
            later = replace(record, asked_at=begun, compute_s=record.compute_s - after_s)
        records.append(later)
    return Trace(trace.header, records)


def test_time_until_a_cancelled_worker_begins_belongs_to_the_version():
    trace = simulate("backup:1", UNEVEN, SPEC)

    one, other = (
        recorded_times(each, seed=0, with_travel=True)
        for each in (trace, with_late_beginnings(trace, 0.001))
    )

    assert sum(t.sum() for t in other.times.values()) < sum(t.sum() for t in one.times.values())
    third = [np.sort(np.stack(list(r.by_version.values())), axis=0)[2] for r in (one, other)]
    np.testing.assert_allclose(*third)  # an update waits for three of four


def test_version_that_was_made_again_counts_twice():
    """A server that is restored from a checkpoint makes the versions since then again."""
    trace = simulate("sync", UNEVEN, SPEC)
    restored = Restored(trace.records[-1].t, 0, trace.header)
    records = [*trace.records, restored, *trace.records]

    recording = recorded_times(Trace(trace.header, records), seed=0, with_travel=True)

    once = recorded_times(trace, seed=0, with_travel=True)
    for worker in range(4):
        twice = np.tile(once.times[worker], 2)
        np.testing.assert_array_equal(recording.by_version[worker], twice)


@pytest.mark.parametrize(
    ("policy", "late", "finished"),
    [("sync", "cancel", None), ("backup:1", "cancel", 3), ("backup:1", "finish", None)],
)
def test_run_that_cancels_late_work_says_how_many_workers_finished(policy, late, finished):
    """The single gradient that the end of a run cancels is ignored."""
    spec = RunSpec(workers=4, steps=200, seed=3, late=late)
    cluster = Cluster.parse("exp:20ms,shift=50ms")

    recording = recorded_times(simulate(policy, cluster, spec), seed=0, with_travel=True)

    assert recording.finished == finished


def test_order_statistics_up_to_the_finished_ones_are_exact():
    """Completed times are longer than the version lasted, so they change nothing."""
    cluster = Cluster.parse("exp:20ms,shift=50ms")
    spec = RunSpec(workers=6, steps=100, seed=3)
    complete, cut = (
        recorded_times(simulate(policy, cluster, spec), seed=0, with_travel=True)
        for policy in ("sync", "backup:2")
    )

    truth, seen = (
        np.sort(np.stack(list(recording.by_version.values())), axis=0)
        for recording in (complete, cut)
    )

    np.testing.assert_allclose(seen[:4], truth[:4])
    assert not np.allclose(seen[4:], truth[4:])


def test_unknown_times_of_a_table_are_longer_than_the_known_ones():
    rows = [[1.0, 2.0, None], [3.0, None, 4.0], [5.0, 2.5, 3.0]]

    recording = recording_by_version(rows, np.random.default_rng(0))

    assert recording.by_version is recording.times
    assert recording.times[0].tolist() == [1.0, 3.0, 5.0]
    assert recording.times[1][1] == 5.0  # the only longer time is that of another worker
    assert recording.times[2][0] in (3.0, 4.0)
    assert (recording.drawn, recording.bounds) == (2, 0)
    assert recording.finished == 2


def test_table_with_few_unknown_times_is_complete():
    rows = [[1.0, 2.0]] * 99 + [[1.0, None]]

    recording = recording_by_version(rows, np.random.default_rng(0))

    assert recording.finished is None
    assert recording.bounds + recording.drawn == 1
