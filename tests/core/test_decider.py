# SPDX-License-Identifier: BSD-3-Clause
"""What the decider does under every rule: start and end, joins and deaths, illegal events."""

from math import inf, nan

import pytest

from fakes import Cluster, state_of, view_of
from paceline.core.decider import Decider, replay
from paceline.core.events import (
    Accept,
    ApplyUpdate,
    Cancel,
    Contribution,
    Drop,
    Event,
    Fate,
    Finish,
    GradientArrived,
    Pause,
    Resume,
    SendParams,
    StartTimer,
    StopRequested,
    TimerFired,
    UpdateApplied,
    WorkAbandoned,
    WorkerJoined,
    WorkerLeft,
)
from paceline.core.ledger import Tally
from paceline.core.policies import Backup
from paceline.core.policy import Policy
from paceline.errors import ProtocolError, SpecError
from paceline.spec import RunSpec


def kinds(actions):
    """Return the types of the actions, for tests that don't need the values."""
    return [type(action) for action in actions]


# ------------------------------------------------------------------------------------ beginning


def test_policy_that_cannot_run_with_the_spec_is_refused():
    with pytest.raises(SpecError, match="smaller than the number of workers"):
        Decider(Backup(3), RunSpec(workers=3))


def test_run_begins_when_enough_workers_for_an_update_have_joined(decide):
    decider = decide("sync", workers=2)
    assert decider.handle(WorkerJoined(0.0, 5)) == []
    assert decider.handle(WorkerJoined(1.0, 7)) == [
        Resume(),
        SendParams(5, turn=1, version=0),
        SendParams(7, turn=1, version=0),
    ]


@pytest.mark.parametrize(
    ("policy", "needed"),
    [
        ("sync", 3),
        ("backup:1", 2),
        ("backup:2", 1),
        ("batchsync:2", 2),
        ("batchsync:5", 3),
        ("deadline", 3),
        ("async", 1),
        ("softsync:2", 2),
        ("ssp:0", 1),
        ("delayed:1", 3),
    ],
)
def test_run_begins_with_as_many_workers_as_its_rule_needs(policy, needed):
    cluster = Cluster.of(policy, joined=False)
    for worker in range(needed - 1):
        assert cluster.join(worker) == []
    assert cluster.join(needed - 1)[0] == Resume()


def test_run_does_not_begin_below_min_workers():
    cluster = Cluster.of("async", joined=False, min_workers=2)
    assert cluster.join(0) == []
    assert cluster.join(1)[0] == Resume()


def test_worker_that_joined_and_died_counts_towards_the_beginning():
    cluster = Cluster.of("sync", joined=False)
    cluster.join(0)
    cluster.leave(0)
    cluster.join(1)
    assert cluster.join(2) == [Resume(), SendParams(1, 1, 0), SendParams(2, 1, 0)]


def test_worker_that_joined_twice_counts_once_towards_the_beginning():
    cluster = Cluster.of("sync", workers=2, joined=False)
    cluster.join(0)
    cluster.leave(0)
    assert cluster.join(0) == []
    assert cluster.join(1)[0] == Resume()


def test_run_begins_only_with_min_workers_alive():
    cluster = Cluster.of("sync", joined=False, min_workers=2)
    for worker in (0, 1):
        cluster.join(worker)
        cluster.leave(worker)
    assert cluster.join(2) == []
    assert cluster.join(0) == [Resume(), SendParams(2, 1, 0), SendParams(0, 1, 0)]


def test_worker_that_joins_after_the_beginning_gets_work_immediately():
    cluster = Cluster.of("backup:1", joined=False)
    cluster.join(0)
    cluster.join(1)
    assert cluster.join(2) == [SendParams(2, 1, 0)]


def test_list_of_joined_workers_is_cleared_when_the_run_begins():
    """The state of a run whose workers join and leave for weeks must not grow."""
    cluster = Cluster.of("sync", joined=False)
    cluster.join(0)
    assert cluster.decider.ledger.joined == {0}
    for worker in (1, 2, 3):
        cluster.join(worker)
    assert cluster.decider.ledger.joined == set()


# ---------------------------------------------------------------------------- joins and deaths


def test_worker_beyond_w_is_an_additional_backup():
    cluster = Cluster.of("sync", workers=2)
    assert cluster.join(2) == [SendParams(2, 1, 0)]
    cluster.arrive(2)
    assert cluster.arrive(1) == [
        Accept(1, 0, update=1),
        ApplyUpdate(1, (Contribution(2, 0, 1), Contribution(1, 0, 1)), (0.5, 0.5), (1.0, 1.0), 2),
        Cancel(0, turn=1),
        SendParams(2, 2, 1),
        SendParams(1, 2, 1),
    ]


def test_death_of_the_last_outstanding_worker_makes_the_update():
    cluster = Cluster.of("sync")
    cluster.arrive(0)
    cluster.arrive(1)
    actions = cluster.leave(2)
    assert kinds(actions) == [ApplyUpdate, SendParams, SendParams]
    assert (len(actions[0].contributions), actions[0].wanted) == (2, 3)


def test_contribution_of_a_worker_that_died_still_counts():
    cluster = Cluster.of("sync")
    cluster.arrive(0)
    assert cluster.leave(0) == []
    cluster.arrive(1)
    cluster.arrive(2)
    assert cluster.updates[0].contributions == tuple(Contribution(w, 0, 1) for w in range(3))


def test_worker_that_rejoins_during_an_update_does_not_count_twice():
    cluster = Cluster.of("sync")
    cluster.arrive(0)
    cluster.leave(0)
    assert cluster.join(0) == []
    cluster.arrive(1)
    cluster.arrive(2)
    assert [c.worker for c in cluster.updates[0].contributions] == [0, 1, 2]
    assert cluster.asked[0] == SendParams(0, turn=2, version=1)


def test_worker_that_rejoins_without_a_contribution_gets_work_again():
    cluster = Cluster.of("sync")
    cluster.arrive(0, finite=False)
    cluster.leave(0)
    cluster.leave(1)
    assert cluster.join(0) == [SendParams(0, 3, 0)]
    assert cluster.join(1) == [SendParams(1, 2, 0)]


@pytest.mark.parametrize("policy", ["sync", "async", "delayed:1", "ssp:0", "deadline:after=9"])
def test_report_from_before_a_death_is_a_duplicate(policy):
    """Turns keep counting when a worker rejoins, so an old turn can't be mistaken for a new one."""
    cluster = Cluster.of(policy)
    cluster.leave(1)
    old = GradientArrived(9.0, 1, turn=1, version=0)
    assert cluster.join(1) == [SendParams(1, turn=2, version=0)]
    assert cluster.handle(old) == [Drop(1, 0, Fate.DUPLICATE)]
    assert cluster.asked[1] == SendParams(1, turn=2, version=0), "its new work is as it was"
    assert cluster.arrive(1)[0] == Accept(1, 0, update=1)


def test_report_from_before_a_death_is_a_duplicate_even_without_new_work():
    cluster = Cluster.of("sync", min_workers=3)
    cluster.leave(2)
    cluster.leave(1)
    assert cluster.join(1) == []
    assert cluster.handle(GradientArrived(9.0, 1, 1, 0)) == [Drop(1, 0, Fate.DUPLICATE)]
    with pytest.raises(ProtocolError, match="has already reported this turn"):
        cluster.handle(WorkAbandoned(9.0, 1, 1))


def test_updates_take_n_again_when_workers_are_back():
    cluster = Cluster.of("backup:1", workers=4)
    cluster.leave(0)
    cluster.leave(1)
    cluster.run_until(2)
    assert [len(update.contributions) for update in cluster.updates] == [2, 2]
    cluster.join(0)
    cluster.join(1)
    cluster.run_until(4)
    assert [len(update.contributions) for update in cluster.updates[2:]] == [3, 3]
    assert {update.wanted for update in cluster.updates} == {3}


def test_one_departure_can_make_several_updates():
    cluster = Cluster.of("delayed:1")
    for worker in (0, 1, 0, 1):
        cluster.arrive(worker)
    assert kinds(cluster.leave(2)) == [ApplyUpdate, ApplyUpdate, SendParams, SendParams]


# ------------------------------------------------------------------------------ pause, resume


def test_run_pauses_below_min_workers_and_says_what_it_waits_for():
    cluster = Cluster.of("async", min_workers=2)
    assert cluster.leave(0) == []
    assert cluster.leave(1) == [Pause("1 of at least 2 workers; waits for 1")]
    assert cluster.leave(2) == []


def test_run_without_workers_pauses():
    cluster = Cluster.of("sync", workers=1)
    assert cluster.leave(0) == [Pause("0 of at least 1 workers; waits for 1")]
    assert cluster.join(0) == [Resume(), SendParams(0, 2, 0)]


def test_gradients_are_kept_in_a_pause_but_no_work_is_assigned():
    cluster = Cluster.of("sync", min_workers=3)
    cluster.leave(2)
    assert cluster.arrive(0) == [Accept(0, 0, update=1)]
    assert cluster.arrive(1, finite=False) == [Drop(1, 0, Fate.NON_FINITE)]
    assert cluster.version == 0, "no worker is outstanding, but the update needs two more"
    assert cluster.join(2) == [Resume(), SendParams(1, 2, 0), SendParams(2, 2, 0)]


def test_complete_update_is_made_in_a_pause():
    """So `async` still makes one update of each gradient, and not one of several."""
    cluster = Cluster.of("async", min_workers=3)
    cluster.leave(2)
    for update, worker in enumerate((1, 0), start=1):
        assert cluster.arrive(worker) == [
            Accept(worker, 0, update),
            ApplyUpdate(update, (Contribution(worker, 0, 1),), (1.0,), (1.0,), 1),
        ]
    assert cluster.join(2) == [
        Resume(),
        SendParams(1, 2, 2),
        SendParams(0, 2, 2),
        SendParams(2, 2, 2),
    ]


def test_update_in_a_pause_cancels_useless_work():
    cluster = Cluster.of("backup:2", workers=4, min_workers=4)
    cluster.arrive(3)
    assert kinds(cluster.leave(3)) == [Pause]
    assert cluster.arrive(1) == [
        Accept(1, 0, update=1),
        ApplyUpdate(1, (Contribution(3, 0, 1), Contribution(1, 0, 1)), (0.5, 0.5), (1.0, 1.0), 2),
        Cancel(0, turn=1),
        Cancel(2, turn=1),
    ]


def test_last_update_ends_the_run_even_in_a_pause():
    cluster = Cluster.of("async", min_workers=3, steps=1)
    cluster.leave(2)
    assert kinds(cluster.arrive(0)) == [Accept, ApplyUpdate, Cancel, Finish]


def test_no_timer_is_started_in_a_pause():
    cluster = Cluster.of("deadline:after=2", workers=2, min_workers=2)
    cluster.leave(0)
    cluster.join(0)
    cluster.arrive(1)
    assert kinds(cluster.leave(1)) == [Pause]
    assert kinds(cluster.arrive(0)) == [Accept, ApplyUpdate]
    assert kinds(cluster.join(1)) == [Resume, StartTimer, SendParams, SendParams]


def test_run_resumes_with_min_workers():
    cluster = Cluster.of("sync", min_workers=2)
    cluster.leave(0)
    cluster.leave(1)
    cluster.arrive(2)
    assert cluster.join(0) == [Resume(), SendParams(0, 2, 0)]
    assert kinds(cluster.arrive(0)) == [Accept, ApplyUpdate, SendParams, SendParams]


def test_contribution_from_before_a_pause_is_used_after_it():
    """The worker has already contributed, so no member is outstanding."""
    cluster = Cluster.of("sync")
    cluster.arrive(0)
    for worker in range(3):
        cluster.leave(worker)
    actions = cluster.join(0)
    assert kinds(actions) == [Resume, ApplyUpdate, SendParams]
    assert actions[-1] == SendParams(0, 2, 1)


# ------------------------------------------------------------------------------ the last update


def test_last_update_ends_the_run_and_cancels_work_in_progress():
    cluster = Cluster.of("backup:1", steps=1)
    cluster.arrive(0)
    assert cluster.arrive(1)[2:] == [Cancel(2, turn=1), Finish(1)]


def test_reports_after_the_end_are_late_and_no_work_is_assigned():
    cluster = Cluster.of("backup:2", steps=1)
    cluster.arrive(0)
    assert cluster.arrive(1) == [Drop(1, 0, Fate.LATE)]
    assert cluster.abandon(2) == [Drop(2, 0, Fate.CANCELLED)]
    assert cluster.duplicate(1) == [Drop(1, 0, Fate.DUPLICATE)]
    assert cluster.leave(0) == []
    assert cluster.join(0) == []
    assert cluster.stop() == []


def test_non_finite_gradient_after_the_end_keeps_its_fate():
    cluster = Cluster.of("backup:2", steps=1)
    cluster.arrive(0)
    assert cluster.arrive(1, finite=False) == [Drop(1, 0, Fate.NON_FINITE)]


def test_end_cancels_work_even_under_a_rule_that_keeps_all():
    cluster = Cluster.of("async", steps=1)
    assert cluster.arrive(1)[2:] == [Cancel(0, 1), Cancel(2, 1), Finish(1)]


def test_no_work_is_assigned_for_updates_after_the_last():
    cluster = Cluster.of("delayed:2", steps=2)
    cluster.arrive(0)
    assert cluster.arrive(0) == [Accept(0, 0, update=2)]
    cluster.run_until(2)
    assert cluster.finish == Finish(2)


def test_run_ends_when_it_has_used_its_samples():
    cluster = Cluster.of("sync", workers=2, samples=10)
    for worker in (0, 1, 0):
        cluster.arrive(worker, samples=3)
    assert kinds(cluster.arrive(1, samples=1)) == [Accept, ApplyUpdate, Finish]
    assert cluster.decider.ledger.samples == 10


def test_samples_that_two_optimizers_use_count_once():
    cluster = Cluster.of("sync", workers=1, samples=6)
    for turn, new in [(1, 3), (2, 0), (3, 2), (4, 0)]:
        arrived = GradientArrived(float(turn), 0, turn, turn - 1, samples=3, new_samples=new)
        accept, made, _ = cluster.handle(arrived)
        assert (accept.samples, made.weights, made.new_samples) == (3, (1.0,), new)
    assert cluster.decider.ledger.samples == 5
    last = GradientArrived(5.0, 0, 5, 4, samples=3, new_samples=1)
    assert kinds(cluster.handle(last)) == [Accept, ApplyUpdate, Finish]


def test_pending_update_is_made_when_the_samples_are_used():
    """Worker 0 has already contributed to update 2, so the run ends with that."""
    cluster = Cluster.of("delayed:1", workers=2, samples=2)
    for worker in (0, 0, 1):
        cluster.arrive(worker)
    assert (cluster.version, cluster.finish) == (1, None)
    assert kinds(cluster.arrive(1)) == [Accept, ApplyUpdate, Finish]
    assert cluster.version == 2


def test_run_without_steps_does_not_end():
    cluster = Cluster.of("sync")
    cluster.run_until(20)
    assert cluster.finish is None


# ------------------------------------------------------------------------------- StopRequested


@pytest.mark.parametrize("present", [0, 1, 2])
def test_run_that_is_stopped_before_it_begins_ends_immediately(present):
    cluster = Cluster.of("sync", joined=False)
    for worker in range(present):
        cluster.join(worker)
    assert cluster.stop() == [Finish(0)]


def test_stop_without_pending_contributions_ends_the_run():
    cluster = Cluster.of("sync", workers=2)
    assert cluster.stop() == [Cancel(0, 1), Cancel(1, 1), Finish(0)]


def test_non_finite_gradient_is_not_a_pending_contribution():
    cluster = Cluster.of("sync", workers=2)
    cluster.arrive(0, finite=False)
    assert cluster.stop() == [Cancel(0, 2), Cancel(1, 1), Finish(0)]


def test_pending_update_is_made_before_the_end():
    cluster = Cluster.of("sync", workers=2)
    cluster.arrive(0)
    assert cluster.stop() == []
    assert kinds(cluster.arrive(1)) == [Accept, ApplyUpdate, Finish]


def test_stop_at_once_ends_the_run_without_the_pending_update():
    cluster = Cluster.of("sync", workers=2)
    cluster.run_until(3)
    cluster.arrive(0)
    stop = StopRequested(cluster.now, at_once=True)
    assert cluster.handle(stop) == [Cancel(1, 4), Finish(3, (Contribution(0, 3, 1),))]


def test_work_for_a_pending_update_continues_after_a_stop():
    cluster = Cluster.of("softsync:4", workers=1)
    cluster.arrive(0)
    cluster.stop()
    assert cluster.arrive(0) == [Accept(0, 0, 1), SendParams(0, 3, 0)]
    cluster.run_until(1)
    assert cluster.finish == Finish(1)


def test_abandoned_work_for_a_pending_update_is_assigned_again_after_a_stop():
    cluster = Cluster.of("sync", workers=2)
    cluster.arrive(0)
    cluster.stop()
    assert cluster.abandon(1) == [Drop(1, 0, Fate.CANCELLED), SendParams(1, 2, 0)]


def test_all_pending_updates_are_made_before_the_end():
    cluster = Cluster.of("delayed:1", workers=2)
    cluster.arrive(0)
    cluster.arrive(0)
    assert cluster.stop() == []
    cluster.arrive(1)
    assert kinds(cluster.arrive(1)) == [Accept, ApplyUpdate, Finish]
    assert cluster.finish == Finish(2)


def test_stop_never_makes_a_run_longer():
    cluster = Cluster.of("delayed:1", workers=2, steps=1)
    cluster.arrive(0)
    cluster.stop()
    cluster.arrive(1)
    assert cluster.finish == Finish(1)


def test_second_stop_changes_nothing():
    cluster = Cluster.of("sync", workers=2)
    cluster.arrive(0)
    cluster.stop()
    before = state_of(cluster.decider)
    before[0].now = cluster.now + 1
    assert cluster.stop() == []
    assert view_of(cluster.decider) == before


def test_stop_in_a_pause_ends_the_run_and_lists_unused_contributions():
    cluster = Cluster.of("sync", min_workers=3)
    cluster.arrive(0, samples=7)
    cluster.leave(2)
    assert cluster.stop() == [Cancel(1, 1), Finish(0, unused=(Contribution(0, 0, 7),))]


def test_pause_after_a_stop_ends_the_run():
    cluster = Cluster.of("sync", min_workers=3)
    cluster.arrive(0)
    cluster.stop()
    actions = cluster.leave(2)
    assert kinds(actions) == [Cancel, Finish], "a run that ends does not wait"
    assert actions[-1].unused == (Contribution(0, 0, 1),)


def test_no_contributions_are_pending_after_the_end():
    cluster = Cluster.of("delayed:1", min_workers=3)
    cluster.run_until(2)
    cluster.arrive(0)
    cluster.leave(2)
    cluster.stop()
    assert cluster.finish.unused
    assert cluster.decider.ledger.tallies == {3: Tally()}


def test_stop_in_a_pause_ends_the_run_after_the_complete_updates():
    """Worker 1 contributed to update 1 before it died, so worker 2 completes only that."""
    cluster = Cluster.of("delayed:1", min_workers=3)
    for worker in (0, 0, 1):
        cluster.arrive(worker)
    cluster.leave(1)
    assert kinds(cluster.arrive(2)) == [Accept, ApplyUpdate]
    assert cluster.stop() == [Finish(1, unused=(Contribution(0, 0, 1),))]


def test_unused_contributions_are_listed_by_update():
    cluster = Cluster.of("delayed:1", min_workers=3)
    cluster.arrive(0, samples=2)
    cluster.arrive(0, samples=5)
    cluster.arrive(1, samples=3)
    cluster.leave(2)
    unused = (Contribution(0, 0, 2), Contribution(1, 0, 3), Contribution(0, 0, 5))
    assert cluster.stop()[-1] == Finish(0, unused)


def test_death_of_the_last_outstanding_worker_ends_a_stopping_run():
    cluster = Cluster.of("sync")
    cluster.arrive(0)
    cluster.arrive(1)
    cluster.stop()
    assert kinds(cluster.leave(2)) == [ApplyUpdate, Finish]


def test_gradient_for_an_update_after_the_last_is_not_accepted():
    """An accepted gradient must go into an update, and this one can't."""
    cluster = Cluster.of("delayed:1", workers=2)
    cluster.arrive(0)  # for update 1; it goes on with update 2
    cluster.stop()  # update 1 is the last
    assert not cluster.decider.would_accept(0)
    assert not any(isinstance(action, Accept) for action in cluster.arrive(0))


# ------------------------------------------------------------------------ non-finite gradients


def test_non_finite_gradient_is_refused_and_the_update_is_made_without_it():
    cluster = Cluster.of("sync")
    assert cluster.arrive(0, finite=False) == [Drop(0, 0, Fate.NON_FINITE), SendParams(0, 2, 0)]
    cluster.arrive(1)
    cluster.arrive(2)
    [update] = cluster.updates
    assert [c.worker for c in update.contributions] == [1, 2]
    assert (update.weights, update.wanted) == ((0.5, 0.5), 3)


def test_retry_after_a_non_finite_gradient_can_still_count():
    cluster = Cluster.of("sync")
    cluster.arrive(0, finite=False)
    cluster.arrive(1)
    assert cluster.arrive(0) == [Accept(0, 0, update=1)]
    cluster.arrive(2)
    assert [c.worker for c in cluster.updates[0].contributions] == [1, 0, 2]


def test_non_finite_gradient_of_the_last_outstanding_worker_makes_the_update():
    cluster = Cluster.of("sync", workers=2)
    cluster.arrive(0)
    assert cluster.arrive(1, finite=False) == [
        Drop(1, 0, Fate.NON_FINITE),
        ApplyUpdate(1, (Contribution(0, 0, 1),), (1.0,), (1.0,), wanted=2),
        SendParams(0, 2, 1),
        SendParams(1, 2, 1),
    ]


def test_all_workers_retry_if_every_gradient_is_non_finite():
    cluster = Cluster.of("sync")
    for turn in (2, 3):
        for worker in range(3):
            assert cluster.arrive(worker, finite=False) == [
                Drop(worker, 0, Fate.NON_FINITE),
                SendParams(worker, turn, 0),
            ]
    assert kinds(cluster.arrive(1)) == [Accept, ApplyUpdate, Cancel, Cancel, SendParams]


def test_excused_workers_continue_when_the_only_outstanding_worker_dies():
    cluster = Cluster.of("sync", workers=2)
    cluster.arrive(0, finite=False)
    assert cluster.leave(1) == []
    assert cluster.working == [0]
    assert kinds(cluster.arrive(0)) == [Accept, ApplyUpdate, SendParams]


def test_non_finite_gradient_does_not_count_towards_n():
    """The update waits for as many finite gradients as it needs, as long as one may still come."""
    cluster = Cluster.of("backup:1")
    cluster.arrive(0, finite=False)
    assert cluster.arrive(1) == [Accept(1, 0, update=1)]
    assert kinds(cluster.arrive(2)) == [Accept, ApplyUpdate, Cancel, SendParams, SendParams]
    assert [c.worker for c in cluster.updates[0].contributions] == [1, 2]


def test_excused_worker_that_abandons_its_retry_stays_excused():
    cluster = Cluster.of("sync", workers=2)
    cluster.arrive(0, finite=False)
    assert cluster.abandon(0) == [Drop(0, 0, Fate.CANCELLED), SendParams(0, 3, 0)]
    assert kinds(cluster.arrive(1)) == [Accept, ApplyUpdate, Cancel, SendParams]


def test_death_of_an_excused_worker_changes_nothing():
    cluster = Cluster.of("sync")
    cluster.arrive(0, finite=False)
    cluster.arrive(1)
    assert cluster.leave(0) == []
    assert cluster.decider.ledger.outstanding() == 1
    assert kinds(cluster.arrive(2)) == [Accept, ApplyUpdate, SendParams, SendParams]


def test_worker_with_a_finite_contribution_is_not_excused_under_a_rule_that_repeats():
    cluster = Cluster.of("batchsync:3", workers=2)
    cluster.arrive(0)
    assert cluster.arrive(0, finite=False) == [Drop(0, 0, Fate.NON_FINITE), SendParams(0, 3, 0)]
    tally = cluster.decider.ledger.next_tally
    assert (tally.done, tally.excused) == ({0}, set())
    cluster.arrive(1, finite=False)
    assert (tally.done, tally.excused) == ({0}, {1})
    cluster.arrive(1)
    assert (tally.done, tally.excused) == ({0, 1}, set())


def test_worker_that_rejoins_after_a_non_finite_gradient_can_contribute():
    """Full synchronous training waits for worker 1, which is a member and busy."""
    cluster = Cluster.of("sync", workers=2)
    cluster.arrive(0, finite=False)
    cluster.leave(0)
    cluster.join(0)
    assert cluster.arrive(0) == [Accept(0, 0, update=1)]
    cluster.arrive(1)
    assert [c.worker for c in cluster.updates[0].contributions] == [0, 1]


def test_update_waits_for_a_worker_that_rejoined_after_a_non_finite_gradient():
    """It is a member and busy, as worker 1 was."""
    cluster = Cluster.of("sync", workers=2)
    cluster.arrive(0, finite=False)
    cluster.leave(0)
    cluster.join(0)
    assert cluster.arrive(1) == [Accept(1, 0, update=1)]
    cluster.arrive(0)
    assert [c.worker for c in cluster.updates[0].contributions] == [1, 0]


@pytest.mark.parametrize(
    "policy", ["sync", "backup:1", "batchsync:2", "async", "softsync:2", "ssp:1", "delayed:1"]
)
def test_every_rule_assigns_work_again_after_a_non_finite_gradient(policy):
    cluster = Cluster.of(policy)
    assert cluster.arrive(0, finite=False) == [Drop(0, 0, Fate.NON_FINITE), SendParams(0, 2, 0)]


def test_late_non_finite_gradient_does_not_excuse_the_worker_from_the_next_update():
    cluster = Cluster.of("backup:1")
    cluster.arrive(0)
    cluster.arrive(1)
    assert cluster.arrive(2, finite=False) == [Drop(2, 0, Fate.NON_FINITE), SendParams(2, 2, 1)]
    assert cluster.decider.ledger.outstanding() == 3


def test_delayed_update_with_only_non_finite_gradients_is_computed_again():
    """No worker continues with a later update before it has contributed to this one."""
    cluster = Cluster.of("delayed:1", workers=2)
    assert cluster.arrive(0, finite=False) == [Drop(0, 0, Fate.NON_FINITE), SendParams(0, 2, 0)]
    assert cluster.arrive(1, finite=False) == [Drop(1, 0, Fate.NON_FINITE), SendParams(1, 2, 0)]
    assert cluster.arrive(0) == [
        Accept(0, 0, update=1),
        ApplyUpdate(1, (Contribution(0, 0, 1),), (1.0,), (1.0,), wanted=2),
        Cancel(1, turn=2),
        SendParams(0, 3, 0),
    ]


# ---------------------------------------------------------------------------------- duplicates


@pytest.mark.parametrize("policy", ["sync", "backup:1", "async", "deadline", "delayed:1"])
@pytest.mark.parametrize("idle", [True, False])
def test_duplicate_is_dropped_and_changes_only_the_time(policy, idle):
    cluster = Cluster.of(policy)
    cluster.arrive(0)
    if not idle:
        cluster.run_until(1)
    before = state_of(cluster.decider)
    before[0].now = cluster.now + 1
    version = cluster.turns[0][0]
    actions = cluster.handle(GradientArrived(cluster.now + 1, 0, turn=1, version=version))
    assert actions == [Drop(0, version, Fate.DUPLICATE)]
    assert view_of(cluster.decider) == before


def test_gradient_of_an_abandoned_turn_is_a_duplicate():
    cluster = Cluster.of("sync")
    cluster.abandon(0)
    assert cluster.handle(GradientArrived(9.0, 0, 1, 0)) == [Drop(0, 0, Fate.DUPLICATE)]


def test_abandoned_work_is_assigned_again():
    cluster = Cluster.of("sync")
    assert cluster.abandon(0) == [Drop(0, 0, Fate.CANCELLED), SendParams(0, 2, 0)]


# ------------------------------------------------------------------------------- illegal events

EARLY = 2.0  # the decider under test has seen this time
ILLEGAL = {
    "joins twice": (WorkerJoined(3.0, 0), "worker 0 has already joined"),
    "a stranger leaves": (WorkerLeft(3.0, 9), "has not joined"),
    "a stranger's gradient": (GradientArrived(3.0, 9, 1, 0), "has not joined"),
    "turn zero": (GradientArrived(3.0, 1, 0, 0), "has had 1 turns"),
    "turn below zero": (GradientArrived(3.0, 1, -1, 0), "has had 1 turns"),
    "a turn to come": (GradientArrived(3.0, 1, 2, 0), "has had 1 turns"),
    "a version to come": (GradientArrived(3.0, 1, 1, 1), "asked for version 0"),
    "a version below zero": (GradientArrived(3.0, 1, 1, -1), "asked for version 0"),
    "no samples": (GradientArrived(3.0, 1, 1, 0, samples=0), "samples must be >= 1"),
    "samples below zero": (GradientArrived(3.0, 1, 1, 0, samples=-3), "samples must be >= 1"),
    "a duplicate without samples": (GradientArrived(3.0, 0, 1, 0, samples=0), "samples must be"),
    "new samples below zero": (
        GradientArrived(3.0, 1, 1, 0, samples=2, new_samples=-1),
        "new_samples must be between 0 and samples",
    ),
    "more new samples than samples": (
        GradientArrived(3.0, 1, 1, 0, samples=2, new_samples=3),
        "new_samples must be between 0 and samples",
    ),
    "an unknown worker abandons work": (WorkAbandoned(3.0, 9, 1), "has not joined"),
    "abandons turn zero": (WorkAbandoned(3.0, 1, 0), "has had 1 turns"),
    "abandons a future turn": (WorkAbandoned(3.0, 1, 2), "has had 1 turns"),
    "abandons a reported turn": (WorkAbandoned(3.0, 0, 1), "has already reported this turn"),
    "a timer that was never started": (TimerFired(3.0, 2), "no timer with this number"),
    "a bare event": (Event(3.0), "expected an event"),
    "an action": (SendParams(0, 1, 0), "expected an event"),
    "nothing": (None, "expected an event"),
    "joins in the past": (WorkerJoined(1.0, 3), "time must be finite and not before"),
    "leaves in the past": (WorkerLeft(1.0, 0), "time must be finite and not before"),
    "a gradient in the past": (GradientArrived(1.0, 1, 1, 0), "time must be finite and not before"),
    "abandons in the past": (WorkAbandoned(1.0, 1, 1), "time must be finite and not before"),
    "a timer in the past": (TimerFired(1.0, 1), "time must be finite and not before"),
    "a stop in the past": (StopRequested(1.0), "time must be finite and not before"),
    "joins at no time": (WorkerJoined(nan, 3), "time must be finite and not before"),
    "leaves at no time": (WorkerLeft(nan, 0), "time must be finite and not before"),
    "a gradient at no time": (GradientArrived(nan, 1, 1, 0), "time must be finite and not before"),
    "abandons at no time": (WorkAbandoned(nan, 1, 1), "time must be finite and not before"),
    "a timer at no time": (TimerFired(nan, 1), "time must be finite and not before"),
    "a stop at no time": (StopRequested(nan), "time must be finite and not before"),
    "joins at the end of time": (WorkerJoined(inf, 3), "time"),
    "a stop at the end of time": (StopRequested(inf), "time"),
}


@pytest.mark.parametrize("policy", ["sync", "deadline:after=9", "delayed:1"])
@pytest.mark.parametrize("case", ILLEGAL)
def test_illegal_event_is_refused_and_changes_nothing(decide, policy, case):
    event, complaint = ILLEGAL[case]
    decider, twin = decide(policy), decide(policy)
    beginning = [WorkerJoined(0.0, worker) for worker in range(3)]
    beginning += [GradientArrived(EARLY, 0, 1, 0)]
    for each in beginning:
        assert decider.handle(each) == twin.handle(each)
    before = state_of(decider)
    with pytest.raises(ProtocolError, match=complaint):
        decider.handle(event)
    assert view_of(decider) == before
    nxt = GradientArrived(4.0, 1, 1, 0)
    assert decider.handle(nxt) == twin.handle(nxt)


def test_error_shows_the_refused_event():
    event = WorkerLeft(1.0, 9, "killed")
    with pytest.raises(ProtocolError) as error:
        Cluster.of("sync").handle(event)
    assert repr(event) in str(error.value)


def test_events_may_have_the_same_time(decide):
    decider = decide("sync", workers=1)
    decider.handle(WorkerJoined(1.0, 0))
    assert kinds(decider.handle(GradientArrived(1.0, 0, 1, 0))) == [Accept, ApplyUpdate, SendParams]


def test_negative_time_is_refused(decide):
    with pytest.raises(ProtocolError, match="time must be finite and not before"):
        decide("sync").handle(WorkerJoined(-1.0, 0))


def test_timers_are_numbered_through_the_whole_run():
    cluster = Cluster.of("deadline:after=5", workers=1)
    cluster.arrive(0)
    cluster.leave(0)
    assert cluster.join(0)[1] == StartTimer(3, at=cluster.now + 5), "again for update 2"
    assert cluster.arrive(0)[2] == StartTimer(4, at=cluster.now + 5)


def test_outdated_timer_has_no_effect():
    cluster = Cluster.of("deadline:after=5", workers=1)
    cluster.arrive(0)
    assert cluster.fire(1) == []
    assert not cluster.decider.ledger.overdue


def test_timer_that_fires_twice_has_no_further_effect():
    cluster = Cluster.of("deadline:after=5", workers=2)
    cluster.fire(1)
    before = state_of(cluster.decider)
    assert cluster.handle(TimerFired(cluster.now, 1)) == []
    assert view_of(cluster.decider) == before


def test_timer_that_fires_early_counts():
    """The clock belongs to the shell, so the core trusts it."""
    cluster = Cluster.of("deadline:after=5", workers=2)
    cluster.arrive(0)
    assert kinds(cluster.handle(TimerFired(2.0, 1)))[:2] == [ApplyUpdate, Cancel]


def test_timer_from_before_a_pause_has_no_effect_after_it():
    """The rule hasn't learned enough to start a new one."""
    cluster = Cluster.of("deadline:n_min=2", workers=4, min_workers=3)
    cluster.arrive(0)
    cluster.arrive(1)
    assert cluster.due == [1]
    cluster.leave(3, after=0.25)
    cluster.leave(2, after=0.25)
    cluster.join(3, after=0.25)
    [again] = cluster.due
    assert again == 2
    assert cluster.fire(1) == []
    assert not cluster.decider.ledger.overdue


def test_timer_from_before_a_pause_has_no_effect_even_without_a_new_one():
    cluster = Cluster.of("deadline", workers=2)
    cluster.arrive(0)
    cluster.fire(1)
    cluster.leave(0)
    cluster.leave(1)
    cluster.join(0)
    ledger = cluster.decider.ledger
    assert (ledger.timer, ledger.timer_runs, ledger.overdue) == (1, False, False)
    assert cluster.handle(TimerFired(cluster.now, 1)) == []
    assert not ledger.overdue


# ------------------------------------------------------------------------------- would_accept


def test_would_accept_says_whether_work_in_progress_would_count():
    cluster = Cluster.of("backup:1", steps=2)
    decider = cluster.decider
    assert decider.would_accept(2)
    cluster.arrive(0)
    assert not decider.would_accept(0), "it waits"
    cluster.arrive(1)
    assert not decider.would_accept(2), "its update was made without it"
    assert decider.would_accept(0), "it works on the next"
    assert not decider.would_accept(9), "it is not here"
    cluster.run_until(2)
    assert not any(decider.would_accept(worker) for worker in range(3)), "the run has ended"


@pytest.mark.parametrize("policy", ["backup:1", "async:bound=1", "deadline:after=2", "batchsync:2"])
def test_would_accept_does_not_change_the_state(policy):
    cluster = Cluster.of(policy)
    cluster.arrive(0)
    before = state_of(cluster.decider)
    for worker in range(4):
        cluster.decider.would_accept(worker)
    assert view_of(cluster.decider) == before


# ------------------------------------------------------------------------------------- replay


def test_replay_returns_the_actions_of_each_event():
    cluster = Cluster.of("backup:1")
    cluster.run_until(3)
    spec = cluster.decider.ledger.spec
    assert replay(cluster.decider.policy, spec, cluster.events) == cluster.actions


def test_replay_refuses_illegal_events():
    events = [WorkerJoined(0.0, 0), GradientArrived(1.0, 0, 1, 0)]
    with pytest.raises(ProtocolError, match="has had 0 turns"):
        replay(Backup(0), RunSpec(workers=2), events)


# ------------------------------------------------------------- what a rule learns about updates


class Doubting(Policy):
    """Takes two contributions an update, and only one after an update with a small norm."""

    name = "doubting"

    def fresh_memory(self, spec):
        return []

    def observe_update(self, ledger, made, sq_norm):
        ledger.memory.append((made, sq_norm))

    def needed(self, ledger):
        is_small = ledger.memory and (ledger.memory[-1][1] or inf) < 1.0
        return 1 if is_small else 2


def test_policy_hears_of_each_update_with_its_contributions_and_norms():
    cluster = Cluster.of(Doubting())
    cluster.handle(GradientArrived(1.0, 0, 1, 0, samples=3, sq_norm=2.0))
    [accepted, made, *_] = cluster.handle(GradientArrived(1.0, 1, 1, 0))
    assert isinstance(accepted, Accept)
    assert cluster.decider.ledger.memory == []
    assert cluster.decider.ledger.applying == {1: made}
    cluster.report_update(sq_norm=5.0)
    assert cluster.decider.ledger.memory == [(made, 5.0)]
    assert cluster.decider.ledger.applying == {}
    given = (Contribution(0, 0, 3, sq_norm=2.0), Contribution(1, 0, 1))
    assert made.contributions == given


def test_report_of_an_update_can_make_the_next_one_due():
    """The rule needs fewer contributions once it has seen the norm."""
    cluster = Cluster.of(Doubting(), workers=2)
    cluster.arrive(0)
    cluster.arrive(1)
    cluster.arrive(0)
    assert cluster.version == 1
    assert kinds(cluster.report_update(sq_norm=0.5)) == [ApplyUpdate, Cancel, SendParams]
    assert cluster.version == 2


def test_updates_are_reported_in_order_and_once():
    cluster = Cluster.of(Doubting(), workers=1)
    cluster.arrive(0)
    cluster.arrive(0)
    for update in (0, 2, 3):
        with pytest.raises(ProtocolError, match="the next update to be reported is 1"):
            cluster.decider.handle(UpdateApplied(cluster.now, update))
    assert [cluster.report_update(), cluster.report_update(sq_norm=0.0)] == [[], []]
    with pytest.raises(ProtocolError, match="the next update to be reported is None"):
        cluster.decider.handle(UpdateApplied(cluster.now, 2))


def test_last_update_is_reported_after_the_end():
    cluster = Cluster.of("sync", workers=1, steps=1)
    assert kinds(cluster.arrive(0)) == [Accept, ApplyUpdate, Finish]
    assert cluster.report_update() == []


@pytest.mark.parametrize("sq_norm", [-1.0, nan, inf])
def test_invalid_norm_is_refused(sq_norm):
    cluster = Cluster.of(Doubting(), workers=1)
    with pytest.raises(ProtocolError, match="sq_norm must be >= 0 and finite"):
        cluster.decider.handle(GradientArrived(1.0, 0, 1, 0, sq_norm=sq_norm))
    cluster.arrive(0)
    with pytest.raises(ProtocolError, match="sq_norm must be >= 0 and finite"):
        cluster.decider.handle(UpdateApplied(1.0, 1, sq_norm))
    assert cluster.decider.ledger.applying.keys() == {1}
