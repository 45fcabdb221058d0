# SPDX-License-Identifier: BSD-3-Clause
"""The server's schedulers step as the scripts' calls mean."""

import pytest
import torch
import torch._dynamo  # an optimizer loads it, and it sets an environment variable
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)

from paceline.errors import ProtocolError
from paceline.run.tensors.schedules import Schedules
from paceline.run.tensors.state_spec import SchedulerCalls


def an_optimizer(lr=1.0):
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr, momentum=0.9)


class Bench:
    """One scheduler of one optimizer, which halves its learning rate."""

    def __init__(self, make=lambda optimizer: ExponentialLR(optimizer, gamma=0.5)):
        self.make = make
        self.optimizer = an_optimizer()
        self.schedules = Schedules([self.optimizer], [make(self.optimizer)])
        self.optimizer.step()  # or torch warns

    def note(self, mode, calls=0, worker=0, **fields):
        return self.schedules.note_calls(worker, [SchedulerCalls(0, mode, calls, **fields)])

    def update(self, *workers):
        """Make an update of the gradients of these workers."""
        for worker in workers:
            self.schedules.count_turn(worker, 0)
        self.optimizer.step()
        self.schedules.count_step(0, len(workers))
        return self.steps

    @property
    def steps(self):
        [steps] = self.schedules.steps
        return steps

    @property
    def lr(self):
        return self.optimizer.param_groups[0]["lr"]

    def restored(self):
        """Return a new bench that continues from what this one saves."""
        other = Bench(self.make)
        other.schedules.load_state_dict(self.schedules.state_dict())
        other.optimizer.load_state_dict(self.optimizer.state_dict())
        assert other.schedules.state_dict() == self.schedules.state_dict()
        return other


def test_scheduler_that_no_script_has_called_does_not_step():
    bench = Bench()
    assert [bench.update(0, 1) for _ in range(3)] == [0, 0, 0]
    assert bench.lr == 1.0


# ------------------------------------------------------------------------------------------- modes


@pytest.mark.parametrize("mode", ["epoch", "call"])
def test_nth_call_of_any_worker_makes_the_nth_step(mode):
    bench = Bench()
    for worker, calls, expected in [(0, 1, 1), (1, 1, 1), (1, 2, 2), (2, 1, 2), (0, 2, 2)]:
        bench.note(mode, calls, worker)
        assert (bench.steps, bench.lr) == (expected, 0.5**expected)
    assert bench.update(0, 1) == 2


def test_worker_that_is_several_calls_ahead_makes_them_all():
    bench = Bench()
    bench.note("epoch", 3)
    assert bench.lr == 0.125


def test_call_inside_a_pass_means_one_step_per_accepted_gradient():
    bench = Bench()
    assert bench.update(0, 1, 2) == 0  # no worker has called yet
    bench.note("mini-batch", 1, steps=1)
    assert bench.steps == 3
    assert bench.update(0, 2) == 5
    assert bench.update(1) == 6
    assert bench.lr == 0.5**6


@pytest.mark.parametrize(("calls", "steps", "expected"), [(1, 4, 2), (2, 1, 16), (3, 4, 6)])
def test_steps_per_gradient_are_calls_per_optimizer_step(calls, steps, expected):
    bench = Bench()
    bench.note("mini-batch", calls, steps=steps)
    for _ in range(4):
        bench.update(0, 1)
    assert bench.steps == expected


def test_scheduler_never_goes_back_when_the_script_calls_it_less_often():
    bench = Bench()
    bench.note("mini-batch", 1, steps=1)
    assert bench.update(0, 1) == 2
    bench.note("mini-batch", 1, steps=2)  # the first call was one of every ten steps
    assert bench.update(0, 1) == 2
    bench.note("mini-batch", 2, steps=11)
    assert [bench.update(0, 1) for _ in range(9)][-1] == 4


def test_calls_without_passes_follow_the_worker_with_the_most_turns():
    bench = Bench()
    assert bench.update(0, 1) == 0
    bench.note("step", 1, steps=1)
    assert bench.steps == 1  # before the second update
    assert bench.update(0) == 2
    assert bench.update(1) == 2
    assert bench.update(0, 1) == 3


def test_calls_without_passes_may_become_irregular():
    bench = Bench()
    bench.note("step", 1, steps=1)
    bench.update(0)
    bench.update(0)
    bench.note("call", 2)
    assert bench.update(0) == 2
    bench.note("call", 3)
    assert bench.steps == 3


def test_first_mode_decides():
    bench = Bench()
    bench.note("epoch", 1)
    bench.note("mini-batch", 1, steps=1)
    assert [bench.update(0, 1) for _ in range(3)] == [1, 1, 1]


def test_only_worker_0s_metrics_count_and_each_counts_once():
    bench = Bench(lambda o: ReduceLROnPlateau(o, patience=1, factor=0.5))
    bench.note("metric", 3, worker=1, metrics=(1.0, 1.0, 1.0))
    assert bench.steps == 0
    bench.note("metric", 2, metrics=(1.0, 1.0))
    bench.note("metric", 2, metrics=(1.0, 1.0))  # a restarted worker repeats its calls
    assert (bench.steps, bench.lr) == (2, 1.0)
    bench.note("metric", 3, metrics=(1.0,))
    assert (bench.steps, bench.lr) == (3, 0.5)


def test_largest_epoch_that_a_script_passes_counts():
    bench = Bench(lambda o: CosineAnnealingWarmRestarts(o, T_0=4))
    plain = an_optimizer()
    scheduler = CosineAnnealingWarmRestarts(plain, T_0=4)
    bench.note("given", 1, epoch=1.5)
    bench.note("given", 1, worker=1, epoch=1.25)
    scheduler.step(1.5)
    assert bench.lr == plain.param_groups[0]["lr"] != 1.0
    assert bench.schedules.epochs == {0: 1.5}


def test_one_cycle_stops_at_its_last_step():
    bench = Bench(lambda o: OneCycleLR(o, max_lr=1.0, total_steps=5))
    bench.note("mini-batch", 1, steps=1)
    assert [bench.update(0, 1) for _ in range(4)] == [2, 4, 5, 5]


def test_each_scheduler_follows_its_own_optimizer():
    optimizers = [an_optimizer(), an_optimizer()]
    schedulers = [ExponentialLR(optimizers[i], gamma=0.5) for i in (1, 0, 1)]
    schedules = Schedules(optimizers, schedulers)
    for optimizer in optimizers:
        optimizer.step()
    schedules.note_calls(0, [SchedulerCalls(i, "mini-batch", 1, 1) for i in (0, 1)])
    schedules.count_step(0, 2)
    schedules.count_step(1, 3)
    assert schedules.steps == (3, 2, 0)
    assert schedules.contributions == [2, 3]


# ------------------------------------------------------------------------------------------- texts


@pytest.mark.parametrize(
    ("mode", "fields", "expected"),
    [
        ("epoch", {}, "ExponentialLR: one step per epoch"),
        ("call", {}, "ExponentialLR: one step per call in the script"),
        ("step", {"steps": 1}, "ExponentialLR: one step per optimizer.step() of a worker"),
        ("mini-batch", {"steps": 1}, "ExponentialLR: one step per accepted mini-batch"),
        ("mini-batch", {"steps": 8}, "ExponentialLR: one step per 8 accepted mini-batches"),
        (
            "mini-batch",
            {"calls": 3, "steps": 2},
            "ExponentialLR: 1.5 steps per accepted mini-batch",
        ),
        ("given", {"epoch": 0.0}, "ExponentialLR: steps to the epoch that the script passes"),
    ],
)
def test_first_call_says_once_what_the_scheduler_follows(mode, fields, expected):
    bench = Bench()
    fields = {"calls": 1, **fields}
    assert bench.note(mode, **fields) == [expected]
    assert bench.note(mode, worker=1, **fields) == []


def test_metric_says_whose_it_is():
    bench = Bench(ReduceLROnPlateau)
    assert bench.note("metric", 1, metrics=(1.0,)) == [
        "ReduceLROnPlateau: steps with the metric of worker 0"
    ]


# ----------------------------------------------------------------------------------------- restore


@pytest.mark.parametrize("mode", ["epoch", "call", "step", "mini-batch"])
def test_restored_schedulers_keep_mode_and_count(mode):
    bench = Bench(lambda o: StepLR(o, step_size=3, gamma=0.5))
    bench.note(mode, 2, steps=2)
    for _ in range(4):
        bench.update(0, 1)
    other = bench.restored()
    assert other.note(mode, 2, steps=2) == []  # it has been said
    for one in (bench, other):
        one.update(0, 1)
        one.note(mode, 4, steps=4)
    assert (other.steps, other.lr) == (bench.steps, bench.lr)


def test_turn_that_is_computed_again_after_a_restore_is_not_counted_twice():
    bench = Bench()
    bench.note("step", 1)
    bench.update(0, 1)
    bench.schedules.count_turn(0, 0)  # worker 0 waits for worker 1
    other = Bench()
    other.schedules.load_state_dict(bench.schedules.state_dict(pending=[[0]]))
    assert bench.update(1) == other.update(0, 1) == 2
    turns = [one.schedules.state_dict()["turns"] for one in (bench, other)]
    assert turns == [[[(0, 2), (1, 2)]]] * 2


def test_restored_plateau_keeps_its_history():
    bench = Bench(lambda o: ReduceLROnPlateau(o, patience=1, factor=0.5))
    bench.note("metric", 2, metrics=(1.0, 2.0))
    other = bench.restored()
    assert other.lr == 1.0
    other.note("metric", 3, metrics=(3.0,))
    assert other.lr == 0.5


def test_restored_scheduler_keeps_the_epoch_that_was_passed():
    bench = Bench(lambda o: CosineAnnealingWarmRestarts(o, T_0=4))
    bench.note("given", 1, epoch=2.5)
    other = bench.restored()
    other.note("given", 1, epoch=2.0)
    assert (other.schedules.epochs, other.lr) == ({0: 2.5}, bench.lr)


# ------------------------------------------------------------------------------------------ errors


def test_unknown_scheduler_is_refused():
    bench = Bench()
    with pytest.raises(ProtocolError, match="there is no scheduler 1"):
        bench.schedules.check([SchedulerCalls(1, "epoch", 1)])
    bench.schedules.check([SchedulerCalls(0, "epoch", 1)])


def test_first_report_of_a_worker_does_not_count_a_turn_that_another_has_reported():
    """The update that this turn is for has the rate of the turn before."""
    bench = Bench()
    bench.update(0, 1)
    for worker in (0, 1):
        bench.note("step", 1, steps=1, worker=worker)
        assert (bench.steps, bench.lr) == (1, 0.5)
        bench.schedules.count_turn(worker, 0)
    bench.schedules.count_step(0, 2)
    assert (bench.steps, bench.lr) == (2, 0.25)
