# SPDX-License-Identifier: BSD-3-Clause
"""The advice after runs of real processes."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli.end_of_run import report_lines
from paceline.trace.schema import Trace
from run_fixtures import Ran

Launch = Callable[..., Ran]

TRAIN = """
    run = paceline.join()
    model = nn.Linear(4, 1)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    while not run.finished:
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
"""

UPDATES = 36  # a plan needs 30


def advice(trace: Trace) -> str:
    """Return the last line of the report in one line."""
    return " ".join(report_lines(trace, Path("trace.jsonl"))[-1].split())


def test_following_the_advice_does_not_go_in_circles(launch: Launch) -> None:
    """The pilot waits for a slow worker; the run that doesn't is not told to change anything."""
    slow = "50ms; worker 3 x3"
    pilot = launch(TRAIN, workers=4, steps=UPDATES, policy="sync", latency=slow)
    assert "Judging by these times, backup:1 (waiting for 3 of 4 workers)" in advice(pilot.trace)

    follower = launch(TRAIN, workers=4, steps=UPDATES, policy="backup:1", latency=slow)

    assert "the best number of backups is 1: " in advice(follower.trace)


def test_no_advice_for_a_script_with_two_optimizers(launch: Launch) -> None:
    gan = """
    run = paceline.join()
    one, two = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (one, two)]
    one, two, *optimizers = run.prepare(one, two, *optimizers)
    while not run.finished:
        for model, optimizer in zip((one, two), optimizers):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    """
    ran = launch(gan, workers=2, steps=UPDATES)

    assert ran.trace.header.optimizers == 2
    assert "No advice on the number of backups: the script has 2 opt" in advice(ran.trace)


@pytest.mark.parametrize("is_busy", [True, False])
def test_no_advice_for_workers_that_share_a_core(is_busy: bool, launch: Launch) -> None:
    """Waiting needs no core, so workers that mostly wait can share it."""
    core = min(os.sched_getaffinity(0))
    preamble = f"""
    import os, time
    os.sched_setaffinity(0, {{{core}}})
    def compute():
        until = time.process_time() + 0.004
        while {is_busy} and time.process_time() < until:
            pass
    """
    script = preamble + TRAIN.replace("optimizer.zero_grad()", "optimizer.zero_grad(); compute()")

    ran = launch(script, workers=4, steps=UPDATES, latency="" if is_busy else "40ms; worker 3 x3")

    assert ran.trace.header.cores == 1
    if is_busy:
        assert min(gradient.cpu_s for gradient in ran.trace.gradients()) >= 0.004
        assert "No advice on the number of backups: the 4 workers share 1 core and" in advice(
            ran.trace
        )
    else:
        assert "Judging by these times, backup:1" in advice(ran.trace)
