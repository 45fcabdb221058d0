# SPDX-License-Identifier: BSD-3-Clause
"""The contract: every policy of the table obeys every law of the design.

`histories` are random schedules with joins, deaths, rejoins, non-finite gradients, duplicates,
abandoned work, timers and stops, the same for every law. `Cluster` already checks the shell's laws
at each step; here each law is checked once more from the log alone.
"""

from collections import defaultdict
from dataclasses import replace
from functools import cache
from math import fsum, inf, isfinite, nan
from random import Random

import pytest

from fakes import POLICY_TABLE, Cluster, random_steps, state_of, view_of
from paceline.core.decider import replay
from paceline.core.events import (
    Accept,
    ApplyUpdate,
    Cancel,
    Contribution,
    Drop,
    Fate,
    Finish,
    GradientArrived,
    Pause,
    Resume,
    SendParams,
    StopRequested,
    TimerFired,
    UpdateApplied,
    WorkAbandoned,
    WorkerJoined,
    WorkerLeft,
)
from paceline.core.policies import POLICIES, parse_policy
from paceline.errors import ProtocolError

SPECS = [{}, {"min_workers": 2}, {"steps": 6}, {"min_workers": 3}]

every_policy = pytest.mark.parametrize("policy", POLICY_TABLE)


@cache
def histories(policy):
    """Return clusters with long histories; callers must not change them."""
    clusters = []
    for seed in range(6):
        rng = Random(seed)
        cluster = Cluster.of(policy, **SPECS[seed % len(SPECS)])
        for _ in random_steps(cluster, rng, 40):
            pass
        if seed % 2:
            cluster.stop()
            for _ in random_steps(cluster, rng, 15):
                pass
        clusters.append(cluster)
    return clusters


def updates_of(policy):
    """Return every update of all histories."""
    return [update for cluster in histories(policy) for update in cluster.updates]


def test_table_has_every_policy():
    assert {parse_policy(text).name for text in POLICY_TABLE} == set(POLICIES)


def test_histories_contain_every_kind_of_event():
    """Otherwise the tests of the laws below would be empty."""
    logs = [cluster.log for policy in POLICY_TABLE for cluster in histories(policy)]
    seen = {type(event) for log in logs for event, _ in log}
    done = {type(action) for log in logs for _, actions in log for action in actions}
    fates = {fate for policy in POLICY_TABLE for c in histories(policy) for fate in c.fates}
    assert {TimerFired, StopRequested, WorkAbandoned, WorkerLeft} <= seen
    assert {Pause, Resume, Cancel, Finish} <= done
    assert fates == set(Fate)


# --------------------------------------------------------------------------------- laws 1 to 5


@every_policy
def test_law_1_update_has_one_set_of_contributors(policy):
    """An update is made once, from exactly what was accepted for it; nothing is used twice."""
    for cluster in histories(policy):
        accepted = {}
        for event, actions in cluster.log:
            for action in actions:
                if isinstance(action, Accept):
                    given = Contribution(event.worker, event.version, event.samples, action.scale)
                    accepted.setdefault(action.update, []).append(given)
                elif isinstance(action, ApplyUpdate):
                    assert action.contributions == tuple(accepted.pop(action.update))
        assert [update.update for update in cluster.updates] == [*range(1, cluster.version + 1)]


@every_policy
def test_law_2_worker_counts_at_most_once_in_an_update(policy):
    if parse_policy(policy).name in ("batchsync", "softsync"):
        assert parse_policy(policy).repeats
        return
    for update in updates_of(policy):
        givers = [c.worker for c in update.contributions]
        assert len(givers) == len(set(givers))


@every_policy
def test_law_3_synchronous_rules_never_use_a_gradient_of_another_version(policy):
    """No rule uses a gradient that is older than it allows."""
    rule = parse_policy(policy)
    for update in updates_of(policy):
        if rule.name in ("sync", "backup", "batchsync", "deadline"):
            assert set(update.staleness) == {0}
        elif rule.name == "delayed":
            assert set(update.staleness) == {min(rule.k, update.update - 1)}
        else:
            bound = inf if rule.bound is None else rule.bound
            assert all(0 <= staleness <= bound for staleness in update.staleness)


@every_policy
def test_law_4_every_gradient_gets_exactly_one_fate(policy):
    for cluster in histories(policy):
        accepted = 0
        for event, actions in cluster.log:
            told = [a.worker for a in actions if isinstance(a, Accept | Drop)]
            reported = isinstance(event, GradientArrived | WorkAbandoned)
            assert told == ([event.worker] if reported else [])
            accepted += sum(isinstance(action, Accept) for action in actions)
        used = sum(len(update.contributions) for update in cluster.updates)
        unused = len(cluster.finish.unused) if cluster.finish else 0
        in_the_making = sum(len(given) for given in cluster.pending.values())
        assert accepted == used + unused + in_the_making


@every_policy
def test_law_5_weights_are_proportional_to_samples_and_sum_to_one(policy):
    for update in updates_of(policy):
        samples = [c.samples for c in update.contributions]
        assert update.weights == tuple(n / sum(samples) for n in samples)
        assert fsum(update.weights) == pytest.approx(1.0, abs=1e-12)
        assert all(isfinite(weight) and weight > 0 for weight in update.weights)
        assert all(isfinite(scale) and 0 < scale <= 1 for scale in update.scales)


@every_policy
def test_law_5_gradient_is_accepted_with_its_samples_and_scale(policy):
    """So a shell can add it up early, without asking the policy again."""
    cluster = Cluster.of(policy)
    accepted = defaultdict(list)
    for _, actions in random_steps(cluster, Random(5), 120):
        for action in actions:
            if isinstance(action, Accept):
                accepted[action.update].append((action.samples, action.scale))
            elif isinstance(action, ApplyUpdate):
                given = accepted.pop(action.update)
                total = sum(samples for samples, _ in given)
                assert action.weights == tuple(samples / total for samples, _ in given)
                assert action.scales == tuple(scale for _, scale in given)
                staleness = map(cluster.decider.policy.scale, action.staleness)
                assert action.scales == tuple(staleness)


@pytest.mark.parametrize("policy", ["sync", "backup:0", "delayed:0", "delayed:1", "delayed:2"])
@pytest.mark.parametrize("seed", range(24, 34))
def test_rule_that_waits_for_all_cancels_only_retries_without_spare_workers(policy, seed):
    """Whatever happens to the workers, only the retry of an excused one may be late."""
    cluster = Cluster.of(policy)
    excused, cancelled = set(), set()
    for event, actions in random_steps(cluster, Random(seed), 80, spare=0):
        if isinstance(event, WorkerJoined):
            excused.discard(event.worker)
        if isinstance(event, GradientArrived):
            if Drop(event.worker, event.version, Fate.DUPLICATE) in actions:
                assert len(actions) == 1
            elif event.finite or event.worker in cancelled:
                excused.discard(event.worker)
            else:
                excused.add(event.worker)
        for action in actions:
            if isinstance(action, Cancel):
                assert action.worker in excused
        cancelled = set(cluster.cancelled)


@every_policy
def test_work_is_assigned_again_after_a_non_finite_gradient(policy):
    """For the same update, unless that was made without it; `ssp` counts it and may wait."""
    rule = parse_policy(policy)
    if rule.name == "ssp":
        return
    any_version = rule.name in ("async", "softsync")
    asked_again = 0
    for cluster in histories(policy):
        paused, over, cancelled = True, False, set()
        for event, actions in cluster.log:
            for action in actions:
                paused = (paused or isinstance(action, Pause)) and not isinstance(action, Resume)
                over = over or isinstance(action, Finish)
            refused = isinstance(event, GradientArrived) and Drop(
                event.worker, event.version, Fate.NON_FINITE
            )
            if refused in actions and not (paused or over or event.worker in cancelled):
                sent = [action for action in actions if isinstance(action, SendParams)]
                [again] = [action for action in sent if action.worker == event.worker]
                assert again.turn == event.turn + 1
                if not any_version and not any(isinstance(a, ApplyUpdate) for a in actions):
                    assert again.version == event.version
                    assert sent == [again]
                asked_again += 1
            cancelled.difference_update([getattr(event, "worker", None)])
            cancelled.update(a.worker for a in actions if isinstance(a, Cancel))
    assert asked_again > 0


# --------------------------------------------------------------------------------------- law 6

CAN_DO_WITHOUT = [
    *[(policy, {2}) for policy in POLICY_TABLE if policy.startswith(("backup:1", "backup:2"))],
    ("backup:2", {1, 2}),
    *[
        (policy, silent)
        for policy in POLICY_TABLE
        for silent in ({2}, {1, 2})
        if policy.startswith(("batchsync", "async", "softsync"))
        or (policy.startswith("deadline") and 3 - len(silent) >= parse_policy(policy).n_min)
    ],
]

can_do_without = pytest.mark.parametrize(
    ("policy", "silent"),
    [pytest.param(p, s, id=f"{p} without {'+'.join(map(str, s))}") for p, s in CAN_DO_WITHOUT],
)


@can_do_without
def test_law_6_worker_that_never_reports_does_not_block(policy, silent):
    cluster = Cluster.of(policy)
    cluster.run_until(8, silent)
    assert not any(c.worker in silent for update in cluster.updates for c in update.contributions)


@can_do_without
def test_law_6_worker_that_stops_reporting_does_not_block(policy, silent):
    cluster = Cluster.of(policy)
    for _ in random_steps(cluster, Random(6), 20, faults=False):
        pass
    cluster.run_until(cluster.version + 8, silent)


@can_do_without
@pytest.mark.parametrize("seed", range(1, 3))
def test_law_6_worker_that_stops_reporting_after_faults_does_not_block(policy, silent, seed):
    """Deaths, pauses, non-finite gradients, old timers; then all rejoin and some never report."""
    rng = Random(seed)
    cluster = Cluster.of(policy, min_workers=1 + seed)
    for _ in random_steps(cluster, rng, 40):
        pass
    for worker in {0, 1, 2} - cluster.asked.keys():
        cluster.join(worker)
    for worker in cluster.asked.keys() - {0, 1, 2}:
        cluster.leave(worker)
    cluster.run_until(cluster.version + 8, silent)


@can_do_without
def test_law_6_non_finite_gradient_does_not_make_silent_workers_block(policy, silent):
    """A worker that still reports has one non-finite gradient, then finite ones."""
    cluster = Cluster.of(policy)
    cluster.arrive(0, finite=False)
    cluster.run_until(8, silent)
    assert not any(c.worker in silent for update in cluster.updates for c in update.contributions)


@can_do_without
@pytest.mark.parametrize("times", [1, 2])
def test_law_6_non_finite_gradients_of_all_others_do_not_make_silent_workers_block(
    policy, silent, times
):
    """As with an initial loss scale that is too high: all reported gradients are non-finite."""
    cluster = Cluster.of(policy)
    for worker in sorted({0, 1, 2} - silent) * times:
        cluster.arrive(worker, finite=False)
    assert cluster.version == 0
    cluster.run_until(8, silent)
    assert not any(c.worker in silent for update in cluster.updates for c in update.contributions)
    if policy.startswith("backup"):
        assert {len(u.contributions) - u.wanted for u in cluster.updates} == {0}


@every_policy
@pytest.mark.parametrize("broken", [{0}, {1}, {0, 2}])
def test_law_6_worker_whose_gradients_are_never_finite_does_not_block(policy, broken):
    """Not even under a rule that waits for all: the worker retries forever, but nothing waits."""
    cluster = Cluster.of(policy)
    for _ in range(200):
        if cluster.version >= 5:
            break
        if cluster.working:
            cluster.arrive(cluster.working[0], finite=cluster.working[0] not in broken)
        else:
            cluster.fire(cluster.due[0])
    assert cluster.version >= 5
    assert not any(c.worker in broken for update in cluster.updates for c in update.contributions)


@every_policy
@pytest.mark.parametrize("seed", range(2))
def test_law_6_dead_workers_never_block(policy, seed):
    """At any time all but one may die, and the run continues."""
    rng = Random(seed)
    cluster = Cluster.of(policy)
    for _ in random_steps(cluster, rng, rng.randrange(25)):
        pass
    for worker in (0, 1, 2, 3, 4):
        if worker in cluster.asked and len(cluster.asked) > 1:
            cluster.leave(worker)
    for worker in [] if cluster.asked else [0]:
        cluster.join(worker)
    cluster.run_until(cluster.version + 5)


@every_policy
def test_law_6_run_without_workers_pauses_and_resumes_when_one_rejoins(policy):
    cluster = Cluster.of(policy)
    cluster.run_until(2)
    assert cluster.leave(0) == []
    cluster.leave(1)
    assert Pause("0 of at least 1 workers; waits for 1") in cluster.leave(2)
    assert Resume() in cluster.join(1)
    cluster.run_until(cluster.version + 3)


@every_policy
def test_law_6_idle_workers_get_work_again_if_gradients_keep_arriving(policy):
    cluster = Cluster.of(policy)
    cluster.run_until(30)
    asked = [len(turns) for turns in cluster.turns.values()]
    assert min(asked) >= 5


# --------------------------------------------------------------------------------- laws 7 to 9


@every_policy
@pytest.mark.parametrize("seed", range(2))
def test_law_7_work_is_assigned_at_the_newest_version(policy, seed):
    """Under `delayed`, at the version that all workers use for that update."""
    rule = parse_policy(policy)
    cluster = Cluster.of(policy)
    members = cluster.decider.ledger.members
    for _, actions in random_steps(cluster, Random(seed), 60):
        for action in actions:
            if not isinstance(action, SendParams):
                continue
            assert cluster.version - rule.versions_kept < action.version <= cluster.version
            update = members[action.worker].work.update
            if rule.name == "delayed":
                assert cluster.version < update <= cluster.version + 1 + rule.k
                assert action.version == max(0, update - 1 - rule.k)
            else:
                assert action.version == cluster.version


def decides_the_same(policies, seed):
    """Run random events through the first policy; the others must decide the same."""
    rng = Random(seed)
    spec = SPECS[seed % len(SPECS)]
    first, *others = [Cluster.of(policy, **spec) for policy in policies]
    steps = list(random_steps(first, rng, 60))
    if seed % 2:
        first.stop()
        steps += [first.log[-1], *random_steps(first, rng, 15)]
    for event, actions in steps:
        for other in others:
            assert other.handle(event) == actions
    assert first.fates[Fate.ACCEPTED] > 0


@pytest.mark.parametrize("seed", range(8))
def test_law_8_backup_0_is_sync_is_delayed_0(seed):
    decides_the_same(["sync", "backup:0", "delayed:0"], seed)


@pytest.mark.parametrize("seed", range(8))
def test_law_8_softsync_of_one_is_async(seed):
    decides_the_same(["async", "softsync:1,lr=constant"], seed)
    decides_the_same(["async:lr=inverse", "softsync:1"], seed)


@pytest.mark.parametrize("seed", range(8))
def test_ssp_with_a_large_s_is_async(seed):
    decides_the_same(["async", "ssp:1000"], seed)


@pytest.mark.parametrize("seed", range(8))
def test_batchsync_of_one_is_async_with_bound_zero_but_for_the_fate(seed):
    """One calls a gradient late, the other stale; everything else is the same."""
    cluster, other = Cluster.of("batchsync:1"), Cluster.of("async:bound=0")
    for event, actions in random_steps(cluster, Random(seed), 60):
        expected = [
            replace(action, fate=Fate.STALE)
            if getattr(action, "fate", None) is Fate.LATE
            else action
            for action in actions
        ]
        assert other.handle(event) == expected


@every_policy
def test_law_9_the_same_events_give_the_same_actions(policy):
    for cluster in histories(policy):
        spec = cluster.decider.ledger.spec
        assert replay(cluster.decider.policy, spec, cluster.events) == cluster.actions


@every_policy
def test_law_9_replaying_gives_the_same_state(policy):
    for cluster in histories(policy):
        twin = Cluster.of(policy, joined=False)
        twin.decider.ledger.spec = cluster.decider.ledger.spec
        twin.decider.ledger.last = cluster.decider.ledger.spec.steps
        for event in cluster.events:
            twin.handle(event)
        assert view_of(twin.decider) == view_of(cluster.decider)


def illegal_events(cluster):
    """Yield events that are illegal in the current state."""
    now, ledger = cluster.now, cluster.decider.ledger
    yield WorkerLeft(now, 99)
    yield GradientArrived(now, 99, 1, 0)
    yield WorkAbandoned(now, 99, 1)
    yield TimerFired(now, ledger.timer + 1)
    yield StopRequested(now - 1e-9)
    yield StopRequested(nan)
    yield UpdateApplied(now - 1e-9, ledger.version)
    for worker, asked in cluster.asked.items():
        turn = len(cluster.turns[worker])
        yield WorkerJoined(now, worker)
        yield GradientArrived(now, worker, turn + 1, ledger.version)
        yield GradientArrived(now, worker, 0, 0)
        yield WorkAbandoned(now, worker, turn + 1)
        if asked:
            yield GradientArrived(now, worker, turn, asked.version + 1)
            yield GradientArrived(now, worker, turn, asked.version - 1)
            yield GradientArrived(now, worker, turn, asked.version, samples=0)
            yield GradientArrived(now, worker, turn, asked.version, sq_norm=-1.0)
            yield GradientArrived(now, worker, turn, asked.version, sq_norm=nan)
            yield WorkAbandoned(now, worker, turn - 1)
        elif turn:
            yield WorkAbandoned(now, worker, turn)


@every_policy
def test_law_9_illegal_event_changes_nothing(policy):
    cluster = Cluster.of(policy, steps=12)
    for _ in random_steps(cluster, Random(9), 25):
        before = state_of(cluster.decider)
        for event in illegal_events(cluster):
            with pytest.raises(ProtocolError):
                cluster.decider.handle(event)
        assert view_of(cluster.decider) == before


@every_policy
def test_report_of_an_update_changes_no_decision_of_a_built_in_rule(policy):
    """Built-in rules ignore it, so shells leave it out."""
    cluster = Cluster.of(policy, steps=12)
    assert not cluster.decider.learns_from_updates
    for _ in random_steps(cluster, Random(11), 60):
        twin = cluster.fork()
        while twin.unreported:
            assert twin.report_update(sq_norm=3.0) == []
        assert view_of(twin.decider) == state_of(cluster.decider)


@every_policy
def test_duplicate_changes_nothing_but_the_time(policy):
    cluster = Cluster.of(policy)
    for _ in random_steps(cluster, Random(10), 25):
        before = state_of(cluster.decider)
        for worker in cluster.repeatable:
            actions = cluster.duplicate(worker, after=0.0)
            assert [type(action) for action in actions] == [Drop]
        assert view_of(cluster.decider) == before
