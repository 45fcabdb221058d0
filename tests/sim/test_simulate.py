# SPDX-License-Identifier: BSD-3-Clause
"""Complete simulated runs: known limits, golden traces, determinism, and the choice of path."""

from dataclasses import fields

import pytest

from paceline.core.decider import Decider, replay
from paceline.core.events import Fate, UpdateApplied
from paceline.core.policies import POLICIES, Backup, Sync, parse_policy
from paceline.errors import SpecError
from paceline.sim.cluster import Cluster
from paceline.sim.shell import Shell
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import Ended, Gradient, Joined, Left, Resumed, Trace, Update
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
def test_every_policy_finishes_its_run_despite_all_faults(policy, late):
    """Uneven workers, a slow network, deaths, returns and freezes: all updates are made."""
    cluster = Cluster.parse(UNEVEN, NETWORK, FAULTS)

    trace = whole(policy, cluster, late=late)

    assert trace.records[-1] == Ended(trace.records[-1].t, 40, ())
    assert any(isinstance(r, Left) for r in trace.records)


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_every_turn_has_one_fate_unless_its_worker_died(policy):
    trace = whole(policy, Cluster.parse(UNEVEN, NETWORK))

    turns = [(g.worker, g.turn) for g in trace.gradients()]
    assert len(turns) == len(set(turns))
    for worker in range(4):
        own = [turn for w, turn in turns if w == worker]
        assert own == list(range(1, len(own) + 1))


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_same_seed_gives_the_same_trace_and_another_seed_another(policy):
    cluster = Cluster.parse(UNEVEN, NETWORK, FAULTS)

    assert whole(policy, cluster) == whole(policy, cluster)
    assert whole(policy, cluster) != whole(policy, cluster, seed=6)


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_replaying_the_events_gives_the_same_decisions(policy):
    spec = RunSpec(workers=4, steps=40, seed=5)
    decider = Decider(parse_policy(policy), spec)
    live = []
    handle = decider.handle
    decider.handle = lambda event: live.append(handle(event)) or live[-1]
    records = Shell(decider, Cluster.parse(UNEVEN, NETWORK, FAULTS), lambda update: None).run()
    trace = Trace(simulate(policy, Cluster.parse("1s"), spec).header, records)

    events = [event for event in trace.events() if not isinstance(event, UpdateApplied)]
    assert replay(parse_policy(policy), spec, events) == live


def test_complete_small_trace():
    """Two workers under backup:1, the second twice as slow: it is cancelled each time."""
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
def test_limits_of_the_standard_straggler_schedule(policy, late, limit_ms):
    """8 workers, 50 ms, 5 % of steps + Exp(500 ms): within 3 % of the numbers in the design."""
    # A breath of noise keeps ties away, so that the fast way can serve.
    cluster = Cluster.parse("50ms + exp:1us + 5% exp:500ms")

    spec = RunSpec(workers=8, steps=10_000, late=late)
    summary = summarize(simulate(policy, cluster, spec))

    assert summary.step_s.mean * 1000 == pytest.approx(limit_ms, rel=0.03)


def test_until_after_the_end_changes_nothing():
    cluster, spec = Cluster.parse("1s"), RunSpec(workers=2, steps=3)

    assert simulate("sync", cluster, spec, until=100.0).records[-1] == Ended(3.0, 3)


def test_both_paths_report_progress_update_by_update():
    spec = RunSpec(workers=2, steps=5)

    for policy, latency in [("sync", "exp:1s"), ("async", "exp:1s"), ("sync", "1s")]:
        told = []
        simulate(policy, Cluster.parse(latency), spec, on_progress=told.append)
        assert told == [0.2, 0.4, 0.6, 0.8, 1.0]


@pytest.mark.parametrize(
    ("goals", "until", "shares"),
    [
        ({"samples": 40}, None, [0.2, 0.4, 0.6, 0.8, 1.0]),
        ({}, 5.0, [0.2, 0.4, 0.6, 0.8, 1.0]),
        ({"steps": 100}, 4.0, [0.25, 0.5, 0.75, 1.0]),
        ({"steps": 2}, 4.0, [0.5, 1.0]),
        ({"samples": 12}, 100.0, [8 / 12, 1.0]),
    ],
    ids=["samples", "time", "steps and time", "steps before time", "samples before time"],
)
def test_progress_is_towards_the_goal_that_ends_the_run(goals, until, shares):
    """Two workers with four samples each make one update a second."""
    told = []
    cluster, spec = Cluster.parse("1s", batch=4), RunSpec(workers=2, **goals)
    simulate("sync", cluster, spec, until=until, on_progress=told.append)
    assert told == pytest.approx(shares)


@long
def test_run_with_ten_thousand_workers():
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
        ({"cluster": Cluster.parse("1s; worker 2 x3")}, "names worker 2"),
        ({"cluster": Cluster.parse("1s; phases x2 for 1s every 1s on worker 5")}, "worker 5"),
    ],
)
def test_impossible_simulation_is_refused(options, reason):
    call = {
        "policy": "sync",
        "cluster": Cluster.parse("1s"),
        "spec": RunSpec(workers=2, steps=2),
    } | options

    with pytest.raises(SpecError, match=reason):
        simulate(call.pop("policy"), call.pop("cluster"), call.pop("spec"), **call)
