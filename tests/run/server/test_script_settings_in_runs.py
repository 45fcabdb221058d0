# SPDX-License-Identifier: BSD-3-Clause
"""A bad value in one worker costs only this worker; the run goes on and stays as it was."""

import pytest
import torch

from failures import joins_and_leaves, troubled
from paceline.trace.schema import FINISHED

BAD_VALUES = {
    "lr is text": (
        "optimizer.param_groups[0]['lr'] = '0.1'",
        "lr of parameter group 0 must be a finite number like 0.1, got '0.1'",
    ),
    "lr is NaN": (
        "optimizer.param_groups[0]['lr'] = float('nan')",
        "lr of parameter group 0 must be a finite number like 0.1, got nan",
    ),
    "lr is negative": (
        "optimizer.param_groups[0]['lr'] = -1.0",
        "lr of parameter group 0 can't be -1.0: Invalid learning rate: -1.0",
    ),
    "state of a wrong shape": (
        "state = optimizer.state_dict()\n"
        "        state['state'] = {0: {'momentum_buffer': torch.zeros(7)}}\n"
        "        optimizer.load_state_dict(state)",
        "the optimizer cannot load this state: momentum_buffer of",
    ),
}


UNSENDABLE = {
    "['lr'] = torch.ones(2)": "lr of parameter group 0 must be a finite number like 0.1, got tens",
    "['lr'] = 1j": "lr of parameter group 0 must be a finite number like 0.1, got 1j",
    "['nesterov'] = 'a', 'b'": "nesterov of parameter group 0 must be True, False or None, got (",
}


@pytest.mark.parametrize("value", UNSENDABLE)
def test_value_that_cannot_be_sent_ends_the_script_that_sets_it(launch, value):
    trouble = f"""
def trouble(run):
    if run.worker == 1 and run.version == 2:
        optimizer.param_groups[0]{value}
"""
    ran = launch(troubled(trouble), workers=2, steps=6)
    assert ran.trace.records[-1].reason == FINISHED
    assert [sorted(update.contributors) for update in ran.trace.updates()][2:] == [[0]] * 4
    assert f": {UNSENDABLE[value]}" in ran.err


@pytest.mark.parametrize("what", BAD_VALUES)
def test_bad_value_of_one_worker_costs_only_this_worker(launch, what):
    source, reason = BAD_VALUES[what]
    trouble = f"""
def trouble(run):
    if run.worker == 1 and run.version == 2:
        {source}
"""
    ran = launch(troubled(trouble), workers=2, steps=6)
    assert ran.trace.records[-1].reason == FINISHED
    assert [sorted(update.contributors) for update in ran.trace.updates()][2:] == [[0]] * 4
    [_, left] = joins_and_leaves(ran.trace, worker=1)
    assert left.startswith(f"broke the protocol: {reason}")
    assert f"the server refused worker 1: {reason}" in ran.err
    assert all(weight.isfinite().all() for weight in torch.load(ran.folder / "weights.pt").values())
