# SPDX-License-Identifier: BSD-3-Clause
"""A run that is waiting for a worker saves its newest version all the same."""

import pytest

from failures import TRAINING, troubled
from paceline.trace.schema import Restored
from plain import train, weights

TROUBLE = """
def is_saved(version):
    return (OUT / "checkpoints" / f"{version:010}.ckpt").exists()

def trouble(run):
    if run.worker == 1 and run.version == 3 and not was_told("killed"):
        wait_until(lambda: is_saved(3))  # worker 0 has reported its gradient and waits
        tell("killed")
        os.kill(server_pid(), signal.SIGKILL)
"""


SCHEDULED_LOOP = """
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
run = paceline.join()
model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
while not run.finished:
    trouble(run)
    optimizer.zero_grad()
    loss_of(run.worker, run.version).backward()
    optimizer.step()
    scheduler.step()
keep(run, lr=optimizer.param_groups[0]["lr"])
"""


def test_run_continues_from_a_version_that_was_saved_while_a_worker_hung(launch):
    """The gradient that worker 0 had reported is lost with the server, and computed again."""
    ran = launch(troubled(TROUBLE), steps=6, restart=True, checkpoint_every="1s")
    assert ran.code == 0, ran.err
    [restored] = [record.version for record in ran.trace.records if isinstance(record, Restored)]
    assert restored == 3
    expected = weights(train(TRAINING, 6))
    for kept in ran.kept.values():
        for mine, theirs in zip(kept["weights"], expected, strict=True):
            assert mine.allclose(theirs)


def test_turns_that_are_computed_again_do_not_step_a_scheduler_twice(launch):
    source = troubled(TROUBLE, SCHEDULED_LOOP)
    ran = launch(source, steps=6, restart=True, checkpoint_every="1s")
    assert ran.code == 0, ran.err
    assert any(isinstance(record, Restored) for record in ran.trace.records)
    for kept in ran.kept.values():
        assert kept["lr"] == pytest.approx(0.1 * 0.5**6)
