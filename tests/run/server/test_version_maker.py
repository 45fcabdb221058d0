# SPDX-License-Identifier: BSD-3-Clause
"""Updates that aren't finite: which worker is to blame, and when the run fails."""

from math import inf, nan, sqrt

import pytest

from executor_bench import ExecutorBench
from paceline.core.events import Finish, SendParams
from paceline.run.server.run_failure import SKIPPED_MAX
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from paceline.trace.schema import FINISHED

HUGE = 3e38  # finite, but the sum of two isn't


@pytest.fixture
def make(tmp_path):
    def bench(workers=2, steps=1000, **options):
        spec = RunSpec(workers=workers, steps=steps)
        return ExecutorBench(Settings(spec=spec, checkpoint_every="0", **options), tmp_path)

    return bench


def refused(bench):
    """Return the workers that are to leave the run, and what they are told."""
    numbers = {peer.end: peer.worker for peer in bench.parts.roster.members}
    return {numbers[end]: told for end, _, told in bench.parts.roster.take_broken()}


def test_clipping_leaves_small_gradients_bit_for_bit_unchanged(make):
    versions = make(clip_norm=2.0).executor._versions
    assert versions._clipping(4.0) == 1.0
    assert versions._clipping(0.0) == 1.0
    assert versions._clipping(16.0) == pytest.approx(0.5)
    assert versions._clipping(1e300) * sqrt(1e300) == pytest.approx(2.0)


@pytest.mark.parametrize("bad", [nan, inf])
@pytest.mark.parametrize("early", [True, False])
def test_worker_whose_gradient_is_not_as_it_reported_leaves_the_run(make, bad, early):
    bench = make(workers=3).join(0, 1, 2)
    before = bench.weights
    for worker, value in ((0, 1.0), (1, bad), (2, 2.0)):
        bench.report(worker, [0.0, value])
    if early:
        bench.parts.shard.sum_early(1, inf)
    made = bench.perform(bench.update()).made[1]
    assert (made.sq_norm, made.skipped) == (None, True)
    assert bench.weights == before
    [(worker, told)] = refused(bench).items()
    assert worker == 1
    assert told.startswith("its gradient contains NaN or infinity, but its report said")


def test_nobody_is_to_blame_for_the_overflow_of_a_sum(make, capsys):
    bench = make().join(0, 1)
    for worker in (0, 1):
        bench.report(worker, [HUGE, 0.0])
    assert bench.perform(bench.update()).made[1].skipped
    assert refused(bench) == {}
    assert "update 1 is not finite: the optimizer did not step" in capsys.readouterr().out


def test_worker_that_goes_on_before_the_update_is_found_when_it_does_it_again(make):
    """Under softsync its slot is in use again, so the first time nobody can tell."""
    bench = make(policy="softsync:2").join(0, 1)
    found = []
    for update in (1, 2, 3):
        for worker, value in ((0, 1.0), (1, nan if update < 3 else 1.0)):
            bench.report(worker, [0.0, value])
            bench.perform(SendParams(worker, update, update - 1))
        bench.perform(bench.update())
        found.append(list(refused(bench)))
    assert found == [[], [1], []]


def test_worker_that_has_left_is_not_refused(make):
    bench = make().join(0, 1)
    bench.parts.shard._is_wary = True
    bench.report(0, [0.0, 1.0])
    bench.report(1, [0.0, nan])
    bench.parts.shard.release_slot(1)
    bench.parts.roster.remove(bench.peer(1))
    assert bench.perform(bench.update()).made[1].skipped
    assert refused(bench) == {}


def overflow(bench, updates):
    for _ in range(updates):
        for worker in (0, 1):
            bench.report(worker, [HUGE, 0.0])
        bench.perform(bench.update())


def test_run_fails_after_many_updates_in_a_row_that_did_not_step(make):
    bench = make().join(0, 1)
    overflow(bench, SKIPPED_MAX - 1)
    bench.report(0, [1.0, 0.0])
    bench.perform(bench.update())
    overflow(bench, SKIPPED_MAX - 1)
    assert bench.parts.failures.failure == ""
    overflow(bench, 1)
    assert bench.parts.failures.failure.startswith("the last 100 updates did not step")


@pytest.mark.parametrize("steps", [0, 1])
def test_run_that_reaches_its_goal_without_a_step_fails(make, steps):
    bench = make(steps=3).join(0, 1)
    overflow(bench, 3 - steps)
    for _ in range(steps):
        bench.report(0, [1.0, 0.0])
        bench.perform(bench.update())
    end = bench.perform(Finish(3, ())).end
    if steps:
        assert end.reason == FINISHED
    else:
        assert end.reason.startswith("none of the 3 updates changed the parameters")


def test_checkpoint_has_the_number_of_updates_without_a_step(make):
    bench = make(steps=3).join(0, 1)
    overflow(bench, 2)
    saved = bench.executor._saved()
    other = make(steps=3).join(0, 1)
    other.parts.shard.load_state_dict(2, saved.shard)
    other.executor.restore(saved)
    overflow(other, 1)
    assert other.perform(Finish(3, ())).end.reason.startswith("none of the 3 updates")
