# SPDX-License-Identifier: BSD-3-Clause
"""States that scripts load into their optimizers after `prepare` are not lost with a server.

Nothing is trained: the momentum, which halves in each update, tells what was loaded and when.
"""

import pytest

from failures import HELPERS, TRAINING
from paceline.run.launch import restarts
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
        optimizer.state_dict()  # so that we hear that our place is wanted
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


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 0.01)


@pytest.fixture
def comes_to(launch):
    def check(beginning, at, trouble, momentum, restored, **settings):
        """With this trouble at a version the run ends with this momentum."""
        source = SOURCE.replace("BEGINNING", beginning).replace("AT", str(at))
        source = source.replace("TROUBLE", trouble)
        ran = launch(source, steps=STEPS, restart=True, **settings)
        assert ran.code == 0, ran.err
        found = [record.version for record in ran.trace.records if isinstance(record, Restored)]
        assert found == [restored]
        assert [kept["momentum"] for kept in ran.kept.values()] == [momentum] * 2

    return check


def test_a_state_that_was_loaded_is_saved_with_the_next_update(comes_to):
    trouble = "wait_for_checkpoint(); kill_the_server()"
    comes_to("load(256.0)", 4, trouble, 1.0, restored=1, checkpoint_every="1000")


def test_a_state_that_was_loaded_is_saved_though_no_update_is_made(comes_to):
    """Both compute at version 0 until it is saved."""
    beginning = "load(256.0); run.is_first and not was_told('killed') and wait_for_checkpoint()"
    trouble = "wait_for_checkpoint(); kill_the_server()"
    comes_to(beginning, 0, trouble, 1.0, restored=0, checkpoint_every="1000")


@pytest.mark.parametrize(("every", "restored"), [("0", 0), ("2", 2)])
def test_who_gives_a_state_to_a_server_that_is_gone_gives_it_to_the_next(comes_to, every, restored):
    """Though that may have gone on from a later version than 0, where a newcomer's is ignored."""
    wait = "wait_for_checkpoint(); " if restored else ""
    trouble = f"{wait}load(256.0, kill_the_server)"
    momentum = 256.0 * 0.5 ** (STEPS - restored)
    comes_to("", 3, trouble, momentum, restored, checkpoint_every=every)
