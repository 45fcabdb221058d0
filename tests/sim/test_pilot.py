# SPDX-License-Identifier: BSD-3-Clause
"""A pilot is compared with its own updates, and refused if it can't be relied on."""

import numpy as np
import pytest
from msgspec.structs import replace as changed

from paceline.errors import SpecError, TraceError
from paceline.latency import Recorded
from paceline.sim import pilot as pilots
from paceline.sim.cluster import Cluster
from paceline.sim.pilot import Pilot, study
from paceline.sim.recorded_times import Recording
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import Gradient, Header, Joined, Left, Restored, Trace, Update

long = pytest.mark.uncounted

JITTER = "50ms + exp:5ms"
STRAGGLERS = "50ms + exp:5ms + 10% exp:300ms"


def record(policy="sync", latency=STRAGGLERS, workers=8, steps=300, late="cancel"):
    spec = RunSpec(workers=workers, steps=steps, seed=3, late=late)
    return simulate(policy, Cluster.parse(latency), spec)


def mean_update_s(trace):
    times = [update.t for update in trace.updates()]
    return (times[-1] - times[0]) / (len(times) - 1)


@pytest.mark.parametrize(
    ("policy", "late"),
    [("sync", "cancel"), ("backup:2", "cancel"), ("backup:2", "finish"), ("softsync:4", "cancel")],
)
def test_simulation_repeats_the_pilot_itself(policy, late):
    trace = record(policy, late=late)

    pilot = study(trace, seed=0)

    assert pilot.own_s == pytest.approx(mean_update_s(trace))
    assert abs(pilot.error) <= 0.05
    assert pilot.trace.header == trace.header
    assert len(pilot.recording.times) == 8


def test_agreement_states_both_times_and_their_difference():
    recording = Recording({0: np.ones(2)}, drawn=0, bounds=0)
    trace = Trace(Header(source="sim", policy="sync", workers=2), [])
    pilot = Pilot(trace, recording, 0.2, 0.19)

    assert pilot.error == pytest.approx(-0.05)
    assert pilot.agreement() == (
        "an update of the recorded run took 200 ms on average, and takes 190 ms (-5.0 %) in a "
        "simulation with its times"
    )


def test_pilot_that_a_simulation_does_not_repeat_is_refused():
    """Updates that take longer than any gradient have a cause that the times don't show."""
    trace = record(latency=JITTER)
    slower = [changed(r, t=1.1 * r.t) if isinstance(r, Update) else r for r in trace.records]

    assert study(trace, seed=0).error == pytest.approx(0, abs=0.05)
    with pytest.raises(SpecError, match=r"\(-9.. %\) in a simulation with its times, so"):
        study(Trace(trace.header, slower), seed=0)


@pytest.mark.parametrize(("steps", "made"), [(30, 29), (10, 9), (1, 0)])
def test_short_pilot_is_refused(steps, made):
    """The first update isn't counted: workers are still joining."""
    with pytest.raises(SpecError, match=f"at least 30 updates .* the run made {made}; record"):
        study(record(steps=steps), seed=0)


def test_pilot_of_31_updates_is_enough():
    assert study(record(latency=JITTER, steps=31), seed=0).own_s > 0


def test_pilot_without_a_gradient_is_refused():
    trace = record()
    with pytest.raises(TraceError, match="no finished gradient"):
        study(Trace(trace.header, []), seed=0)


def test_pilot_of_one_worker_is_refused():
    with pytest.raises(SpecError, match="the run had one worker"):
        study(record(workers=1), seed=0)


def test_pilot_without_any_computation_time_is_refused():
    with pytest.raises(SpecError, match="took no time, so there is nothing to plan"):
        study(record(latency="0s", workers=4), seed=0)


# ---- runs whose times depend on the rule ----


def with_cpu_s(trace, share, cores, apply_s=0.0):
    """Return the trace of workers that compute for this share of their time, on so many cores."""
    records = [
        changed(r, cpu_s=share * r.compute_s)
        if isinstance(r, Gradient)
        else changed(r, apply_s=apply_s)
        if isinstance(r, Update)
        else r
        for r in trace.records
    ]
    return Trace(changed(trace.header, cores=cores), records)


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_workers_that_share_busy_cores_are_refused(share):
    trace = with_cpu_s(record(latency="50ms"), share, cores=2)

    with pytest.raises(SpecError, match=r"8 workers share 2 cores and keep them busy for 100 % of"):
        study(trace, seed=0)


def test_work_of_the_server_counts():
    trace = record(latency="50ms")

    study(with_cpu_s(trace, 0.05, cores=2), seed=0)
    with pytest.raises(SpecError, match="busy for 40 % of the time"):
        study(with_cpu_s(trace, 0.05, cores=2, apply_s=0.02), seed=0)


@pytest.mark.parametrize(
    ("share", "cores"),
    [(1.0, 8), (1.0, None), (0.05, 2), (0.0, 2)],
    ids=["a core each", "unknown", "mostly waiting", "only waiting"],
)
def test_workers_that_do_not_wait_for_cores_are_not_refused(share, cores):
    assert study(with_cpu_s(record(latency="50ms"), share, cores), seed=0).own_s > 0


def test_script_with_several_optimizers_is_refused():
    trace = record()

    with pytest.raises(SpecError, match=r"has 2 optimizers, and .* paceline compare instead"):
        study(Trace(changed(trace.header, optimizers=2), trace.records), seed=0)


# ---- which part counts ----


def test_only_the_end_of_a_long_trace_counts(monkeypatch):
    slow, fast = record(latency="1s + exp:50ms", steps=50), record(latency=JITTER, steps=60)
    monkeypatch.setattr(pilots, "RECENT", len(fast.records))

    pilot = study(Trace(slow.header, [*slow.records, *fast.records]), seed=0)

    assert pilot.own_s == pytest.approx(mean_update_s(fast))
    assert pilot.recording.total == 8 * 59


@long
@pytest.mark.parametrize(
    ("policy", "needed"), [("sync", 8), ("backup:3", 5), ("softsync:4", None), ("delayed:1", None)]
)
def test_number_of_gradients_that_an_update_waited_for(policy, needed):
    assert study(record(policy), seed=0).needed == needed


# ---- interruptions ----


def with_long_version(trace, version, extra_s, *also):
    """Return the trace with one version that lasts longer, because of the records `also`."""
    records, pending = [], list(also)
    for each in trace.records:
        later = each
        if isinstance(each, Gradient) and each.version == version:
            records += pending
            pending.clear()
            later = changed(each, t=each.t + extra_s, compute_s=each.compute_s + extra_s)
        elif isinstance(each, Gradient) and each.version > version:
            later = changed(each, t=each.t + extra_s, asked_at=each.asked_at + extra_s)
        elif isinstance(each, Update) and each.update > version:
            later = changed(each, t=each.t + extra_s)
        records.append(later)
    return Trace(trace.header, records)


def test_slow_first_gradients_do_not_count():
    """Workers compile and warm up in their first turn, and never again."""
    trace = record(latency=JITTER, steps=100)

    pilot = study(with_long_version(trace, version=0, extra_s=60.0), seed=0)

    assert pilot.own_s == pytest.approx(mean_update_s(trace))
    assert max(times.max() for times in pilot.recording.times.values()) < 1
    assert pilot.recording.total == 8 * 99


def test_version_in_which_a_worker_comes_back_does_not_count():
    trace = record(latency=JITTER, steps=100)
    at = list(trace.updates())[49].t + 0.001
    gone = (Left(at, 7), Joined(at + 30, 7))

    pilot = study(with_long_version(trace, 50, 30.0, *gone), seed=0)

    assert pilot.own_s == pytest.approx(mean_update_s(trace), rel=0.01)
    assert max(times.max() for times in pilot.recording.times.values()) < 1
    assert pilot.recording.total == 8 * 98


def test_gradients_asked_for_during_an_interruption_do_not_count():
    """Without a barrier they arrive after the next update, and were delayed all the same."""
    trace = record("async", JITTER, steps=500)

    recording = study(trace, seed=0).recording

    accepted = sum(gradient.fate == "accepted" for gradient in trace.gradients())
    # The first gradient of each worker was asked for before the first update.
    assert recording.total - recording.drawn - recording.bounds == accepted - 8


def test_only_the_part_since_a_user_resumed_the_run_counts():
    first = record("sync", "1s + exp:50ms", steps=50)
    second = record("backup:2", JITTER, steps=60)
    end = first.records[-1].t
    resumed = Restored(end, 0, second.header, resumed=True)

    pilot = study(Trace(first.header, [*first.records, resumed, *second.records]), seed=0)

    assert pilot.trace.header == second.header
    assert pilot.own_s == pytest.approx(mean_update_s(second))


def test_server_that_was_restarted_does_not_end_the_pilot():
    first, second = (record(latency=JITTER, steps=40) for _ in range(2))
    restarted = Restored(first.records[-1].t, 40, first.header)

    pilot = study(Trace(first.header, [*first.records, restarted, *second.records]), seed=0)

    assert pilot.recording.total == 2 * 8 * 39
    assert isinstance(pilot.recording.model(), Recorded)
