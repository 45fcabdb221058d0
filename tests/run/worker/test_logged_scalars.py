# SPDX-License-Identifier: BSD-3-Clause
"""Numbers that a worker's script logs, from the call to the update that has them."""

import pytest

from paceline.core.events import Fate
from paceline.run.worker.logged_scalars import LoggedScalars

DROPPED = [fate for fate in Fate if fate is not Fate.ACCEPTED]


def test_nothing_is_handed_in_if_nothing_was_logged():
    assert LoggedScalars().hand_in() == {}


def test_numbers_of_one_name_are_averaged():
    scalars = LoggedScalars()
    for value in (1.0, 2.0, 6.0):
        scalars.log("loss", value)
    scalars.log("accuracy", 0.5)
    assert scalars.hand_in() == {"loss": 3.0, "accuracy": 0.5}


def test_accepted_numbers_are_handed_in_once():
    scalars = LoggedScalars()
    scalars.log("loss", 1.0)
    scalars.hand_in()
    scalars.settle(Fate.ACCEPTED)
    assert scalars.hand_in() == {}


@pytest.mark.parametrize("fate", DROPPED)
def test_numbers_of_a_dropped_gradient_are_sent_with_the_next_one(fate):
    scalars = LoggedScalars()
    scalars.log("accuracy", 0.5)
    scalars.hand_in()
    scalars.settle(fate)
    scalars.log("loss", 2.0)
    assert scalars.hand_in() == {"accuracy": 0.5, "loss": 2.0}


def test_newer_numbers_replace_those_of_a_dropped_gradient():
    scalars = LoggedScalars()
    scalars.log("loss", 1.0)
    scalars.hand_in()
    scalars.settle(Fate.LATE)
    scalars.log("loss", 3.0)
    assert scalars.hand_in() == {"loss": 3.0}


def test_numbers_logged_before_the_fate_is_known_belong_to_the_next_gradient():
    scalars = LoggedScalars()
    scalars.log("loss", 1.0)
    scalars.hand_in()
    scalars.log("loss", 5.0)
    scalars.settle(Fate.ACCEPTED)
    assert scalars.hand_in() == {"loss": 5.0}


def test_numbers_of_a_lost_turn_are_forgotten_until_the_next_one_begins():
    scalars = LoggedScalars()
    scalars.log("accuracy", 0.5)
    scalars.hand_in()
    scalars.log("loss", 1.0)
    scalars.forget()
    scalars.log("loss", 2.0)  # about the turn that was lost
    assert scalars.hand_in() == {}
    scalars.begin()
    scalars.log("loss", 3.0)
    assert scalars.hand_in() == {"loss": 3.0}
