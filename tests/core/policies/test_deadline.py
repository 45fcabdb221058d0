# SPDX-License-Identifier: BSD-3-Clause
"""The deadline: an update takes what has arrived when a learned time has passed."""

from math import inf, nan

import pytest

from fakes import Cluster, make_decider
from paceline.core.events import (
    Accept,
    ApplyUpdate,
    Cancel,
    Contribution,
    Drop,
    Fate,
    GradientArrived,
    Pause,
    Resume,
    SendParams,
    StartTimer,
    TimerFired,
    WorkAbandoned,
    WorkerJoined,
)
from paceline.core.policies import Deadline
from paceline.core.policies.deadline import REMEMBERED_TURNS, SLACK
from paceline.errors import SpecError


def learned_timer(timer, opened_at, took_s):
    """Return the timer of an update that waits for answers of this length."""
    return StartTimer(timer, at=pytest.approx(opened_at + SLACK * took_s))


def started(actions):
    """Return the timers among the actions."""
    return [action for action in actions if isinstance(action, StartTimer)]


# ------------------------------------------------------------------------------------ learning


def test_first_update_waits_twice_as_long_as_its_first_n_min_took(decide):
    decider = decide("deadline:0.5", workers=2)
    decider.handle(WorkerJoined(10.0, 0))
    assert decider.handle(WorkerJoined(10.0, 1)) == [
        Resume(),
        SendParams(0, turn=1, version=0),
        SendParams(1, turn=1, version=0),
    ]
    assert decider.handle(GradientArrived(11.0, 0, 1, 0)) == [
        Accept(0, 0, update=1),
        StartTimer(1, at=12.0),
    ]
    assert decider.handle(TimerFired(12.0, 1)) == [
        ApplyUpdate(1, (Contribution(0, 0, 1),), (1.0,), (1.0,), 2),
        Cancel(1, turn=1),
        SendParams(0, turn=2, version=1),
    ]


def test_wait_is_the_q_quantile_of_past_answers():
    """Answers of 1, 2, 3 and 4 seconds: half have arrived after 2, plus a tenth for equal ones."""
    cluster = Cluster.of("deadline:0.5", workers=4)
    for worker in range(3):
        cluster.arrive(worker)
    assert started(cluster.arrive(3)) == [StartTimer(2, at=pytest.approx(4.0 + 2.0 + 0.2))]


@pytest.mark.parametrize(("q", "took_s"), [(0.25, 1), (0.26, 2), (0.75, 3), (0.9, 4), (1.0, 4)])
def test_q_is_rounded_up_to_whole_answers(q, took_s):
    cluster = Cluster.of(Deadline(q), workers=4)
    for worker in range(3):
        cluster.arrive(worker)
    assert started(cluster.arrive(3)) == [learned_timer(2, opened_at=4.0, took_s=took_s)]


def test_update_is_made_immediately_when_all_have_arrived():
    cluster = Cluster.of("deadline:after=60", workers=2)
    cluster.arrive(0)
    assert [type(action) for action in cluster.arrive(1)][:2] == [Accept, ApplyUpdate]


def test_update_is_made_immediately_when_all_alive_workers_have_arrived():
    cluster = Cluster.of("deadline:after=60")
    cluster.leave(2)
    cluster.arrive(0)
    cluster.arrive(1)
    assert cluster.version == 1


def test_rule_learns_from_the_answers_of_late_workers():
    """So the wait grows when the workers have become slower."""
    cluster = Cluster.of("deadline:1.0", workers=2)
    cluster.arrive(0)  # took 1
    assert started(cluster.arrive(1)) == [learned_timer(2, opened_at=2.0, took_s=2.0)]
    cluster.arrive(0)
    cluster.fire(2)
    assert cluster.arrive(1, after=6.0) == [Drop(1, 1, Fate.LATE), SendParams(1, 3, 2)]
    took_s = cluster.now - 2.0
    cluster.run_until(3)
    assert cluster.timers[4] == pytest.approx(cluster.now + SLACK * took_s)


def test_old_answers_are_forgotten():
    cluster = Cluster.of("deadline:1.0", workers=1)
    cluster.arrive(0, after=10.0)
    for _ in range(REMEMBERED_TURNS - 1):
        assert started(cluster.arrive(0))[0].at == pytest.approx(cluster.now + SLACK * 10.0)
    assert started(cluster.arrive(0))[0].at == pytest.approx(cluster.now + SLACK * 1.0)


# ----------------------------------------------------------------------------------- censoring


def cut_short(q):
    """Worker 0 answered after 1 s; worker 1 was cancelled and abandoned its work after 2.5 s."""
    decider = make_decider(Deadline(q), workers=2)
    for worker in range(2):
        decider.handle(WorkerJoined(0.0, worker))
    decider.handle(GradientArrived(1.0, 0, 1, 0))
    assert Cancel(1, turn=1) in decider.handle(TimerFired(2.0, 1))
    return decider.handle(WorkAbandoned(2.5, 1, 1))


def test_cancelled_answer_counts_as_longer_than_all_others():
    """The faster half of the answers is known: one second after the opening at 2."""
    assert cut_short(0.5) == [
        Drop(1, 0, Fate.CANCELLED),
        learned_timer(2, opened_at=2.0, took_s=1.0),
        SendParams(1, turn=2, version=1),
    ]


def test_unknown_quantile_is_replaced_by_twice_the_longest_complete_answer():
    """Worker 0 answered after 1 s; that worker 1 computed for 2.5 s doesn't extend the wait."""
    assert cut_short(1.0) == [
        Drop(1, 0, Fate.CANCELLED),
        StartTimer(2, at=2.0 + 2 * 1.0),
        SendParams(1, turn=2, version=1),
    ]


@pytest.mark.parametrize("q", [0.9, 1.0])
def test_worker_that_never_finishes_does_not_extend_the_wait(q):
    """It stops when it is cancelled, and is always the last; the others take up to 3 s."""
    cluster = Cluster.of(Deadline(q), workers=4)
    for update in range(1, 3 * REMEMBERED_TURNS):
        opened_at = cluster.now
        for worker in range(3):
            cluster.arrive(worker)
        assert cluster.version == update - 1
        assert Cancel(3, turn=update) in cluster.fire(*cluster.due)
        assert cluster.now - opened_at <= 2 * 3.0 + 1e-9
        cluster.abandon(3, after=0.0)
    assert cluster.fates[Fate.CANCELLED] == cluster.version
    assert cluster.now - opened_at == pytest.approx(2 * 3.0)


def test_slow_worker_extends_the_wait_if_late_work_is_finished():
    """It is late at first; its complete answer then shows how long to wait for it."""
    cluster = Cluster.of("deadline:1.0", workers=2)
    cluster.arrive(0)
    cluster.fire(1)
    cluster.arrive(1, after=98.0)
    cluster.arrive(0, after=0.0)
    cluster.arrive(1, after=100.0)
    assert [len(update.contributions) for update in cluster.updates] == [1, 2]


def test_no_timer_is_started_without_a_complete_answer(decide):
    """Enough answers were seen, but all were cancelled: any time would be a guess."""
    decider = decide("deadline", workers=2)
    for worker in range(2):
        decider.handle(WorkerJoined(0.0, worker))
    for turn in (1, 2, 3):
        assert started(decider.handle(WorkAbandoned(turn, 1, turn))) == []
    assert decider.handle(GradientArrived(4.0, 0, 1, 0)) == [
        Accept(0, 0, update=1),
        StartTimer(1, at=8.0),
    ]


def test_law_6_many_cancelled_answers_do_not_remove_the_deadline():
    """Worker 0 has contributed, so the update can do without worker 1, whatever it did before.

    It abandoned so many turns that the answer of worker 0 would be forgotten, and then a pause made
    the timer outdated.
    """
    cluster = Cluster.of("deadline", workers=2, min_workers=2)
    cluster.arrive(0)
    for _ in range(2 * REMEMBERED_TURNS):
        cluster.abandon(1)
    cluster.leave(1)
    cluster.join(1)
    cluster.run_until(1, silent={1})


def test_deadline_that_has_passed_when_it_is_learned_is_now(decide):
    """A third of the answers took 1 second, but that is known only after 10 seconds."""
    decider = decide("deadline:q=0.3,n_min=3")
    for worker in range(3):
        decider.handle(WorkerJoined(0.0, worker))
    decider.handle(GradientArrived(1.0, 0, 1, 0))
    decider.handle(WorkAbandoned(2.0, 1, 1))
    assert decider.handle(WorkAbandoned(10.0, 1, 2)) == [
        Drop(1, 0, Fate.CANCELLED),
        StartTimer(1, at=10.0),
        SendParams(1, turn=3, version=0),
    ]


# --------------------------------------------------------------------------------------- n_min


def test_update_waits_for_n_min_after_its_deadline():
    cluster = Cluster.of("deadline:n_min=2,after=2")
    cluster.arrive(0)
    assert cluster.fire(1) == []
    assert cluster.arrive(1) == [
        Accept(1, 0, update=1),
        ApplyUpdate(1, (Contribution(0, 0, 1), Contribution(1, 0, 1)), (0.5, 0.5), (1.0, 1.0), 3),
        Cancel(2, turn=1),
        StartTimer(2, at=cluster.now + 2),
        SendParams(0, turn=2, version=1),
        SendParams(1, turn=2, version=1),
    ]


def test_first_gradient_after_the_deadline_makes_the_update():
    cluster = Cluster.of("deadline:after=2", workers=2)
    assert cluster.fire(1) == []
    assert [type(action) for action in cluster.arrive(1)][:2] == [Accept, ApplyUpdate]


def test_update_takes_all_alive_workers_if_fewer_than_n_min_are_left():
    cluster = Cluster.of("deadline:n_min=3,after=60")
    cluster.leave(0)
    cluster.arrive(1)
    assert isinstance(cluster.leave(2)[0], ApplyUpdate)


def test_n_min_counts_only_finite_gradients():
    """A worker with a non-finite gradient has answered, but contributed nothing."""
    cluster = Cluster.of("deadline:n_min=2,after=2")
    cluster.arrive(0)
    cluster.arrive(1, finite=False, after=0.5)
    assert cluster.fire(1) == []
    assert cluster.arrive(1)[:2] == [
        Accept(1, 0, update=1),
        ApplyUpdate(1, (Contribution(0, 0, 1), Contribution(1, 0, 1)), (0.5, 0.5), (1.0, 1.0), 3),
    ]


def test_non_finite_gradient_starts_no_timer_before_the_rule_has_learned():
    cluster = Cluster.of("deadline", workers=4)
    assert started(cluster.arrive(0, finite=False)) == []
    assert started(cluster.arrive(1)) == [StartTimer(1, at=4.0)]


def test_timer_starts_with_n_min_gradients_before_the_rule_has_learned():
    cluster = Cluster.of("deadline:n_min=2", workers=4)
    assert started(cluster.arrive(0)) == []
    assert started(cluster.arrive(1)) == [StartTimer(1, at=4.0)]
    assert started(cluster.arrive(2)) == []


# --------------------------------------------------------------------------------------- after


def test_after_replaces_the_learned_wait(decide):
    decider = decide("deadline:after=250ms", workers=2)
    decider.handle(WorkerJoined(1.0, 0))
    assert decider.handle(WorkerJoined(2.0, 1)) == [
        Resume(),
        StartTimer(1, at=2.25),
        SendParams(0, turn=1, version=0),
        SendParams(1, turn=1, version=0),
    ]
    decider.handle(GradientArrived(2.125, 0, 1, 0))
    assert decider.handle(TimerFired(2.25, 1)) == [
        ApplyUpdate(1, (Contribution(0, 0, 1),), (1.0,), (1.0,), 2),
        Cancel(1, turn=1),
        StartTimer(2, at=2.5),
        SendParams(0, turn=2, version=1),
    ]


def test_after_zero_takes_the_first_n_min():
    cluster = Cluster.of("deadline:n_min=2,after=0")
    for update in range(1, 4):
        cluster.fire(update)
        cluster.run_until(update, silent={2})
    assert [len(update.contributions) for update in cluster.updates] == [2, 2, 2]


def test_timer_of_an_earlier_update_does_not_shorten_the_next_wait():
    cluster = Cluster.of("deadline:after=5", workers=2)
    cluster.arrive(0)
    cluster.arrive(1)
    cluster.arrive(0, after=0.5)
    assert cluster.fire(1) == []


# --------------------------------------------------------------------------------- in a pause


def test_deadline_that_passes_in_a_pause_makes_no_update():
    cluster = Cluster.of("deadline:after=5", workers=2, min_workers=2)
    cluster.arrive(0)
    assert isinstance(cluster.leave(1)[0], Pause)
    assert cluster.fire(1) == []


def test_wait_after_a_pause_counts_from_the_resume():
    """`opened_at` is when the newest version was made, or when the run last resumed."""
    cluster = Cluster.of("deadline:after=10", workers=2, min_workers=2)
    cluster.leave(1, after=1.0)
    cluster.fire(1)
    assert started(cluster.join(1, after=90.0)) == [StartTimer(2, at=110.0)]
    assert cluster.arrive(0, after=1.0) == [Accept(0, 0, update=1)], "worker 1 has 9 s left"
    assert isinstance(cluster.fire(2)[0], ApplyUpdate)


def test_timer_from_before_a_pause_does_not_shorten_the_wait_after_it():
    cluster = Cluster.of("deadline:after=10", workers=2, min_workers=2)
    cluster.leave(1, after=1.0)
    assert started(cluster.join(1, after=4.0)) == [StartTimer(2, at=15.0)]
    cluster.arrive(0)
    assert cluster.fire(1) == []
    assert cluster.now == 10.0
    assert isinstance(cluster.fire(2)[0], ApplyUpdate)
    assert cluster.now == 15.0


def test_gradient_that_arrives_in_a_pause_does_not_end_the_next_wait():
    """Worker 0 took 10 s, so the wait is 20 s; worker 1 has just started."""
    cluster = Cluster.of("deadline", workers=2, min_workers=2)
    cluster.leave(1, after=1.0)
    cluster.arrive(0, after=9.0)
    assert started(cluster.join(1, after=10.0)) == [StartTimer(1, at=20.0 + 2 * 10.0)]


# ------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("q", [0.0, -0.5, 1.5, nan])
def test_invalid_q_is_refused(q):
    with pytest.raises(SpecError, match=r"q must be in \(0, 1\]"):
        Deadline(q)


def test_n_min_below_one_is_refused():
    with pytest.raises(SpecError, match="n_min must be >= 1, got 0"):
        Deadline(n_min=0)


def test_n_min_above_w_is_refused():
    with pytest.raises(SpecError, match="n_min must be <= workers=3, got 4"):
        make_decider("deadline:n_min=4")


@pytest.mark.parametrize("after", [-1.0, nan, inf])
def test_invalid_after_is_refused(after):
    with pytest.raises(SpecError, match="after must be"):
        Deadline(after=after)
