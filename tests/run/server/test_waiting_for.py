# SPDX-License-Identifier: BSD-3-Clause
"""Which workers a run waits for, and what the trace says about it."""

import pytest

from paceline.core.decider import Decider
from paceline.core.events import GradientArrived, StopRequested, WorkerJoined, WorkerLeft
from paceline.core.policies import parse_policy
from paceline.run.server.recorder import Recorder
from paceline.run.server.waiting_for import FIRST_S, LONG_S, USUAL, WaitingFor
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.trace.schema import Awaited, Header


class Run:
    """Decisions of a run with three workers, and the trace of its waits."""

    def __init__(self, folder, policy="sync", joined=range(3)):
        spec = RunSpec(workers=3, steps=100)
        self.decider = Decider(parse_policy(policy), spec)
        self.path = folder / "trace.jsonl"
        self.recorder = Recorder(self.path, Header.of("run", self.decider.policy, spec, {}))
        self.waiting = WaitingFor(self.decider, self.recorder)
        for worker in joined:
            self.decider.handle(WorkerJoined(0.0, worker))
        self.waiting.check(0.0)

    def report(self, t, *workers):
        """Let these workers finish their turns."""
        for worker in workers:
            member = self.decider.ledger.members[worker]
            work = member.work
            self.decider.handle(GradientArrived(t, worker, member.turn, work.version, 1))

    def recorded(self):
        self.recorder.flush()
        return [record for record in read_trace(self.path).records if isinstance(record, Awaited)]


@pytest.fixture
def make(tmp_path):
    made = []

    def run(*args, **options):
        made.append(Run(tmp_path, *args, **options))
        return made[-1]

    yield run
    for one in made:
        one.recorder.close()


def test_worker_is_waited_for_when_it_takes_long_and_others_have_reported(make):
    run = make()
    run.report(1.0, 0, 1, 2)
    run.report(2.0, 0, 2)
    assert run.waiting.check(1.0 + LONG_S - 0.1) == {}
    assert run.waiting.check(1.0 + LONG_S) == {1: 1.0}
    run.report(7.0, 1)
    assert run.waiting.check(7.0) == {}


def test_wait_is_long_compared_with_the_usual_one(make):
    run = make()
    for second in range(1, 41):
        if second % 10 == 0:
            run.report(float(second), 0, 1, 2)
        run.waiting.check(float(second))
    assert run.waiting.check(40.0 + USUAL * 10.0 - 0.1) == {}
    assert run.waiting.check(40.0 + USUAL * 10.0) == {0: 40.0, 1: 40.0, 2: 40.0}


def test_first_update_may_take_long(make):
    run = make()
    assert run.waiting.check(FIRST_S - 0.1) == {}
    assert run.waiting.check(FIRST_S) == {0: 0.0, 1: 0.0, 2: 0.0}


def test_updates_before_the_first_check_count_as_made(make):
    run = make()
    run.waiting = WaitingFor(run.decider, run.recorder)
    run.report(1.0, 0, 1, 2)
    assert run.waiting.check(1.0 + LONG_S) == {0: 1.0, 1: 1.0, 2: 1.0}


def test_rule_that_needs_fewer_workers_waits_only_for_those_that_still_count(make):
    run = make("backup:1")
    for update in range(1, 9):
        run.report(float(update), 0, 1)  # without worker 2, which hangs
    assert run.waiting.check(8.5) == {}
    run.report(9.0, 0)
    assert run.waiting.check(8.0 + LONG_S) == {1: 8.0}


def test_paused_or_finished_run_waits_for_nobody(make):
    run = make()
    for worker in range(3):
        run.decider.handle(WorkerLeft(1.0, worker, "gone"))
    assert run.waiting.check(1000.0) == {}


def test_trace_has_records_at_growing_intervals_until_the_wait_is_over(make):
    run = make()
    run.report(1.0, 0, 1, 2)
    run.report(2.0, 0, 2)
    for second in range(2, 30):
        run.waiting.check(float(second))
    run.report(30.0, 1)
    run.waiting.check(30.0)
    assert run.recorded() == [Awaited(t, 1, 1.0) for t in (6.0, 11.0, 21.0)]


def test_wait_after_a_machine_was_suspended_is_measured_by_the_usual_updates(make):
    run = make()
    for update in range(1, 5):
        run.report(float(update), 0, 1, 2)
        run.waiting.check(float(update))
    run.report(1000.0, 0, 1, 2)
    assert run.waiting.check(1000.0) == {}
    assert run.waiting.check(1000.0 + LONG_S) == {0: 1000.0, 1: 1000.0, 2: 1000.0}


def test_first_update_during_which_a_machine_was_suspended_is_not_usual(make):
    run = make()
    run.report(1000.0, 0, 1, 2)
    assert run.waiting.check(1000.0) == {}
    assert run.waiting.check(1000.0 + LONG_S) == {0: 1000.0, 1: 1000.0, 2: 1000.0}


def test_suspension_right_after_an_update_counts_for_neither_this_one_nor_the_next(make):
    run = make()
    run.report(0.6, 0, 1, 2)  # then the machine is suspended
    run.waiting.check(1000.0)
    run.report(1000.1, 0, 1, 2)
    assert run.waiting.check(1000.5) == {}
    assert run.waiting.check(1000.1 + LONG_S) == {0: 1000.1, 1: 1000.1, 2: 1000.1}


def test_worker_whose_old_turn_would_not_count_is_named_if_nobody_else_computes(make):
    """Another worker has stood in for worker 2, which hangs, and has left."""
    run = make()
    run.decider.handle(WorkerJoined(0.5, 7))
    run.report(1.0, 0, 1, 7)
    run.decider.handle(WorkerLeft(1.5, 7, "gone"))
    run.report(2.0, 0, 1)
    assert not run.decider.would_accept(2)
    assert run.waiting.check(1.0 + LONG_S) == {2: 0.0}


def test_workers_that_never_join_are_waited_for_before_the_run_begins(make):
    run = make(joined=[0, 2])
    assert run.waiting.check(FIRST_S - 0.1) == {}
    assert run.waiting.check(FIRST_S) == {1: 0.0}
    run.decider.handle(WorkerJoined(FIRST_S, 1))
    assert run.waiting.check(FIRST_S) == {}
    assert run.recorded() == []  # nobody was asked for a gradient


def test_nobody_is_waited_for_if_the_run_is_stopped_before_it_begins(make):
    run = make(joined=[0, 2])
    run.decider.handle(StopRequested(1.0))
    assert run.waiting.check(FIRST_S) == {}
