# SPDX-License-Identifier: BSD-3-Clause
"""Runs restored from a checkpoint, and workers that never join."""

from random import Random

import msgspec
import pytest

from fakes import POLICY_TABLE, Cluster, make_decider, random_steps, state_of, view_of
from paceline.core.decider import Decider
from paceline.core.events import (
    Finish,
    GradientArrived,
    Pause,
    Resume,
    SendParams,
    StartTimer,
    StopRequested,
    TimerFired,
    WorkerJoined,
    WorkerMissing,
)
from paceline.core.ledger import Origin
from paceline.core.policies import parse_policy
from paceline.errors import ProtocolError, SpecError
from paceline.spec import RunSpec

every_policy = pytest.mark.parametrize("policy", POLICY_TABLE)
BARRIERS = ["sync", "backup:0", "deadline", "delayed:0", "delayed:1", "delayed:2"]


def restored(policy, origin, workers=3, joined=True, **spec):
    """Return a cluster whose run continues from there."""
    cluster = Cluster(Decider(parse_policy(policy), RunSpec(workers=workers, **spec), origin))
    for worker in range(workers) if joined else ():
        cluster.join(worker, after=0.0)
    return cluster


def saved(cluster):
    """Return the origin that a checkpoint of this cluster would keep."""
    ledger, policy = cluster.decider.ledger, cluster.decider.policy
    plain = msgspec.json.encode(policy.plain_memory(ledger.memory))
    return Origin(ledger.version, dict(ledger.turns), msgspec.json.decode(plain))


def without_timer_numbers(actions):
    """Return the actions without timer numbers, which start again after a restore."""
    return [a.at if isinstance(a, StartTimer) else a for a in actions]


# ------------------------------------------------------------------------------ where it goes on


@every_policy
def test_restored_run_starts_with_the_version_and_turns_of_its_origin(policy):
    cluster = restored(policy, Origin(7, {0: 4, 2: 9}))
    asked = {worker: cluster.asked[worker] for worker in cluster.working}
    assert asked == {
        0: SendParams(0, turn=5, version=7),
        1: SendParams(1, turn=1, version=7),
        2: SendParams(2, turn=10, version=7),
    }
    cluster.run_until(10)
    assert [update.update for update in cluster.updates] == [8, 9, 10]


@pytest.mark.parametrize("policy", [p for p in POLICY_TABLE if p not in ("delayed:1", "delayed:2")])
@pytest.mark.parametrize("seed", range(3))
def test_restored_run_decides_as_if_all_workers_had_left_and_rejoined(policy, seed):
    """Except under `delayed`, which loses its pending contributions."""
    lived = Cluster.of(policy)
    for _ in random_steps(lived, Random(seed), 40, spare=0):
        pass
    for worker in sorted(set(range(3)) - set(lived.asked)):
        lived.join(worker, after=0.0)
    lived.run_until(lived.version + 1)
    for worker in range(3):
        lived.leave(worker, after=0.0)
    origin = saved(lived)
    again = restored(policy, origin, joined=False)
    again.now = lived.now
    for worker in range(3):
        lived.join(worker, after=0.0)
        again.join(worker, after=0.0)
    assert again.decider.ledger.memory == lived.decider.ledger.memory
    assert again.asked == lived.asked
    timers = [[c.timers[timer] for timer in c.due] for c in (lived, again)]
    assert timers[0] == timers[1]
    rng = Random(seed)
    for _ in range(40):
        able, due = again.working, again.due
        if able and (not due or rng.random() < 0.8):
            worker, samples = rng.choice(able), rng.choice([1, 8])
            actions = [c.arrive(worker, samples=samples) for c in (lived, again)]
        else:
            actions = [c.fire(c.due[0]) for c in (lived, again)]
        assert without_timer_numbers(actions[0]) == without_timer_numbers(actions[1])


@every_policy
@pytest.mark.parametrize("seed", range(3))
def test_all_laws_hold_in_a_restored_run(policy, seed):
    """The cluster checks them, including turns and versions from before the origin."""
    cluster = restored(policy, Origin(100, {0: 7, 4: 3}), joined=False)
    for _ in random_steps(cluster, Random(seed), 150):
        pass
    assert cluster.version > 100


@every_policy
def test_restored_run_waits_for_its_workers_to_join(policy):
    needed = min(make_decider(policy).policy.needed(make_decider(policy).ledger), 3)
    cluster = restored(policy, Origin(5, {0: 5, 1: 5, 2: 5}), joined=False)
    for worker in range(needed - 1):
        assert cluster.join(worker) == []
    assert Resume() in cluster.join(needed - 1)


@every_policy
def test_restored_run_ends_at_its_total_steps(policy):
    cluster = restored(policy, Origin(5, {}), steps=8)
    cluster.run_until(100)
    assert cluster.finish is not None
    assert cluster.finish.version == 8


@every_policy
@pytest.mark.parametrize("version", [8, 11])
@pytest.mark.parametrize(
    "first", [WorkerJoined(1.0, 0), WorkerMissing(1.0, 0), StopRequested(1.0)], ids=repr
)
def test_restored_run_with_all_steps_made_ends_with_the_first_event(policy, version, first):
    decider = Decider(parse_policy(policy), RunSpec(workers=3, steps=8), Origin(version))
    actions = decider.handle(first)
    assert Finish(version) in actions
    assert not any(isinstance(action, SendParams) for action in actions)
    decider.check()
    assert decider.handle(WorkerJoined(2.0, 7)) == []


@pytest.mark.parametrize("policy", POLICY_TABLE)
def test_restored_run_with_all_samples_used_ends_with_the_first_event(policy):
    origin = Origin(version=4, samples=10)
    decider = Decider(parse_policy(policy), RunSpec(workers=3, samples=10), origin)
    assert decider.handle(WorkerJoined(0.0, 0))[-1:] == [Finish(4)]


def test_restored_run_without_an_end_has_none():
    cluster = restored("async", Origin(1000, {}))
    cluster.run_until(1010)
    assert cluster.stop() != []
    assert cluster.finish is not None


def test_turns_from_before_the_origin_are_duplicates():
    cluster = restored("sync", Origin(5, {0: 5}))
    before = state_of(cluster.decider)
    with pytest.raises(ProtocolError, match="the worker has had 6 turns"):
        cluster.decider.handle(GradientArrived(1.0, 0, 7, 5))
    assert view_of(cluster.decider) == before
    cluster.duplicate(0)  # of turn 5: the shell holds that it is called a duplicate


def test_run_does_not_change_its_origin():
    turns = {0: 5}
    origin = Origin(5, turns)
    restored("async", origin).run_until(9)
    assert origin == Origin(5, {0: 5})
    assert turns == {0: 5}


# ------------------------------------------------------------------------- what rules remember


@every_policy
def test_memory_of_a_rule_survives_as_plain_values(policy):
    cluster = Cluster.of(policy)
    for _ in random_steps(cluster, Random(1), 60, spare=0):
        pass
    again = restored(policy, saved(cluster), joined=False)
    assert saved(again).memory == saved(cluster).memory


def test_restored_deadline_is_known_immediately():
    cluster = Cluster.of("deadline:0.9")
    cluster.run_until(20)
    origin = saved(cluster)
    assert origin.memory
    again = restored("deadline:0.9", origin, joined=False)
    assert again.decider.ledger.memory == cluster.decider.ledger.memory
    [*_, started] = [a for w in range(3) for a in again.join(w) if isinstance(a, StartTimer)]
    assert started.at > again.now
    fresh = restored("deadline:0.9", Origin(origin.version, origin.turns))
    assert fresh.due == []


def test_memory_of_more_workers_is_cut_to_the_newest_answers():
    answers = [[float(i), True] for i in range(100)]
    policy = parse_policy("deadline")
    found = policy.recall(RunSpec(workers=2), answers)
    assert list(found) == [(float(i), True) for i in range(68, 100)]
    assert found.maxlen == 32


@pytest.mark.parametrize("nonsense", [7, "nonsense", [1, 2], [[1]], [["x", True]], [[None, True]]])
def test_invalid_memory_of_a_deadline_is_refused(nonsense):
    with pytest.raises(
        SpecError, match="expected pairs of a time and whether the answer was complete"
    ):
        Decider(parse_policy("deadline"), RunSpec(workers=2), Origin(1, {}, nonsense))


@pytest.mark.parametrize("k", [0, 1, 2, 5])
def test_delayed_run_never_needs_a_version_before_its_origin(k):
    cluster = restored(f"delayed:{k}", Origin(50, {}))
    cluster.run_until(50 + 3 * k + 3)
    versions = [a.version for actions in cluster.actions for a in actions if type(a) is SendParams]
    assert min(versions) == 50
    for update in cluster.updates:
        assert {c.version for c in update.contributions} == {max(50, update.update - 1 - k)}


# ------------------------------------------------------------------------ workers that never come


@pytest.mark.parametrize("policy", BARRIERS)
@pytest.mark.parametrize("origin", [Origin(), Origin(5, {1: 9})])
def test_run_begins_without_a_missing_worker(policy, origin):
    cluster = restored(policy, origin, joined=False)
    assert cluster.join(0) == []
    assert cluster.join(2) == []
    begun = cluster.handle(WorkerMissing(cluster.now + 1, 1, "it fails"))
    assert begun[0] == Resume()
    assert cluster.working == [0, 2]
    cluster.run_until(origin.version + 4)
    assert {c.worker for update in cluster.updates for c in update.contributions} == {0, 2}


@pytest.mark.parametrize("policy", BARRIERS)
def test_worker_may_join_after_others_were_reported_missing(policy):
    cluster = restored(policy, Origin(), joined=False)
    for worker in (0, 1):
        assert cluster.handle(WorkerMissing(cluster.now, worker)) == []
    assert Resume() in cluster.join(2)
    assert cluster.working == [2]


@every_policy
def test_run_without_any_worker_stays_paused_until_it_is_stopped(policy):
    cluster = restored(policy, Origin(5), joined=False)
    for worker in range(3):
        assert cluster.handle(WorkerMissing(float(worker), worker)) == []
    assert cluster.paused
    assert cluster.stop() == [Finish(5)]


def test_missing_worker_does_not_count_towards_min_workers():
    cluster = restored("sync", Origin(), joined=False, min_workers=3)
    for worker in (0, 1):
        cluster.join(worker)
    assert cluster.handle(WorkerMissing(cluster.now, 2)) == []
    assert cluster.paused
    assert Resume() in cluster.join(7)  # somebody else will do


@every_policy
def test_member_cannot_be_reported_missing(policy):
    for cluster in (restored(policy, Origin(3)), restored(policy, Origin(), joined=False)):
        if not cluster.asked:
            cluster.join(1)
        before = state_of(cluster.decider)
        with pytest.raises(ProtocolError, match="worker 1 has joined"):
            cluster.decider.handle(WorkerMissing(cluster.now + 1, 1))
        assert view_of(cluster.decider) == before


@every_policy
def test_missing_worker_has_no_effect_once_the_run_has_begun(policy):
    cluster, undisturbed = Cluster.of(policy), Cluster.of(policy)
    for one in (cluster, undisturbed):
        one.run_until(2)
    assert cluster.handle(WorkerMissing(cluster.now, 9)) == []
    assert view_of(cluster.decider) == view_of(undisturbed.decider)


def test_missing_worker_may_still_join():
    cluster = restored("sync", Origin(), joined=False)
    cluster.join(0)
    cluster.join(1)
    cluster.handle(WorkerMissing(cluster.now, 2))
    cluster.handle(WorkerMissing(cluster.now, 2))
    cluster.join(2)
    assert cluster.working == [0, 1, 2]
    cluster.run_until(1)
    assert len(cluster.updates[0].contributions) == 3


def test_restored_run_says_what_a_pause_waits_for():
    cluster = restored("async", Origin(5), min_workers=2)
    cluster.leave(0)
    [pause] = [action for action in cluster.leave(1) if isinstance(action, Pause)]
    assert pause.reason == "1 of at least 2 workers; waits for 1"


def test_timers_are_numbered_anew_after_a_restore():
    cluster = restored("deadline:after=2s", Origin(5))
    assert cluster.due == [1]
    with pytest.raises(ProtocolError, match="no timer with this number"):
        cluster.decider.handle(TimerFired(1.0, 2))
