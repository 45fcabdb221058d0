# SPDX-License-Identifier: BSD-3-Clause
"""The executor performs every action in order, on a real shard and for real workers."""

from dataclasses import replace
from math import inf

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from executor_bench import ExecutorBench
from paceline.core import events
from paceline.core.events import (
    Action,
    Cancel,
    Contribution,
    Drop,
    Fate,
    Finish,
    GradientArrived,
    Pause,
    Resume,
    SendParams,
    StartTimer,
    WorkerJoined,
)
from paceline.run.net import messages
from paceline.run.settings import Settings
from paceline.run.tensors.state_spec import OptionChange
from paceline.spec import RunSpec
from paceline.trace.schema import FINISHED, STOPPED


@pytest.fixture
def make(tmp_path):
    def bench(steps=100, workers=2, late="cancel", samples=None, **options):
        spec = RunSpec(workers=workers, steps=steps, late=late, samples=samples)
        options = {"checkpoint_every": "0", **options}
        return ExecutorBench(Settings(spec=spec, **options), tmp_path)

    return bench


# ------------------------------------------------------------------------------------- in general


def test_every_action_has_a_handler(make):
    actions = {kind for kind in vars(events).values() if is_action(kind)}
    assert set(make().executor._handlers) == actions


def is_action(kind):
    return isinstance(kind, type) and issubclass(kind, Action) and kind is not Action


def test_actions_are_performed_in_their_order(make):
    """A worker gets the new version only if its assignment comes after the update."""
    bench = make().join(0, 1)
    before = bench.weights
    bench.report(0, [1.0, 0.0])
    performed = bench.perform(
        SendParams(1, 1, 0), bench.update(), SendParams(0, 1, 1), Cancel(1, 1), time=3.0
    )
    [first, cancel] = bench.inbox(1)
    [second] = bench.inbox(0)
    assert (first.version, second.version) == (0, 1)
    assert bench.workers[1].fetch(first).parameters[0][0].flatten().tolist() == before
    found = bench.workers[0].fetch(second).parameters[0][0].flatten().tolist()
    assert found == pytest.approx([before[0] - 0.5, before[1]])
    assert cancel == messages.CancelTurn(1)
    assert list(performed.made) == [1]
    assert performed.end is None


def test_no_actions_have_no_results(make):
    performed = make().perform()
    assert (performed.made, performed.end) == ({}, None)


# ------------------------------------------------------------------------------------------ fates


def test_accepted_gradient_is_kept_for_its_update_and_the_worker_is_notified(make):
    bench = make().join(0)
    bench.report(0, [1.0, 2.0])
    assert bench.parts.shard.optimizers_of(1) == [0]
    assert bench.peer(0).notice == messages.FateNotice(Fate.ACCEPTED, 0, 0, 0)
    assert bench.peer(0).update == 1


def test_stale_gradient_gets_the_scale_of_the_policy(make):
    bench = make(policy="async:lr=inverse").join(0)
    for _ in range(2):
        bench.report(0, [0.0, 0.0])
        bench.perform(bench.update())
    before = bench.weights
    bench.report(0, [1.0, 0.0], at=0)  # two versions behind
    assert bench.peer(0).notice.staleness == 2
    bench.perform(bench.update())
    assert before[0] - bench.weights[0] == pytest.approx(0.5 * 0.5)  # learning rate x scale


@pytest.mark.parametrize("fate", [Fate.LATE, Fate.STALE, Fate.CANCELLED, Fate.DUPLICATE])
def test_worker_of_a_dropped_gradient_is_notified(make, capsys, fate):
    bench = make().join(0)
    bench.report(0, [0.0, 0.0])
    bench.perform(bench.update())
    bench.perform(Drop(0, 0, fate))
    assert bench.peer(0).notice == messages.FateNotice(fate, 0, 1, 0)
    assert bench.peer(0).update is None
    assert capsys.readouterr().out == ""


def test_non_finite_gradients_are_reported_once_per_worker_and_end_the_run_at_last(make, capsys):
    bench = make().join(0)
    for _ in range(100):
        assert bench.parts.failures.failure == ""
        bench.perform(Drop(0, 0, Fate.NON_FINITE))
    assert bench.parts.failures.failure.startswith("the last 100 gradients all contained NaN")
    assert capsys.readouterr().out.count("refused a gradient of worker 0") == 1


# ---------------------------------------------------------------------------------------- updates


def test_update_returns_its_norm_and_its_scalars(make):
    bench = make().join(0, 1)
    bench.report(0, [3.0, 0.0], samples=1, scalars={"loss": 1.0})
    bench.report(1, [0.0, 4.0], samples=3, scalars={"loss": 5.0})
    performed = bench.perform(bench.update())
    made = performed.made[1]
    assert made.sq_norm == pytest.approx(0.75**2 + 3.0**2)
    assert made.scalars == {"loss": 4.0}
    assert made.apply_s > 0


def test_contributors_are_notified_of_their_number(make):
    bench = make(workers=3).join(0, 1, 2)
    bench.report(0, [1.0, 0.0])
    bench.report(1, [1.0, 0.0])
    bench.perform(Drop(2, 0, Fate.LATE))
    bench.perform(bench.update(), *[SendParams(worker, 1, 1) for worker in range(3)])
    notices = [bench.inbox(worker)[0].notice for worker in range(3)]
    accepted = messages.FateNotice(Fate.ACCEPTED, 0, 0, 2)
    assert notices == [accepted, accepted, messages.FateNotice(Fate.LATE, 0, 0, 0)]


def test_update_of_a_worker_that_has_left_is_made(make):
    bench = make().join(0, 1)
    bench.report(0, [1.0, 0.0])
    bench.report(1, [3.0, 0.0])
    before = bench.weights
    bench.parts.shard.release_slot(1)
    bench.parts.roster.remove(bench.peer(1))
    bench.perform(bench.update())
    assert before[0] - bench.weights[0] == pytest.approx(0.5 * 2.0)


@pytest.mark.parametrize("limit", [0.5, 5.0, 5.1, None])
def test_gradient_is_clipped_as_torch_clips(make, limit):
    bench = make(clip_norm=limit).join(0)
    plain = nn.Linear(2, 1, bias=False)
    plain.weight.data.copy_(bench.model.weight)
    plain.weight.grad = torch.tensor([[3.0, 4.0]])
    if limit is not None:
        clip_grad_norm_(plain.parameters(), limit)
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    bench.report(0, [3.0, 4.0])
    made = bench.perform(bench.update()).made[1]
    assert made.sq_norm == 25.0  # before clipping
    assert bench.weights == pytest.approx(plain.weight.flatten().tolist(), rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), inf])
def test_non_finite_update_makes_a_version_without_a_step(make, capsys, bad):
    bench = make().join(0)
    before = bench.weights
    bench.call_scheduler()
    bench.report(0, [bad, 1.0])
    performed = bench.perform(bench.update(), SendParams(0, 1, 1))
    assert performed.made[1].sq_norm is None
    assert bench.weights == before
    assert (bench.parts.shard.version, bench.parts.shard.schedules.contributions) == (1, [0])
    assert bench.parts.failures.failure == ""
    assert "update 1 is not finite: the optimizer did not step" in capsys.readouterr().out
    [assignment] = bench.inbox(0)
    assert (assignment.version, assignment.scheduler_steps) == (1, (0,))


class Failing(torch.optim.SGD):
    """Fails when it steps."""

    def step(self, closure=None):
        raise ValueError("cannot step")


def test_failing_optimizer_fails_the_run_and_the_other_actions_are_performed(make, capsys):
    bench = make(checkpoint_every="1").join(0)
    bench.optimizer.step = Failing(bench.model.parameters()).step
    bench.report(0, [1.0, 2.0])
    performed = bench.perform(bench.update(), SendParams(0, 1, 1))
    assert performed.made == {}
    assert bench.parts.failures.failure == "update 1 failed: ValueError('cannot step')"
    assert bench.parts.shard.version == 1
    assert [message.version for message in bench.inbox(0)] == [1]
    assert "ValueError: cannot step" in capsys.readouterr().err
    end = bench.perform(Finish(1)).end
    assert end.reason == "update 1 failed: ValueError('cannot step')"
    assert [message.version for message in bench.inbox(0)] == [1]
    bench.parts.checkpointer.finish()
    assert bench.archive.load() is None  # a version that was made in part is not saved
    assert bench.exports == 0


def test_update_that_does_not_match_the_accepted_gradients_fails_the_run(make, capsys):
    bench = make().join(0)
    before = bench.weights
    bench.report(0, [1.0, 2.0], samples=3)
    right = bench.update()
    wrong = replace(right.contributions[0], samples=1)
    bench.perform(replace(right, contributions=(wrong,)))
    assert bench.parts.failures.failure.startswith("update 1 failed: InternalError(")
    assert bench.weights == before
    assert bench.parts.shard.version == 1
    assert "InternalError" in capsys.readouterr().err


@pytest.mark.parametrize(("policy", "limit"), [("sync", 1), ("backup:1", inf)])
def test_gradients_are_summed_early_in_the_order_of_workers_if_all_are_needed(make, policy, limit):
    """Worker 1 still computes: adding the others first would change the bits of the sum."""
    bench = make(workers=3, policy=policy).join(0, 1, 2)
    decider, limits = bench.parts.decider, []
    bench.parts.shard.sum_early = lambda update, limit: limits.append((update, limit))
    for worker in range(3):
        bench.perform(*decider.handle(WorkerJoined(0.0, worker)))
    for worker in (0, 2)[: 2 if policy == "sync" else 1]:
        decider.handle(GradientArrived(1.0, worker, 1, 0, 1))
    bench.executor.sum_early()
    assert limits == [(1, limit)]


# ---------------------------------------------------------------------------------------- workers


def test_assignment_has_everything_that_a_worker_needs(make):
    bench = make().join(0)
    bench.report(0, [1.0, 0.0])
    bench.call_scheduler()
    bench.perform(bench.update())
    bench.perform(SendParams(0, 7, 1), time=3.5)
    [assignment] = bench.inbox(0)
    assert (assignment.turn, assignment.version, assignment.scheduler_steps) == (7, 1, (1,))
    assert assignment.asked_at == bench.parts.clock.monotonic_at(3.5)
    assert assignment.notice == messages.FateNotice(Fate.ACCEPTED, 0, 0, 1)
    assert assignment.position_wanted == 0
    views = bench.workers[0].fetch(assignment)
    assert views.parameters[0][0].flatten().tolist() == bench.weights
    assert bench.peer(0).asked_at == 3.5
    assert bench.peer(0).notice is None  # it was sent


def test_assigned_version_stays_unchanged_while_its_worker_computes(make):
    bench = make().join(0, 1)
    bench.perform(SendParams(1, 1, 0))
    [assignment] = bench.inbox(1)
    views = bench.workers[1].fetch(assignment)
    before = views.parameters[0][0].flatten().tolist()
    for _ in range(3):
        bench.report(0, [1.0, 1.0])
        bench.perform(bench.update())
    assert views.parameters[0][0].flatten().tolist() == before
    assert bench.weights != before


def test_slot_of_a_worker_is_free_when_it_gets_its_next_assignment(make):
    bench = make().join(0, 1)
    before = bench.weights
    bench.report(0, [2.0, 0.0])
    bench.perform(SendParams(0, 2, 0))
    bench.workers[0].open_slot().slot.parameters[0][0].fill_(torch.nan)  # the next gradient
    bench.report(1, [4.0, 0.0])
    made = bench.perform(bench.update()).made[1]
    assert made.sq_norm == 9.0
    assert before[0] - bench.weights[0] == pytest.approx(0.5 * 3.0)


@pytest.mark.parametrize(
    ("late", "is_busy", "is_sent"),
    [("cancel", True, True), ("cancel", False, False), ("finish", True, False)],
)
def test_cancel_is_sent_to_busy_workers_if_late_gradients_are_cancelled(
    make, late, is_busy, is_sent
):
    bench = make(late=late).join(0)
    if is_busy:
        bench.assign(0)
    bench.perform(Cancel(0, 1))
    assert bench.inbox(0) == [messages.CancelTurn(1)] * is_sent


def test_worker_that_cannot_be_reached_does_not_stop_the_others(make):
    bench = make().join(0, 1)
    bench.workers[0].close()
    bench.perform(SendParams(0, 1, 0), SendParams(1, 1, 0))
    assert [message.turn for message in bench.inbox(1)] == [1]
    [broken] = bench.parts.roster.take_broken()
    assert broken == (bench.peer(0).end, "the connection was closed", "")


# ------------------------------------------------------------------------------ timers and pauses


def test_timers_are_started(make):
    bench = make()
    bench.perform(StartTimer(1, 4.5), StartTimer(2, 3.5))
    assert bench.parts.timers.next_at == 3.5
    assert bench.parts.timers.pop_due(5.0) == [2, 1]


def test_pauses_are_printed(make, capsys):
    bench = make()
    bench.perform(Resume(), Pause("1 of at least 2 workers; waits for 1"))
    assert capsys.readouterr().out.splitlines() == [
        "training",
        "paused: 1 of at least 2 workers; waits for 1",
    ]


# ------------------------------------------------------------------------------------ checkpoints


def test_busy_workers_are_asked_for_their_positions_immediately_and_idle_ones_later(make):
    bench = make(checkpoint_every="1").join(0, 1)
    bench.assign(0, 1)
    bench.report(0, [1.0, 0.0])
    bench.perform(bench.update(), SendParams(0, 2, 1))
    assert bench.inbox(1) == [messages.PositionRequest(1)]
    [assignment] = bench.inbox(0)
    assert assignment.position_wanted == 1
    for worker in (0, 1):
        bench.parts.checkpointer.take_position(worker, 1, b"at %d" % worker, now=0.0)
    bench.archive.wait()
    saved = bench.archive.load()
    assert (saved.version, saved.samples) == (1, 1)
    assert saved.positions == {0: b"at 0", 1: b"at 1"}
    bench.perform(SendParams(0, 3, 1))
    assert bench.inbox(0)[0].position_wanted == 0


def test_parked_workers_are_not_asked_for_their_positions(make):
    bench = make(checkpoint_every="1").join(0, 1)
    bench.assign(0, 1)
    bench.report(0, [1.0, 0.0])
    bench.parts.roster.park(bench.peer(1))
    bench.perform(bench.update())
    assert bench.inbox(1) == []
    bench.parts.checkpointer.take_position(0, 1, b"at 0", now=0.0)
    bench.archive.wait()
    assert bench.archive.load().positions == {0: b"at 0"}


def test_checkpoint_is_made_when_it_is_due(make):
    bench = make(checkpoint_every="3").join(0)
    versions = []
    for update in range(1, 8):
        bench.report(0, [1.0, 0.0])
        bench.perform(bench.update(), SendParams(0, update + 1, update))
        [assignment] = bench.inbox(0)
        if assignment.position_wanted:
            checkpoint = assignment.position_wanted
            bench.parts.checkpointer.take_position(0, checkpoint, b"here", now=0.0)
            bench.archive.wait()
            versions.append(bench.archive.load().version)
    assert versions == [3, 6]


def test_loaded_state_is_saved_although_no_update_is_made(make):
    bench = make(checkpoint_every="1000")
    bench.executor.load_optimizer_state(0, bench.optimizer.state_dict())
    bench.executor.save_if_overdue(1.0)
    bench.parts.checkpointer.tick(1.0)
    bench.archive.wait()
    assert bench.archive.load().version == 0
    bench.executor.save_if_overdue(2.0)
    assert bench.parts.checkpointer.checkpoint == 1  # the same as before


def test_version_is_saved_by_the_clock_although_no_update_is_made(make):
    bench = make(checkpoint_every="60s").join(0)
    bench.executor.save_if_overdue(1e9)  # the run began with this version: nothing to save
    assert bench.parts.checkpointer.checkpoint == 0
    bench.report(0, [1.0, 0.0])
    bench.perform(bench.update(), SendParams(0, 2, 1))
    assert bench.parts.checkpointer.checkpoint == 0
    bench.executor.save_if_overdue(60.0)
    assert bench.parts.checkpointer.checkpoint == 1


def test_worker_whose_gradient_waits_for_its_update_reports_where_that_turn_began(make):
    """The checkpoint doesn't contain its gradient, so a run that continues computes it again."""
    bench = make(checkpoint_every="60s", policy="backup:1").join(0, 1, 2)
    for worker in (0, 1):
        bench.report(worker, [1.0, 0.0])
    bench.perform(bench.update())
    bench.assign(0, 1, turn=2)
    bench.report(0, [1.0, 0.0])  # for update 2, which isn't made yet
    bench.executor.save_if_overdue(60.0)
    assert bench.inbox(0) == bench.inbox(1) == [messages.PositionRequest(1)]
    assert bench.inbox(2) == []  # idle: it is asked with its next turn
    assert bench.parts.checkpointer.wants_position(2) == 1


def test_restored_executor_continues_with_the_samples_and_options(make, capsys):
    bench = make(checkpoint_every="1").join(0)
    bench.executor.script_settings.set_options((OptionChange(0, 0, "lr", 0.25),), 3)
    bench.report(0, [1.0, 0.0], samples=6)
    bench.perform(bench.update())
    bench.parts.checkpointer.finish()
    saved = bench.archive.load()
    assert (saved.samples, saved.version) == (6, 1)
    other = make(checkpoint_every="1").join(0)
    other.parts.shard.load_state_dict(saved.version, saved.shard)
    other.executor.restore(saved)
    older = OptionChange(0, 0, "lr", 0.75)  # than the saved one
    other.executor.script_settings.set_options((older,), 2)
    assert other.optimizer.param_groups[0]["lr"] == 0.25
    other.perform(Resume())
    other.report(0, [1.0, 0.0])
    other.perform(other.update(), Finish(2))
    printed = capsys.readouterr().out
    assert "continuing at version 1" in printed
    assert "2 of 100 updates of 7 samples" in printed


# -------------------------------------------------------------------------------------- the end


def test_end_is_returned_and_sent_to_every_member(make, capsys):
    bench = make(steps=1).join(0, 1)
    bench.assign(0, 1)
    bench.parts.roster.park(bench.peer(1))
    bench.perform(Resume(), time=1.0)
    bench.report(0, [1.0, 0.0])
    bench.call_scheduler()
    bench.perform(bench.update(), time=3.0)
    unused = (Contribution(1, 0, 1),)
    end = bench.perform(Finish(1, unused), time=9.0).end
    assert (end.t, end.version, end.unused, end.reason) == (9.0, 1, (1,), FINISHED)
    notices = []
    for worker in (0, 1):  # the parked one too
        [ended] = bench.inbox(worker)
        assert isinstance(ended, messages.RunEnded)
        assert (ended.version, ended.scheduler_steps) == (1, (1,))
        views = bench.workers[worker].fetch(ended)
        assert views.parameters[0][0].flatten().tolist() == bench.weights
        notices.append(ended.notice)
    assert notices == [messages.FateNotice(Fate.ACCEPTED, 0, 0, 1), None]
    assert bench.exports == 1
    assert "1 updates of 1 samples in 2.0 s" in capsys.readouterr().out


def test_last_version_is_saved_with_the_positions_of_the_active_workers(make):
    bench = make(checkpoint_every="1000").join(0, 1)
    bench.report(0, [1.0, 0.0])
    bench.perform(bench.update(), Finish(1))
    for worker in (0, 1):
        [ended] = bench.inbox(worker)
        assert ended.position_wanted == 1
        bench.parts.checkpointer.take_position(worker, 1, b"end", now=0.0)
    bench.archive.wait()
    saved = bench.archive.load()
    assert (saved.version, saved.positions) == (1, {0: b"end", 1: b"end"})


@pytest.mark.parametrize(("version", "exports"), [(3, 1), (0, 0)])
def test_run_without_a_new_version_is_exported_unless_it_made_none(make, version, exports):
    """An earlier server may have been killed just before it wrote the result."""
    bench = make(steps=None, samples=5)
    bench.executor._first = version  # as if the run had been restored here
    bench.perform(Finish(version))
    assert bench.exports == exports


def test_worker_that_joins_after_the_end_is_told(make):
    bench = make(steps=1).join(0)
    bench.report(0, [1.0, 0.0])
    bench.perform(bench.update(), Finish(1))
    bench.join(1)
    bench.executor.send_end(bench.peer(1))
    [ended] = bench.inbox(1)
    assert ended.version == 1


@pytest.mark.parametrize(
    ("samples", "steps", "version", "reason"),
    [
        (None, 9, 9, FINISHED),
        (None, 9, 8, STOPPED),
        (7, None, 2, FINISHED),
        (8, None, 2, STOPPED),
        (None, None, 2, STOPPED),
    ],
)
def test_end_before_the_goal_is_a_stop(make, samples, steps, version, reason):
    bench = make(steps=steps, samples=samples).join(0)
    bench.report(0, [0.0, 0.0], samples=7)
    bench.perform(bench.update())
    assert bench.executor._reason_of_end(version) == reason
    bench.parts.failures.fail("out of memory")
    assert bench.executor._reason_of_end(version) == "out of memory"
