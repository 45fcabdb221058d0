# SPDX-License-Identifier: BSD-3-Clause
"""What a worker logs reaches the trace, also when its gradient does not."""

import pytest

from paceline.core.events import Fate
from paceline.run.worker.logged_scalars import LoggedScalars


def test_several_of_a_name_are_averaged_and_go_with_one_gradient_only():
    logged = LoggedScalars()
    logged.log("loss", 1.0)
    logged.log("loss", 3.0)
    assert logged.hand_in() == {"loss": 2.0}
    logged.settle(Fate.ACCEPTED)
    assert logged.hand_in() == {}


@pytest.mark.parametrize("fate", [fate for fate in Fate if fate is not Fate.ACCEPTED])
def test_what_went_with_a_dropped_gradient_goes_with_the_next_unless_there_is_newer(fate):
    logged = LoggedScalars()
    logged.log("accuracy", 0.9)
    logged.log("loss", 1.0)
    logged.hand_in()
    logged.settle(fate)
    logged.log("loss", 0.5)
    assert logged.hand_in() == {"accuracy": 0.9, "loss": 0.5}
    logged.settle(Fate.ACCEPTED)
    assert logged.hand_in() == {}


def test_what_is_logged_with_a_late_gradient_is_in_the_trace_with_the_next_one(launch):
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
        run.log(said=7.0)
        (OUT / "computes").touch()
        wait_for("at-1")
    elif run.worker == 0 and run.version == 0:
        wait_for("computes")
    elif run.worker == 0:
        (OUT / "at-1").touch()  # the update was made without the other
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
    assert [update.scalars for update in ran.trace.updates()] == [{}, {"said": 7.0}]
