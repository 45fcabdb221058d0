# SPDX-License-Identifier: BSD-3-Clause
"""Logged scalars are averaged by samples, and reach the trace even if their gradient is late."""

from math import inf, isnan, nan

import pytest

from paceline.core.events import Fate
from paceline.run.server.scalar_averages import ScalarAverages
from paceline.run.worker.logged_scalars import LoggedScalars


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([], {}),
        ([(4, {})], {}),
        ([(4, {"loss": 2.0})], {"loss": 2.0}),
        ([(1, {"loss": 2.0}), (3, {"loss": 6.0})], {"loss": 5.0}),
        ([(1, {"loss": 2.0}), (3, {"accuracy": 6.0})], {"loss": 2.0, "accuracy": 6.0}),
        ([(1, {"a": 1.0, "b": 2.0}), (1, {"b": 4.0, "a": 3.0})], {"a": 2.0, "b": 3.0}),
        ([(1, {"loss": 2.0}), (1, {"loss": inf})], {"loss": inf}),
    ],
)
def test_scalars_are_averaged_by_samples_over_the_workers_that_logged_them(given, found):
    scalars = ScalarAverages()
    scalars.give(8, 5, {"loss": -1.0})  # for another update
    for samples, logged in given:
        scalars.give(7, samples, logged)
    assert scalars.take(7) == found
    assert scalars.take(7) == {}
    assert scalars.take(8) == {"loss": -1.0}


def test_logged_nan_is_kept():
    scalars = ScalarAverages()
    scalars.give(1, 1, {"loss": nan})
    scalars.give(1, 1, {"loss": 1.0})
    assert isnan(scalars.take(1)["loss"])


# ---------------------------------------------------------------------------- the worker's side


def test_values_of_one_name_are_averaged_and_sent_with_one_gradient():
    logged = LoggedScalars()
    logged.log("loss", 1.0)
    logged.log("loss", 3.0)
    assert logged.hand_in() == {"loss": 2.0}
    logged.settle(Fate.ACCEPTED)
    assert logged.hand_in() == {}


@pytest.mark.parametrize("fate", [fate for fate in Fate if fate is not Fate.ACCEPTED])
def test_scalars_of_a_dropped_gradient_are_sent_again_unless_there_are_newer_ones(fate):
    logged = LoggedScalars()
    logged.log("accuracy", 0.9)
    logged.log("loss", 1.0)
    logged.hand_in()
    logged.settle(fate)
    logged.log("loss", 0.5)
    assert logged.hand_in() == {"accuracy": 0.9, "loss": 0.5}
    logged.settle(Fate.ACCEPTED)
    assert logged.hand_in() == {}


def test_scalars_of_a_late_gradient_are_in_the_trace_with_the_next_one(launch):
    """Worker 1 logs once, at version 0; that gradient is late, and its next one makes update 2."""
    ran = launch(
        """
import time

def wait_for(word):
    while not (OUT / word).exists():
        time.sleep(0.002)

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
while not run.finished:
    if run.worker == 1 and run.version == 0:
        run.log(loss=7.0)
        (OUT / "computes").touch()
        wait_for("at-1")
    elif run.worker == 0 and run.version == 0:
        wait_for("computes")
    elif run.worker == 0:
        (OUT / "at-1").touch()  # the update was made without worker 1
        wait_for("over")
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
(OUT / "over").touch()
""",
        policy="backup:1",
        steps=2,
    )
    assert ran.code == 0
    assert [update.scalars for update in ran.trace.updates()] == [{}, {"loss": 7.0}]
