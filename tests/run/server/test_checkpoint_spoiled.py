# SPDX-License-Identifier: BSD-3-Clause
"""A version from which no run can continue is not saved: the checkpoints before it stay."""

import pytest

from executor_bench import ExecutorBench
from failures import troubled
from paceline.core.events import Finish
from paceline.run.settings import Settings
from paceline.spec import RunSpec

NAN = float("nan")


@pytest.fixture
def bench(tmp_path):
    settings = Settings(spec=RunSpec(workers=1, steps=3), checkpoint_every="1")
    return ExecutorBench(settings, tmp_path).join(0)


def update(bench):
    bench.report(0, [1.0, 0.0])
    bench.perform(bench.update())
    bench.parts.checkpointer.finish()


def spoil(bench):
    bench.parts.shard.newest.views.parameters[0][0].fill_(NAN)


def newest(bench):
    return bench.archive.load().version


REASON = (
    "parameter 'weight' contains NaN or infinity in version {}, but not in the checkpoint of "
    "version 1; resume the run from it and set a lower learning rate after run.prepare()"
)


def test_spoiled_version_is_not_saved_and_fails_the_run(bench):
    update(bench)
    spoil(bench)
    update(bench)
    assert newest(bench) == 1
    bench.executor.save_if_overdue(5.0)
    assert bench.parts.failures.failure == REASON.format(2)


def test_spoiled_last_version_is_not_saved_or_exported(bench):
    update(bench)
    spoil(bench)
    end = bench.perform(Finish(3, ())).end
    bench.parts.checkpointer.finish()
    assert end.reason == REASON.format(3)
    assert (newest(bench), bench.exports) == (1, 0)


def test_spoiled_last_version_is_mentioned_if_the_run_fails_for_another_reason(bench, capsys):
    update(bench)
    spoil(bench)
    bench.parts.failures.fail("no hope")
    assert bench.perform(Finish(3, ())).end.reason == "no hope"
    assert REASON.format(3) in capsys.readouterr().out
    assert bench.exports == 0


def test_spoiled_first_version_says_that_there_is_no_checkpoint(bench):
    spoil(bench)
    reason = bench.perform(Finish(3, ())).end.reason
    assert reason.endswith("and there is no checkpoint; lower the learning rate and start again")


DIVERGES = """
def explode(optimizer, args, kwargs):
    if ROLE == "server" and (OUT / "explode.word").exists():
        next(model.parameters()).data.fill_(float("nan"))

optimizer.register_step_post_hook(explode)

def trouble(run):
    if run.is_first and run.version == 4:
        wait_until(lambda: list((OUT / "checkpoints").glob("*.ckpt")))
        tell("explode")
"""


def test_run_whose_parameters_become_nan_keeps_its_good_checkpoint(launch):
    ran = launch(troubled(DIVERGES), workers=2, steps=2000, checkpoint_every="2")
    assert ran.code == 1
    assert not (ran.folder / "weights.pt").exists()
    kept = [int(path.stem) for path in (ran.folder / "checkpoints").glob("*.ckpt")]
    assert kept
    assert max(kept) <= 4
    assert "contains NaN or infinity in version" in ran.err + ran.out
    assert f"but not in the checkpoint of version {max(kept)}" in ran.err + ran.out
