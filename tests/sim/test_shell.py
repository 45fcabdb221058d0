# SPDX-License-Identifier: BSD-3-Clause
"""The event-driven simulator: faults, traffic, pauses, ends, and what it reports to the core."""

import pytest

from paceline.core.decider import Decider, replay
from paceline.core.events import Fate, UpdateApplied
from paceline.core.ledger import Work
from paceline.core.policy import Policy
from paceline.sim.cluster import Cluster
from paceline.sim.shell import Shell
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import Joined, Left, Paused, Resumed, Trace
from paceline.watch.audit import audit
from paceline.watch.summary import summarize

UNEVEN = "exp:20ms,shift=50ms; worker 2 x3; phases x4 for 1s every 3s"
NETWORK = "model=1MB,bandwidth=100MB,delay=1ms"


def whole(policy, cluster, **spec):
    trace = simulate(policy, cluster, RunSpec(**{"workers": 4, "steps": 40, "seed": 5} | spec))
    audit(trace)
    return trace


class NeedsAsManyAsItHasSeen(Policy):
    """Learns from updates, so the report of an update can make the next one due."""

    name = "learning"

    def fresh_memory(self, spec):
        return [0]

    def observe_update(self, ledger, made, sq_norm):
        assert (made.update, sq_norm) == (ledger.memory[0] + 1, None)
        ledger.memory[0] = made.update

    def needed(self, ledger):
        seen = ledger.memory[0]
        return 3 if seen == ledger.version else 1 + seen % 3

    def assign(self, ledger, worker):
        return Work(ledger.version, ledger.version + 1)

    def judge(self, ledger, work):
        return Fate.ACCEPTED


def test_policy_observes_every_update_in_the_simulator_and_in_a_replay():
    spec = RunSpec(workers=4, steps=30, seed=5)
    cluster = Cluster.parse(UNEVEN, NETWORK)
    decider = Decider(NeedsAsManyAsItHasSeen(), spec)
    handled = []
    handle = decider.handle
    decider.handle = lambda event: handled.append((event, handle(event))) or handled[-1][1]

    records = Shell(decider, cluster, lambda update: None).run()

    events = [event for event, _ in handled]
    trace = Trace(simulate("sync", cluster, spec).header, records)
    assert list(trace.events()) == events
    assert replay(decider.policy, spec, events) == [actions for _, actions in handled]
    reported = [event.update for event in events if isinstance(event, UpdateApplied)]
    assert reported == list(range(1, 31))
    times = {update.update: update.t for update in trace.updates()}
    for event in events:
        assert not isinstance(event, UpdateApplied) or event.time == times[event.update]


def test_cancelling_late_work_saves_traffic():
    cluster = Cluster.parse("exp:20ms,shift=50ms; worker 3 x4", "model=10MB,bandwidth=10GB")

    cancel = summarize(whole("backup:1", cluster, steps=100))
    finish = summarize(whole("backup:1", cluster, steps=100, late="finish"))

    # Worker 3 pulls in vain each time; only where it finishes does it push in vain as well.
    assert cancel.vain_bytes_per_update == pytest.approx(10e6, rel=0.1)
    late = finish.fates[Fate.LATE]
    assert finish.vain_bytes_per_update == pytest.approx(20e6 * late / 100, rel=0.1)
    assert cancel.sent_bytes_per_update == pytest.approx(70e6, rel=0.05)


def test_network_adds_delay_and_shared_transfer_to_each_step():
    """Two workers pull and push 1 MB each over one 1 MB/s link: 2 s + 1 s + 2 s + two delays."""
    cluster = Cluster.parse("1s", "model=1MB,bandwidth=1MB,delay=100ms")

    summary = summarize(whole("sync", cluster, workers=2, steps=3))

    assert summary.step_s.mean == pytest.approx(5.2)
    assert summary.sent_bytes_per_update == pytest.approx(4e6)


def test_gradient_in_transit_when_its_version_closes_is_late_and_partly_sent():
    cluster = Cluster.parse("1s; worker 1 x1.5", "model=1MB,bandwidth=1MB")

    trace = whole("backup:1", cluster, workers=2, steps=1)

    last = list(trace.gradients())[-1]
    # Both pull for 2 s. Worker 0 pushes from 3 s; worker 1 joins at 3.5 s, when half is through,
    # and by the end of worker 0's push at 4.5 s it has sent as much as worker 0 since: half.
    assert (last.worker, last.fate, last.t) == (1, Fate.LATE, 4.5)
    assert last.pushed_bytes == pytest.approx(0.5e6)


def test_run_continues_without_a_dead_worker_until_it_returns():
    trace = whole("sync", Cluster.parse("1s", faults="kill 1 at 1500ms for 2s"), workers=2, steps=5)

    contributors = [u.contributors for u in trace.updates()]
    assert contributors == [(0, 1), (0,), (0,), (0, 1), (0, 1)]
    assert [(r.t, r.worker) for r in trace.records if isinstance(r, Left)] == [(1.5, 1)]
    assert [u.t for u in trace.updates()] == [1.0, 2.0, 3.0, 4.5, 5.5]


def test_freeze_extends_the_computation_by_its_length():
    trace = whole(
        "sync", Cluster.parse("1s", faults="freeze 1 at 500ms for 2s"), workers=2, steps=2
    )

    assert [u.t for u in trace.updates()] == [3.0, 4.0]


def test_frozen_worker_abandons_its_work_when_it_thaws():
    faults = "freeze 1 at 500ms for 2s; freeze 1 at 600ms for 1s"
    trace = whole("backup:1", Cluster.parse("1s", faults=faults), workers=2, steps=4)

    cancelled = [(g.t, g.worker) for g in trace.gradients() if g.fate is Fate.CANCELLED]
    assert cancelled[0] == (2.5, 1)


def test_run_without_enough_workers_pauses_and_resumes():
    cluster = Cluster.parse("1s", faults="kill 1 at 500ms for 3s")

    trace = whole("sync", cluster, workers=2, steps=3, min_workers=2)

    assert [r.t for r in trace.records if isinstance(r, Paused)] == [0.5]
    assert [r.t for r in trace.records if isinstance(r, Resumed)] == [0.0, 3.5]
    assert [u.contributors for u in trace.updates()] == [(0, 1)] * 3


def test_run_that_lost_all_workers_ends_as_stalled():
    faults = "kill 0 at 1500ms; kill 1 at 2500ms; freeze any every 1s for 1s"

    trace = whole("sync", Cluster.parse("1s", faults=faults), workers=2, steps=10)

    assert trace.records[-1].reason.startswith("stalled: 0 workers are left")
    assert trace.records[-1].version < 10


def test_run_with_only_faults_and_no_updates_ends_as_stalled():
    """Worker 0 never returns, so three are never alive; the others die and return forever."""
    faults = "kill 0 at 1s; kill any every 10s for 1s"

    trace = whole("sync", Cluster.parse("1s", faults=faults), workers=3, steps=10, min_workers=3)

    assert trace.records[-1].reason.startswith("stalled: ")


def test_freeze_between_a_cancel_and_its_report_does_not_revive_the_work():
    network = "model=1MB,bandwidth=100MB,delay=5ms"
    cluster = Cluster.parse("pareto:5ms,1.1", network, "freeze any every 50ms for 1ms")

    trace = whole("backup:2", cluster, workers=4, steps=500)

    assert trace.records[-1].version == 500


def test_until_ends_the_run_after_the_pending_update():
    cluster = Cluster.parse("1s; worker 1 x1.5")
    spec = RunSpec(workers=2)

    trace = simulate("sync", cluster, spec, until=4.0)  # one gradient of update 3 is in

    audit(trace)
    assert [u.t for u in trace.updates()] == [1.5, 3.0, 4.5]


@pytest.mark.parametrize("faults", ["", "kill 2 at 10ms for 1.4s"])
def test_faults_and_joins_after_the_last_update_change_nothing(faults):
    """The run ends after 1 s and two delays; worker 1 answers half a second later."""
    network = "model=1,bandwidth=1GB,delay=150ms"
    cluster = Cluster.parse("1s; worker 1 x9", network, faults)
    spec = RunSpec(workers=3, steps=1)

    trace = simulate("backup:2", cluster, spec, until=1.4)

    audit(trace)
    assert trace.records[-1].t == pytest.approx(1.3)
    assert not any(isinstance(record, Joined) and record.t > 1 for record in trace.records)
