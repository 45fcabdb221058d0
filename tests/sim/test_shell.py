# SPDX-License-Identifier: BSD-3-Clause
"""The event-driven simulator: faults, traffic, pauses, ends, and what it reports to the core."""

from itertools import pairwise

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
from paceline.watch.traffic import Traffic

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
    network = "model=10MB,bandwidth=10GB,transfers=all"
    cluster = Cluster.parse("exp:20ms,shift=50ms; worker 3 x4", network)

    cancel = summarize(whole("backup:1", cluster, steps=100))
    finish = summarize(whole("backup:1", cluster, steps=100, late="finish"))

    # Worker 3 pulls in vain each time; only where it finishes does it push in vain as well.
    assert cancel.traffic.vain_bytes == pytest.approx(0.0, abs=10e6)
    late = finish.fates[Fate.LATE]
    assert finish.traffic.vain_bytes == pytest.approx(10e6 * late, rel=0.1)
    assert cancel.traffic_per_update.pulled_bytes == pytest.approx(40e6, rel=0.05)
    assert cancel.traffic_per_update.pushed_bytes == pytest.approx(30e6, rel=0.05)


def test_network_adds_delays_and_shared_transfers_to_each_step():
    """Two workers pull and push 1 MB each over one 1 MB/s link: 2 s + 1 s + 2 s + four delays.

    The delays are those of the parameters, the announcement, the admission and the gradient.
    """
    cluster = Cluster.parse("1s", "model=1MB,bandwidth=1MB,delay=100ms")

    summary = summarize(whole("sync", cluster, workers=2, steps=3))

    assert summary.step_s.mean == pytest.approx(5.4)
    assert summary.traffic_per_update == Traffic(pytest.approx(2e6), pytest.approx(2e6), 0.0)


def test_without_admission_nothing_is_announced():
    cluster = Cluster.parse("1s", "model=1MB,bandwidth=1MB,delay=100ms,transfers=all")

    summary = summarize(whole("sync", cluster, workers=2, steps=3))

    assert summary.step_s.mean == pytest.approx(5.2)


def test_gradient_in_transit_when_its_version_closes_is_late_and_partly_sent():
    cluster = Cluster.parse("1s; worker 1 x1.5", "model=1MB,bandwidth=1MB,transfers=all")

    trace = whole("backup:1", cluster, workers=2, steps=1)

    last = list(trace.gradients())[-1]
    # Both pull for 2 s. Worker 0 pushes from 3 s; worker 1 joins at 3.5 s, when half is through,
    # and by the end of worker 0's push at 4.5 s it has sent as much as worker 0 since: half.
    assert (last.worker, last.fate, last.t) == (1, Fate.LATE, 4.5)
    assert last.pushed_bytes == pytest.approx(0.5e6)


def test_gradient_that_is_queued_when_its_version_closes_is_late_and_never_sent():
    cluster = Cluster.parse("1s; worker 1 x1.5", "model=1MB,bandwidth=1MB")

    trace = whole("backup:1", cluster, workers=2, steps=2)

    # Since no transfer time is known, the first version is as above.
    *_, first, last = trace.gradients()
    assert (first.worker, first.fate, first.t) == (0, Fate.ACCEPTED, 8.5)
    assert (last.worker, last.fate, last.t, last.pushed_bytes) == (1, Fate.LATE, 8.5, 0.0)


@pytest.mark.parametrize("late", ["cancel", "finish"])
def test_gradient_that_is_announced_too_late_is_never_sent(late):
    """The announcement of worker 1 and the end of the version cross each other."""
    cluster = Cluster.parse("1s; worker 1 x1.25", "model=1KB,bandwidth=1MB,delay=100ms")

    trace = whole("backup:1", cluster, workers=2, steps=20, late=late)

    late_ones = [g for g in trace.gradients() if g.fate is Fate.LATE and g.version]
    assert late_ones
    assert {g.pushed_bytes for g in late_ones} == {0.0}
    assert {g.compute_s for g in late_ones} == {1.25}


@pytest.mark.parametrize("late", ["cancel", "finish"])
@pytest.mark.parametrize("workers", [4, 16])
def test_backups_send_nothing_in_vain_over_equal_links(late, workers):
    """But for the first version, whose transfers are all admitted at once."""
    cluster = Cluster.parse("50ms + exp:5ms", "model=100MB,bandwidth=125MB,delay=0.1ms")

    trace = whole("backup:1", cluster, workers=workers, steps=40, late=late)

    assert vain_share(trace) <= 0.01


def vain_share(trace):
    """Return the share of the pushed bytes that were of dropped gradients."""
    pushed = {True: 0.0, False: 0.0}
    for gradient in trace.gradients():
        pushed[gradient.fate is Fate.ACCEPTED] += gradient.pushed_bytes
    return pushed[False] / sum(pushed.values())


HOSTS = "model=100MB,bandwidth=125MB,delay=0.1ms,beside=true"


def test_four_hosts_with_servers_beside_all_workers_reach_the_bound_of_a_ring():
    """75 MB leave each host twice per update, at 125 MB/s."""
    trace = whole("sync", Cluster.parse("0s", HOSTS + ",servers=4"))

    assert summarize(trace).step_s.mean == pytest.approx(1.2, rel=0.01)


def test_backup_does_not_wait_for_a_host_with_a_slow_link():
    """Two thirds of 100 MB leave each fast host twice, and each sends the slow one a little."""
    cluster = Cluster.parse("50ms", HOSTS + ",servers=3; worker 3 12.5MB")

    trace = whole("backup:1", cluster, steps=60)

    assert summarize(trace).step_s.mean == pytest.approx(1.15, rel=0.02)
    assert summarize(whole("sync", cluster, steps=10)).step_s.mean == pytest.approx(16, rel=0.01)


def test_killed_worker_frees_its_place_and_its_announcement_is_forgotten():
    """In the second version, worker 1 sends from 10.2 s and worker 2 is queued."""
    network = "model=100MB,bandwidth=100MB,transfers=1"
    faults = "kill 1 at 10.5s; kill 2 at 10.5s for 10s"
    cluster = Cluster.parse("100ms", network, faults)

    trace = whole("sync", cluster, workers=3, steps=3)

    assert [u.contributors for u in trace.updates()] == [(0, 1, 2), (0,), (0,)]
    assert [u.t for u in trace.updates()] == pytest.approx([6.1, 10.5, 12.6])


def test_workers_of_the_host_that_is_ready_first_leave_places_to_others():
    """Both links are full all the time: 2 s for the versions, 2 s for the gradients."""
    network = "model=100MB,bandwidth=100MB,servers=2,beside=true,workers_per_host=4"
    cluster = Cluster.parse("100ms; workers 4-7 x2", network)

    times = [u.t for u in whole("sync", cluster, workers=8, steps=5).updates()]

    steps = [later - earlier for earlier, later in pairwise(times)]
    assert steps == pytest.approx([4.2] * 4)


def test_stalled_link_blocks_only_a_rule_that_needs_its_worker():
    network = "model=100MB,bandwidth=100MB"
    cluster = Cluster.parse("100ms", network, "stall 2 at 20s for 100s; stall 2 at 30s for 10s")

    backup = [u.t for u in whole("backup:1", cluster, workers=3, steps=30).updates()]
    sync = [u.t for u in whole("sync", cluster, workers=3, steps=30).updates()]

    longest = max(later - earlier for earlier, later in pairwise(backup))
    assert longest < 6.1 + 2 * 2.1  # as usual, plus twice the usual time of a transfer
    assert max(later - earlier for earlier, later in pairwise(sync)) > 100


def test_link_that_stalls_for_good_ends_a_run_that_needs_it_as_stalled():
    cluster = Cluster.parse("100ms", "model=100MB,bandwidth=100MB", "stall 2 at 20s")

    trace = whole("sync", cluster, workers=3, steps=30)

    assert trace.records[-1].reason.startswith("stalled: ")


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
    network = "model=1,bandwidth=1GB,delay=150ms,transfers=all"
    cluster = Cluster.parse("1s; worker 1 x9", network, faults)
    spec = RunSpec(workers=3, steps=1)

    trace = simulate("backup:2", cluster, spec, until=1.4)

    audit(trace)
    assert trace.records[-1].t == pytest.approx(1.3)
    assert not any(isinstance(record, Joined) and record.t > 1 for record in trace.records)
