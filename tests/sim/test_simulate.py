# SPDX-License-Identifier: BSD-3-Clause
"""Whole simulated runs: known limits, golden traces, determinism, faults and traffic."""

from dataclasses import fields

import pytest

from paceline.core.decider import Decider, replay
from paceline.core.events import Fate, UpdateApplied
from paceline.core.ledger import Work
from paceline.core.policies import POLICIES, Backup, Sync, parse_policy
from paceline.core.policy import Policy
from paceline.errors import SpecError
from paceline.sim.cluster import Cluster
from paceline.sim.shell import Shell
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import Ended, Gradient, Joined, Left, Paused, Resumed, Trace, Update
from paceline.watch.audit import audit
from paceline.watch.summary import summarize

EVERY_POLICY = ["sync", "backup:2", "batchsync:5", "deadline", "async", "softsync:3", "ssp:2"]
EVERY_POLICY += ["delayed:2", "async:bound=2"]

UNEVEN = "exp:20ms,shift=50ms; worker 2 x3; phases x4 for 1s every 3s"
NETWORK = "model=1MB,bandwidth=100MB,delay=1ms"
FAULTS = "kill 1 at 200ms for 1s; kill any every 2s for 500ms; freeze 0 at 1s for 300ms"

long = pytest.mark.uncounted


def whole(policy, cluster, **spec):
    trace = simulate(policy, cluster, RunSpec(**{"workers": 4, "steps": 40, "seed": 5} | spec))
    audit(trace)
    return trace


def test_every_policy_is_simulated_here():
    assert {parse_policy(p).name for p in EVERY_POLICY} == set(POLICIES)


@pytest.mark.parametrize("late", ["cancel", "finish"])
@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_every_policy_ends_its_run_with_everything_going_wrong(policy, late):
    """Uneven workers, a slow network, deaths, returns and freezes: the last update is reached."""
    cluster = Cluster.parse(UNEVEN, NETWORK, FAULTS)

    trace = whole(policy, cluster, late=late)

    assert trace.records[-1] == Ended(trace.records[-1].t, 40, ())
    assert any(isinstance(r, Left) for r in trace.records)


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_every_piece_of_work_has_one_fate_unless_its_worker_died(policy):
    trace = whole(policy, Cluster.parse(UNEVEN, NETWORK))

    turns = [(g.worker, g.turn) for g in trace.gradients()]
    assert len(turns) == len(set(turns))
    for worker in range(4):
        own = [turn for w, turn in turns if w == worker]
        assert own == list(range(1, len(own) + 1))


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_the_same_seed_gives_the_same_trace_and_another_one_another(policy):
    cluster = Cluster.parse(UNEVEN, NETWORK, FAULTS)

    assert whole(policy, cluster) == whole(policy, cluster)
    assert whole(policy, cluster) != whole(policy, cluster, seed=6)


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_replaying_the_events_gives_the_decisions_that_were_made(policy):
    spec = RunSpec(workers=4, steps=40, seed=5)
    decider = Decider(parse_policy(policy), spec)
    live = []
    handle = decider.handle
    decider.handle = lambda event: live.append(handle(event)) or live[-1]
    records = Shell(decider, Cluster.parse(UNEVEN, NETWORK, FAULTS), lambda update: None).run()
    trace = Trace(simulate(policy, Cluster.parse("1s"), spec).header, records)

    assert replay(parse_policy(policy), spec, trace.events()) == live


class NeedsAsManyAsItHasSeen(Policy):
    """Learns from updates: the n-th takes n contributions, so a report may make one due."""

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


def test_policy_hears_of_every_update_in_the_simulator_and_again_in_a_replay():
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


def test_a_whole_small_trace():
    """Two workers, the second twice as slow, backup:1: the slow one is cancelled each time."""
    trace = whole("backup:1", Cluster.parse("1s; worker 1 x2"), workers=2, steps=2)

    fast, slow = {"worker": 0, "samples": 32}, {"worker": 1, "samples": 0}
    assert trace.records == [
        Joined(0.0, 0),
        Resumed(0.0),
        Joined(0.0, 1),
        Gradient(
            t=1.0,
            turn=1,
            version=0,
            fate=Fate.ACCEPTED,
            staleness=0,
            asked_at=0.0,
            compute_s=1.0,
            **fast,
        ),
        Update(1.0, 1, (0,), 1),
        Gradient(
            t=1.0,
            turn=1,
            version=0,
            fate=Fate.CANCELLED,
            staleness=1,
            asked_at=0.0,
            compute_s=1.0,
            **slow,
        ),
        Gradient(
            t=2.0,
            turn=2,
            version=1,
            fate=Fate.ACCEPTED,
            staleness=0,
            asked_at=1.0,
            compute_s=1.0,
            **fast,
        ),
        Update(2.0, 2, (0,), 1),
        Gradient(
            t=2.0,
            turn=2,
            version=1,
            fate=Fate.CANCELLED,
            staleness=1,
            asked_at=1.0,
            compute_s=1.0,
            **slow,
        ),
        Ended(2.0, 2),
    ]


class NeedsOneLess:
    """A subclass that overrides how many contributions an update takes."""

    def needed(self, ledger):
        return max(1, super().needed(ledger) - 1)


class UpdatesWithThree:
    """A subclass that overrides when an update is due."""

    def is_due(self, ledger):
        return len(ledger.next_tally.contributions) >= 3


class RestsWorkerZero:
    """A subclass that overrides which work a worker gets."""

    def assign(self, ledger, worker):
        return None if worker == 0 else super().assign(ledger, worker)


class HalvesGradients:
    """A subclass that overrides how much a gradient counts."""

    def scale(self, staleness):
        return super().scale(staleness) / 2


OVERRIDES = [NeedsOneLess, UpdatesWithThree, RestsWorkerZero, HalvesGradients]


@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_subclass_of_a_built_in_rule_is_simulated_with_its_own_answers(policy, override):
    """Regression: the fast path took every subclass of `Backup` for plain backup."""
    plain = parse_policy(policy)
    subclass = type(override.__name__, (override, type(plain)), {})
    own = subclass(**{field.name: getattr(plain, field.name) for field in fields(plain)})
    cluster = Cluster.parse("exp:20ms,shift=50ms")
    spec = RunSpec(workers=4, steps=20, seed=5)

    records = simulate(own, cluster, spec).records

    assert records == Shell(Decider(own, spec), cluster, lambda update: None).run()
    if type(plain) in (Sync, Backup):
        assert records != simulate(plain, cluster, spec).records


@long
@pytest.mark.parametrize(
    ("policy", "late", "limit_ms"),
    [
        ("sync", "cancel", 234),
        ("backup:1", "cancel", 65),
        ("backup:1", "finish", 123),
        ("backup:2", "cancel", 51),
        ("backup:2", "finish", 84),
    ],
)
def test_the_limits_of_the_standard_straggler_schedule(policy, late, limit_ms):
    """8 workers, 50 ms, 5 % of steps + Exp(500 ms): the figures of the design, within 3 %."""
    # A breath of noise keeps ties away, so that the fast way can serve.
    cluster = Cluster.parse("50ms + exp:1us + 5% exp:500ms")

    spec = RunSpec(workers=8, steps=20_000, late=late)
    summary = summarize(simulate(policy, cluster, spec))

    assert summary.step_s.mean * 1000 == pytest.approx(limit_ms, rel=0.03)


def test_cancelling_late_work_spares_traffic_that_finishing_wastes():
    cluster = Cluster.parse("exp:20ms,shift=50ms; worker 3 x4", "model=10MB,bandwidth=10GB")

    cancel = summarize(whole("backup:1", cluster, steps=100))
    finish = summarize(whole("backup:1", cluster, steps=100, late="finish"))

    # Worker 3 pulls in vain each time; only where it finishes does it push in vain as well.
    assert cancel.vain_bytes_per_update == pytest.approx(10e6, rel=0.1)
    late = finish.fates[Fate.LATE]
    assert finish.vain_bytes_per_update == pytest.approx(20e6 * late / 100, rel=0.1)
    assert cancel.sent_bytes_per_update == pytest.approx(70e6, rel=0.05)


def test_the_network_adds_delay_and_shared_transfer_to_each_step():
    """Two workers pull and push 1 MB each over one 1 MB/s link: 2 s + 1 s + 2 s, and two delays."""
    cluster = Cluster.parse("1s", "model=1MB,bandwidth=1MB,delay=100ms")

    summary = summarize(whole("sync", cluster, workers=2, steps=3))

    assert summary.step_s.mean == pytest.approx(5.2)
    assert summary.sent_bytes_per_update == pytest.approx(4e6)


def test_a_gradient_on_its_way_when_its_version_closes_is_late_and_partly_sent():
    cluster = Cluster.parse("1s; worker 1 x1.5", "model=1MB,bandwidth=1MB")

    trace = whole("backup:1", cluster, workers=2, steps=1)

    last = list(trace.gradients())[-1]
    # Both pull for 2 s. Worker 0 pushes from 3 s; worker 1 joins at 3.5 s, when half is through,
    # and by the end of worker 0's push at 4.5 s it has sent as much as worker 0 since: half.
    assert (last.worker, last.fate, last.t) == (1, Fate.LATE, 4.5)
    assert last.pushed_bytes == pytest.approx(0.5e6)


def test_a_dead_worker_is_done_without_and_returns():
    trace = whole("sync", Cluster.parse("1s", faults="kill 1 at 1500ms for 2s"), workers=2, steps=5)

    contributors = [u.contributors for u in trace.updates()]
    assert contributors == [(0, 1), (0,), (0,), (0, 1), (0, 1)]
    assert [(r.t, r.worker) for r in trace.records if isinstance(r, Left)] == [(1.5, 1)]
    assert [u.t for u in trace.updates()] == [1.0, 2.0, 3.0, 4.5, 5.5]


def test_a_frozen_worker_takes_longer_by_as_much():
    trace = whole(
        "sync", Cluster.parse("1s", faults="freeze 1 at 500ms for 2s"), workers=2, steps=2
    )

    assert [u.t for u in trace.updates()] == [3.0, 4.0]


def test_a_frozen_worker_gives_up_only_when_it_thaws():
    faults = "freeze 1 at 500ms for 2s; freeze 1 at 600ms for 1s"
    trace = whole("backup:1", Cluster.parse("1s", faults=faults), workers=2, steps=4)

    cancelled = [(g.t, g.worker) for g in trace.gradients() if g.fate is Fate.CANCELLED]
    assert cancelled[0] == (2.5, 1)


def test_a_run_without_enough_workers_pauses_and_goes_on():
    cluster = Cluster.parse("1s", faults="kill 1 at 500ms for 3s")

    trace = whole("sync", cluster, workers=2, steps=3, min_workers=2)

    assert [r.t for r in trace.records if isinstance(r, Paused)] == [0.5]
    assert [r.t for r in trace.records if isinstance(r, Resumed)] == [0.0, 3.5]
    assert [u.contributors for u in trace.updates()] == [(0, 1)] * 3


def test_a_run_that_lost_everybody_says_so_instead_of_hanging():
    faults = "kill 0 at 1500ms; kill 1 at 2500ms; freeze any every 1s for 1s"

    trace = whole("sync", Cluster.parse("1s", faults=faults), workers=2, steps=10)

    assert trace.records[-1].reason.startswith("stalled: 0 workers are left")
    assert trace.records[-1].version < 10


def test_a_run_that_faults_alone_keep_busy_is_given_up():
    """Worker 0 never returns, so three are never here; the others die and return for ever."""
    faults = "kill 0 at 1s; kill any every 10s for 1s"

    trace = whole("sync", Cluster.parse("1s", faults=faults), workers=3, steps=10, min_workers=3)

    assert trace.records[-1].reason.startswith("stalled: ")


def test_a_freeze_between_a_cancel_and_its_report_does_not_revive_the_work():
    network = "model=1MB,bandwidth=100MB,delay=5ms"
    cluster = Cluster.parse("pareto:5ms,1.1", network, "freeze any every 50ms for 1ms")

    trace = whole("backup:2", cluster, workers=4, steps=500)

    assert trace.records[-1].version == 500


def test_until_ends_the_run_after_the_update_in_the_making():
    cluster = Cluster.parse("1s; worker 1 x1.5")
    spec = RunSpec(workers=2)

    trace = simulate("sync", cluster, spec, until=4.0)  # one gradient of update 3 is in

    audit(trace)
    assert [u.t for u in trace.updates()] == [1.5, 3.0, 4.5]


def test_until_after_the_end_changes_nothing():
    cluster, spec = Cluster.parse("1s"), RunSpec(workers=2, steps=3)

    assert simulate("sync", cluster, spec, until=100.0).records[-1] == Ended(3.0, 3)


@pytest.mark.parametrize("faults", ["", "kill 2 at 10ms for 1.4s"])
def test_what_happens_while_the_last_are_told_to_stop_changes_nothing(faults):
    """The run ends after 1 s and two ways; worker 1 hears of it and answers half a second later."""
    network = "model=1,bandwidth=1GB,delay=150ms"
    cluster = Cluster.parse("1s; worker 1 x9", network, faults)
    spec = RunSpec(workers=3, steps=1)

    trace = simulate("backup:2", cluster, spec, until=1.4)

    audit(trace)
    assert trace.records[-1].t == pytest.approx(1.3)
    assert not any(isinstance(record, Joined) and record.t > 1 for record in trace.records)


def test_progress_is_told_update_by_update_by_both_ways():
    spec = RunSpec(workers=2, steps=5)

    for policy, latency in [("sync", "exp:1s"), ("async", "exp:1s"), ("sync", "1s")]:
        told = []
        simulate(policy, Cluster.parse(latency), spec, on_update=told.append)
        assert told == [1, 2, 3, 4, 5]


@long
def test_ten_thousand_workers_run():
    cluster = Cluster.parse("exp:20ms,shift=50ms; phases x3 for 5s every 60s")

    summary = summarize(simulate("backup:500", cluster, RunSpec(workers=10_000, steps=3)))

    assert summary.updates == 3
    assert summary.contributions == 9500


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"spec": RunSpec(workers=2)}, "needs an end"),
        ({"until": -1.0}, "until must be >= 0"),
        ({"policy": "backup:2"}, "b must be smaller"),
        ({"cluster": Cluster.parse("1s", faults="kill 2 at 1s")}, "the workers are 0 to 1"),
        ({"cluster": Cluster.parse("1s; worker 2 x3")}, "speaks of worker 2"),
        ({"cluster": Cluster.parse("1s; phases x2 for 1s every 1s on worker 5")}, "worker 5"),
    ],
)
def test_an_impossible_simulation_is_refused(options, reason):
    call = {
        "policy": "sync",
        "cluster": Cluster.parse("1s"),
        "spec": RunSpec(workers=2, steps=2),
    } | options

    with pytest.raises(SpecError, match=reason):
        simulate(call.pop("policy"), call.pop("cluster"), call.pop("spec"), **call)


def test_a_batch_without_samples_is_refused():
    with pytest.raises(SpecError, match="batch must be >= 1"):
        Cluster.parse("1s", batch=0)
