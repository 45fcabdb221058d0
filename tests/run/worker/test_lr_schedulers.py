# SPDX-License-Identifier: BSD-3-Clause
"""A follower finds out what a script's calls of `scheduler.step()` mean, and reports it."""

from dataclasses import dataclass

import pytest
import torch
import torch._dynamo  # optimizers import it, and it sets an environment variable
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
)

from paceline.errors import SpecError
from paceline.run.tensors.group_options import KnownOptions
from paceline.run.tensors.state_spec import SchedulerCalls
from paceline.run.worker.lr_schedulers import Follower
from paceline.run.worker.optimizer import pace


class NoPacer:
    """Optimizers don't step in these tests."""


@dataclass
class Passes:
    """The passes over a prepared loader, if there is one."""

    has_loader: bool
    is_in_pass: bool = False
    has_begun: bool = False

    def begin(self):
        self.is_in_pass = self.has_begun = True

    def end(self):
        self.is_in_pass = False


class Script:
    """A script with one optimizer and one scheduler, which halves the learning rate."""

    def __init__(self, make=lambda o: ExponentialLR(o, gamma=0.5), worker=0, has_loader=True):
        self.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.9)
        self.scheduler = make(self.optimizer)
        pace(self.optimizer, 0, NoPacer())
        self.passes = Passes(has_loader)
        known = KnownOptions([self.optimizer])
        self.follower = Follower(self.scheduler, 0, 0, worker, self.passes, known)
        self.follower.join(0)

    @property
    def lr(self):
        return self.optimizer.param_groups[0]["lr"]

    def push(self, optimizer=0):
        """Call `optimizer.step()`; return what is reported with it."""
        self.follower.count_push(optimizer)
        return self.follower.report(optimizer)

    def epoch(self, pushes=2):
        """Make a training pass, and call the scheduler after it; return the reports."""
        self.passes.begin()
        reports = [self.push() for _ in range(pushes)]
        self.passes.end()
        self.scheduler.step()
        return reports


def test_scheduler_keeps_its_type_and_its_state():
    script = Script()
    assert isinstance(script.scheduler, ExponentialLR)
    assert type(script.scheduler).__name__ == "ExponentialLR"
    plain = ExponentialLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), gamma=0.5)
    assert script.scheduler.state_dict().keys() == plain.state_dict().keys()
    with pytest.raises(SpecError, match=r"load the state of a scheduler before run.prepare\(\)"):
        script.scheduler.load_state_dict({})


def test_scheduler_that_is_never_called_is_not_reported():
    script = Script()
    assert [script.push() for _ in range(9)] == [None] * 9


# ---------------------------------------------------------------------------------------- per epoch


def test_call_after_a_pass_is_reported_with_its_number():
    script = Script()
    assert script.epoch() == [None, None]
    assert script.epoch() == [SchedulerCalls(0, "epoch", 1), None]
    assert script.epoch() == [SchedulerCalls(0, "epoch", 2), None]
    assert script.lr == 0.125  # at once


def test_call_before_the_first_pass_counts_epochs_too():
    script = Script()
    script.scheduler.step()
    script.passes.begin()
    assert script.push() == SchedulerCalls(0, "epoch", 1)


def test_number_of_a_call_is_not_that_of_the_server():
    """A worker that slept through epochs repeats them as empty passes."""
    script = Script()
    script.follower.join(5)
    script.follower.follow(5, None)
    assert script.lr == 0.5**5
    for _ in range(5):
        assert script.epoch(pushes=0) == []
    assert script.lr == 0.5**5
    assert script.epoch(pushes=1) == [SchedulerCalls(0, "epoch", 5)]
    assert script.lr == 0.5**6


def test_restored_server_is_told_of_a_call_when_it_is_back_at_its_version():
    script = Script()
    for epoch in range(1, 6):
        script.follower.set_version(10 * epoch)
        script.epoch()
    script.follower.set_version(35)
    script.follower.join(3)
    assert script.push() == SchedulerCalls(0, "epoch", 3)
    script.follower.set_version(40)
    assert script.push() == SchedulerCalls(0, "epoch", 4)
    script.follower.set_version(60)
    assert script.epoch() == [SchedulerCalls(0, "epoch", 5), None]
    assert script.push() == SchedulerCalls(0, "epoch", 6)
    assert script.lr == 0.5**6


def test_restored_server_is_told_the_metrics_that_it_has_forgotten():
    script = Script(lambda o: ReduceLROnPlateau(o, patience=1, factor=0.5))
    script.passes.begin()
    script.passes.end()
    for version, metric in enumerate((1.0, 2.0, 3.0), 1):
        script.follower.set_version(version)
        script.scheduler.step(metric)
        script.push()
    script.follower.set_version(1)
    script.follower.join(1)
    assert script.push() is None
    script.follower.set_version(3)
    assert script.push() == SchedulerCalls(0, "metric", 3, 0, None, (2.0, 3.0))


# ----------------------------------------------------------------------------------- per mini-batch


def test_call_inside_a_pass_is_reported_once_and_changes_nothing_here():
    script = Script()
    script.passes.begin()
    reports = []
    for _ in range(4):
        reports.append(script.push())
        script.scheduler.step()
    assert reports == [None, SchedulerCalls(0, "mini-batch", 1, 1), None, None]
    assert script.lr == 1.0
    script.follower.follow(8, None)
    assert script.lr == 0.5**8


def test_first_call_inside_a_pass_shows_the_gradients_of_the_first_update():
    script = Script()
    script.passes.begin()
    for contributors in (3, 3):
        script.push()
        script.follower.settle(1, 7)  # another optimizer
        script.follower.settle(0, contributors)
        script.scheduler.step()
        assert script.lr == 0.5**3  # from now on, the server counts


def test_calls_per_step_are_reported_when_they_change():
    script = Script()
    script.passes.begin()
    reports = []
    for number in range(5):
        reports.append(script.push())
        if number % 2 == 1:
            script.scheduler.step()
    assert [r and (r.calls, r.steps) for r in reports] == [None, None, (1, 2), (1, 3), (2, 4)]


def test_calls_per_step_are_those_of_its_own_optimizer():
    """The other optimizer of a GAN steps before the call."""
    script = Script()
    script.passes.begin()
    reports = []
    for _ in range(3):
        reports += [script.push(0), script.push(1)]
        script.scheduler.step()
    expected = SchedulerCalls(0, "mini-batch", 1, 1)
    assert reports == [None, None, expected, None, None, None]


# ----------------------------------------------------------------------------------- without passes


@pytest.mark.parametrize("has_loader", [False, True])  # a loader may be for evaluation only
def test_call_after_every_push_is_reported_once(has_loader):
    script = Script(has_loader=has_loader)
    reports, rates = [], []
    for shown in range(4):
        script.follower.follow(shown if shown > 1 else 0, None)  # as the server counts pushes
        reports.append(script.push())
        rates.append(script.lr)
        script.scheduler.step()
    assert reports == [None, SchedulerCalls(0, "step", 1, 1), None, None]
    assert rates == [1.0, 0.5, 0.25, 0.125]


def test_calls_after_several_pushes_are_reported_with_their_number():
    script = Script(has_loader=False)
    reports = []
    for number in range(5):
        reports.append(script.push())
        if number % 2 == 1:
            script.scheduler.step()
            assert script.lr == 0.5 ** (number // 2 + 1)
    calls = [SchedulerCalls(0, "call", number) for number in (1, 2)]
    assert reports == [None, None, calls[0], None, calls[1]]


def test_calls_of_a_new_process_continue_where_the_run_is():
    script = Script(has_loader=False)
    script.follower.join(7)
    script.push()
    script.push()
    script.scheduler.step()
    assert script.push() == SchedulerCalls(0, "call", 8)


# ----------------------------------------------------------------------------------- with arguments


def test_epoch_that_the_script_passes_is_reported():
    script = Script(lambda o: CosineAnnealingWarmRestarts(o, T_0=4))
    plain = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = CosineAnnealingWarmRestarts(plain, T_0=4)
    for epoch in (0.5, 1.5):
        script.scheduler.step(epoch)
        scheduler.step(epoch)
        assert script.push().epoch == epoch
    script.follower.follow(0, 1.0)  # another worker is behind
    assert script.lr == plain.param_groups[0]["lr"]
    script.follower.follow(0, 3.0)
    scheduler.step(3.0)
    assert script.lr == plain.param_groups[0]["lr"]
    script.scheduler.step()
    assert script.push() == SchedulerCalls(0, "given", 3, 0, 4.0)


def test_metrics_of_worker_0_are_reported_and_its_rate_changes_at_once():
    script = Script(lambda o: ReduceLROnPlateau(o, patience=1, factor=0.5))
    for metric in (1.0, 2.0):
        script.scheduler.step(metric)
    assert script.push() == SchedulerCalls(0, "metric", 2, 0, None, (1.0, 2.0))
    assert script.push() is None
    script.scheduler.step(torch.tensor(3.0))
    assert script.scheduler.best == 1.0
    assert (script.lr, script.scheduler.get_last_lr()) == (0.5, [0.5])
    assert script.push() == SchedulerCalls(0, "metric", 3, 0, None, (3.0,))


@pytest.mark.parametrize("lr", [1.0, torch.tensor(1.0)])
def test_rate_of_a_restarted_worker_0_waits_for_the_server(lr):
    """Its scheduler doesn't know the metrics of the process before."""
    script = Script(lambda o: ReduceLROnPlateau(o, patience=1, factor=0.5))
    script.optimizer.param_groups[0]["lr"] = lr
    script.follower.join(2)
    for metric in (1.0, 2.0, 3.0):
        script.scheduler.step(metric)
    assert (script.lr, script.scheduler.get_last_lr()) == (1.0, [1.0])
    script.optimizer.param_groups[0]["lr"] = 0.5  # by the server
    script.follower.read_rates()
    assert script.scheduler.get_last_lr() == [0.5]


def test_metrics_of_other_workers_are_not_reported():
    script = Script(ReduceLROnPlateau, worker=1)
    script.scheduler.step(1.0)
    assert script.push() is None


def test_scheduler_that_needs_a_metric_must_get_one():
    script = Script(ReduceLROnPlateau)
    with pytest.raises(TypeError, match=r"ReduceLROnPlateau.step\(\) needs a metric"):
        script.scheduler.step()


class Halving(LRScheduler):
    """A script's own scheduler, which takes a metric."""

    def get_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, loss=None):
        super().step()


class Threshold(Halving):
    """Must be given a metric."""

    def _initial_step(self):
        self._step_count = 0

    def step(self, loss):
        self.last_loss = loss


@pytest.mark.parametrize(("kind", "expected"), [(Threshold, "metric"), (Halving, "given")])
def test_own_scheduler_with_a_required_argument_takes_a_metric(kind, expected):
    script = Script(kind)
    script.scheduler.step(0.5)
    assert script.push().mode == expected


def test_error_of_a_scheduler_is_raised_in_the_call():
    script = Script(lambda o: OneCycleLR(o, max_lr=1.0, total_steps=2), has_loader=False)
    for _ in range(2):
        script.scheduler.step()
    with pytest.raises(ValueError, match="Tried to step"):
        script.scheduler.step()


def test_metrics_inside_a_pass_continue_where_the_run_is():
    """A restarted worker doesn't repeat the calls that were made inside passes."""
    script = Script(ReduceLROnPlateau)
    script.follower.join(7)
    script.passes.begin()
    script.scheduler.step(1.0)
    assert script.push() == SchedulerCalls(0, "metric", 8, 0, None, (1.0,))
    script.scheduler.step(2.0)
    assert script.push() == SchedulerCalls(0, "metric", 9, 0, None, (2.0,))
