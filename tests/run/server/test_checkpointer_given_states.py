# SPDX-License-Identifier: BSD-3-Clause
"""States that scripts load into their optimizers after `prepare` survive the loss of a server.

Nothing is trained: the momentum halves with each update, so it shows what was loaded and when.
"""

import pytest

from failures import HELPERS, TRAINING
from paceline.trace.schema import Restored

STEPS = 8

SOURCE = (
    HELPERS
    + TRAINING.replace("lr=0.1)", "lr=0.0, momentum=0.5)")
    + """
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)

def load(momentum, meanwhile=lambda: None):
    state = optimizer.state_dict()
    shapes = enumerate(model.parameters())
    state["state"] = {i: {"momentum_buffer": torch.full_like(p, momentum)} for i, p in shapes}
    meanwhile()
    optimizer.load_state_dict(state)

def wait_for_checkpoint():
    def is_there():
        optimizer.state_dict()  # so that this worker receives the request for its position
        return list((OUT / "checkpoints").glob("*.ckpt"))
    wait_until(is_there)

def kill_the_server():
    tell("killed")
    os.kill(server_pid(), signal.SIGKILL)

BEGINNING
while not run.finished:
    if run.version == AT and run.worker == 1 and not was_told("killed"):
        TROUBLE
    optimizer.zero_grad()
    (loss_of(run.worker, run.version) * 0.0).backward()
    optimizer.step()
momentum = optimizer.state_dict()["state"][0]["momentum_buffer"]
keep(run, momentum=float(momentum.max()))
"""
)


@pytest.fixture
def ends_with(launch):
    def check(beginning, at, trouble, momentum, restored, **settings):
        """Check that a run with this trouble at this version ends with this momentum."""
        source = SOURCE.replace("BEGINNING", beginning).replace("AT", str(at))
        source = source.replace("TROUBLE", trouble)
        ran = launch(source, steps=STEPS, restart=True, **settings)
        assert ran.code == 0, ran.err
        found = [record.version for record in ran.trace.records if isinstance(record, Restored)]
        assert found == [restored]
        assert [kept["momentum"] for kept in ran.kept.values()] == [momentum] * 2

    return check


def test_loaded_state_is_saved_with_the_next_update(ends_with):
    trouble = "wait_for_checkpoint(); kill_the_server()"
    ends_with("load(256.0)", 4, trouble, 1.0, restored=1, checkpoint_every="1000")


def test_loaded_state_is_saved_even_if_no_update_is_made(ends_with):
    """Both compute at version 0 until it is saved."""
    beginning = "load(256.0); run.is_first and not was_told('killed') and wait_for_checkpoint()"
    trouble = "wait_for_checkpoint(); kill_the_server()"
    ends_with(beginning, 0, trouble, 1.0, restored=0, checkpoint_every="1000")


@pytest.mark.parametrize(("every", "restored"), [("0", 0), ("2", 2)])
def test_state_uploaded_to_a_lost_server_is_uploaded_to_the_next(ends_with, every, restored):
    """The next one may continue from a version above 0, where a late worker's upload is ignored."""
    wait = "wait_for_checkpoint(); " if restored else ""
    trouble = f"{wait}load(256.0, kill_the_server)"
    momentum = 256.0 * 0.5 ** (STEPS - restored)
    ends_with("", 3, trouble, momentum, restored, checkpoint_every=every)
