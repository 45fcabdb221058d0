# SPDX-License-Identifier: BSD-3-Clause
"""Curves of logged scalars, and targets."""

from math import inf

import msgspec
import pytest

from paceline.core.events import Fate
from paceline.core.policies import parse_policy
from paceline.errors import SpecError
from paceline.spec import RunSpec
from paceline.trace.schema import Gradient, Header, Joined, Restored, Resumed, Trace, Update
from paceline.watch.curves import Point, Target, curve, final, logged, smoothed

HEADER = Header.of("run", parse_policy("sync"), RunSpec(workers=1), {})


def gradient(t, version, fate=Fate.ACCEPTED):
    return Gradient(t, 0, version + 1, version, fate, 0, t - 1, 1.0, samples=4)


def update(t, number, **scalars):
    return Update(t, number, (0,), 1, scalars=scalars)


RISING = Trace(
    HEADER,
    [
        Joined(1.0, 0),
        Resumed(2.0),
        gradient(3.0, 0),
        update(3.0, 1, accuracy=0.5, loss=2.0),
        gradient(3.5, 1, Fate.NON_FINITE),
        gradient(4.0, 1),
        update(4.0, 2, loss=1.0),
        gradient(5.0, 2),
        update(5.0, 3, accuracy=0.9, loss=None),
    ],
)


def test_curve_has_times_since_the_beginning_and_samples():
    assert curve(RISING, "accuracy") == [Point(1.0, 4, 0.5), Point(3.0, 12, 0.9)]
    assert curve(RISING, "loss") == [Point(1.0, 4, 2.0), Point(2.0, 8, 1.0)]
    assert curve(RISING, "other") == []
    assert logged(RISING) == {"accuracy", "loss"}


def test_samples_that_several_gradients_use_count_once():
    again = msgspec.structs.replace(gradient(6.0, 3), new_samples=0)
    trace = Trace(HEADER, [*RISING.records, again, update(6.0, 4, accuracy=0.9)])
    assert [point.samples for point in curve(trace, "accuracy")] == [4, 12, 12]


def test_lost_updates_are_not_in_the_curve():
    again = [Restored(5.0, 1, HEADER), Joined(5.1, 0), Resumed(5.2), gradient(6.0, 1)]
    trace = Trace(HEADER, [*RISING.records, *again, update(6.0, 2, accuracy=0.7)])
    assert [point.value for point in curve(trace, "accuracy")] == [0.5, 0.7]


def test_smoothed_value_is_the_mean_around_the_point():
    points = [Point(float(n), n, float(n % 2)) for n in range(100)]
    smooth = smoothed(points, 0.04)  # two to each side
    assert [point.t for point in smooth] == [point.t for point in points]
    assert smooth[50].value == pytest.approx(0.4)
    assert smooth[0].value == points[0].value
    assert smooth[1].value == pytest.approx(1 / 3)
    assert smooth[-1].value == pytest.approx(2 / 3)


def test_spike_is_smoothed_only_where_it_is():
    points = [Point(float(n), n, 1e30 if n == 50 else 1.0) for n in range(100)]
    smooth = smoothed(points, 0.04)
    assert [n for n, point in enumerate(smooth) if point.value != 1.0] == [48, 49, 50, 51, 52]


def test_short_curve_is_not_smoothed():
    points = [Point(float(n), n, float(n % 2)) for n in range(49)]
    assert smoothed(points, 0.04) == points


def test_final_value_is_the_median_of_the_last_few():
    records = [update(float(n), n, x=x) for n, x in enumerate([9, 9, 9, 1, 2, 3, 4, 100], start=1)]
    trace = Trace(HEADER, [Joined(0.0, 0), Resumed(0.0), *records])
    assert final(trace, "x") == 3
    assert final(trace, "y") is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("accuracy>=0.5", 1.0), (" accuracy >= 0.8", 3.0), ("loss<=1", 2.0), ("accuracy>=0.95", inf)],
)
def test_target_is_reached_when_it_is_first_met(text, seconds):
    assert Target.parse(text).reached_at(RISING) == seconds


@pytest.mark.parametrize("text", ["", "accuracy", "accuracy=0.9", ">=0.9", "loss<=much"])
def test_malformed_target_is_refused(text):
    with pytest.raises(SpecError):
        Target.parse(text)


def test_target_is_shown_as_it_was_parsed():
    assert str(Target.parse("accuracy>=0.950")) == "accuracy >= 0.95"
