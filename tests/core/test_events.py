# SPDX-License-Identifier: BSD-3-Clause
"""Events and actions are plain values."""

import inspect
from dataclasses import FrozenInstanceError

import pytest

from paceline.core import events
from paceline.core.events import (
    Action,
    ApplyUpdate,
    Contribution,
    Event,
    Fate,
    Finish,
    GradientArrived,
    SendParams,
    StopRequested,
    TimerFired,
    UpdateApplied,
    WorkAbandoned,
    WorkerJoined,
    WorkerLeft,
    WorkerMissing,
)

ONE_OF_EACH = [
    WorkerJoined(1.0, worker=0),
    WorkerLeft(1.0, worker=0, reason="killed"),
    WorkerMissing(1.0, worker=0, reason="it fails"),
    GradientArrived(1.0, worker=0, turn=1, version=0),
    WorkAbandoned(1.0, worker=0, turn=1),
    TimerFired(1.0, timer=1),
    UpdateApplied(1.0, update=1, sq_norm=0.5),
    StopRequested(1.0),
]


def test_fates_are_those_of_the_glossary():
    fates = {"accepted", "late", "stale", "duplicate", "cancelled", "non-finite"}
    assert {str(fate) for fate in Fate} == fates


def vocabulary(*kinds):
    """Return the classes of the module that derive from these."""
    classes = [value for value in vars(events).values() if inspect.isclass(value)]
    return {kind for kind in classes if issubclass(kind, kinds)}


def test_every_event_has_a_handler(decide):
    there_are = vocabulary(Event) - {Event}
    assert {type(event) for event in ONE_OF_EACH} == there_are
    assert decide("sync")._handlers.keys() == there_are


def test_every_public_name_of_the_vocabulary_is_exported():
    classes = vocabulary(Event, Action, Fate, Contribution)
    assert set(events.__all__) == {kind.__name__ for kind in classes}


@pytest.mark.parametrize("event", ONE_OF_EACH, ids=lambda event: type(event).__name__)
def test_event_is_a_value_whose_first_field_is_its_time(event):
    assert event.time == 1.0
    assert event == type(event)(*(getattr(event, name) for name in event.__match_args__))
    assert hash(event) == hash(type(event)(*(getattr(event, n) for n in event.__match_args__)))
    with pytest.raises(FrozenInstanceError):
        event.time = 2.0


def test_action_is_a_value():
    asked = SendParams(0, turn=1, version=0)
    assert asked == SendParams(0, 1, 0)
    assert asked != SendParams(0, 2, 0)
    with pytest.raises(FrozenInstanceError):
        asked.version = 7


def test_gradient_has_one_finite_sample_by_default():
    event = GradientArrived(1.0, worker=0, turn=1, version=0)
    assert (event.samples, event.finite, event.sq_norm) == (1, True, None)


def test_finish_has_no_unused_contributions_by_default():
    assert Finish(3) == Finish(3, unused=())


def test_staleness_counts_updates_since_the_gradients_version():
    update = ApplyUpdate(
        update=5,
        contributions=(Contribution(0, 4, 1), Contribution(1, 1, 1)),
        weights=(0.5, 0.5),
        scales=(1.0, 1.0),
        wanted=2,
    )
    assert update.staleness == (0, 3)
