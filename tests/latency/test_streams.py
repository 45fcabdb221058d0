# SPDX-License-Identifier: BSD-3-Clause
"""Streams of times: seeds, factors, slow phases and recordings."""

import pickle
from dataclasses import dataclass, replace
from math import exp, inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import SpecError
from paceline.latency import (
    Constant,
    Distribution,
    Exponential,
    Latency,
    Phases,
    Recorded,
    Sometimes,
    Sum,
    TimeModel,
    parse_latency,
)

# ---- streams ----

MODELS: list[TimeModel] = [
    parse_latency("50ms + 5% exp:500ms + exp:1ms; worker 1 x2.2"),
    parse_latency("90% exp:50ms | 10% pareto:1s,2"),
    Recorded({w: np.random.default_rng(w).random(300) for w in range(3)}),
    Recorded({w: np.random.default_rng(w).random(2000) for w in range(3)}, block=700),
]
each_model = pytest.mark.parametrize(
    "model", MODELS, ids=["sum", "mixture", "recorded", "long blocks"]
)


@each_model
@settings(max_examples=20)
@given(sizes=st.lists(st.integers(0, 300), max_size=4))
def test_times_do_not_depend_on_how_they_are_requested(model: TimeModel, sizes: list[int]) -> None:
    stream = model.stream(2, seed=5)
    got: list[float] = []
    for size in sizes:
        got += stream.draws(size).tolist()
        got.append(stream.take(float(len(got))))
    assert got == model.stream(2, seed=5).draws(len(got)).tolist()


@each_model
def test_times_depend_on_the_seed_and_the_worker(
    model: TimeModel,
) -> None:
    times = model.stream(0, seed=5).draws(600)
    assert (model.stream(0, seed=5).draws(600) == times).all()
    for other in (model.stream(0, seed=6), model.stream(1, seed=5)):
        values = other.draws(600)
        assert np.mean(values == times) < 0.05
        assert abs(np.corrcoef(np.argsort(values), np.argsort(times))[0, 1]) < 0.15


@each_model
def test_mean_matches_the_times(model: TimeModel) -> None:
    assert model.is_stationary
    for worker in (0, 1):
        times = model.stream(worker, seed=5).draws(100_000)
        assert times.mean() == pytest.approx(model.mean(worker), rel=0.03)


def test_seed_larger_than_a_word_is_not_a_small_seed_of_another_worker() -> None:
    latency = Latency(Exponential(1))
    large, small = latency.stream(5, seed=2**32), latency.stream(1, seed=0)
    assert not (large.draws(10) == small.draws(10)).any()


def test_factor_multiplies_the_times_of_its_worker_only() -> None:
    plain = Latency(Exponential(1))
    slowed = Latency(Exponential(1), factors=((4, 0.5), (1, 2.0)))
    assert [slowed.factor(worker) for worker in range(6)] == [1, 2, 1, 1, 0.5, 1]
    for worker in range(6):
        expected = plain.stream(worker, 0).draws(300) * slowed.factor(worker)
        assert (slowed.stream(worker, 0).draws(300) == expected).all()


@dataclass(frozen=True)
class Undrawable(Distribution):
    """Fail the test if anything is drawn."""

    def mean(self) -> float:
        return 1.0

    def __str__(self) -> str:
        return "undrawable"

    def _draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        raise AssertionError("drawn before the first question")


def test_ten_thousand_streams_are_made_without_drawing_anything() -> None:
    everyone = tuple(range(10_000))
    latency = Latency(
        Undrawable(), tuple((worker, 2.0) for worker in everyone), (Phases(3, 5, 60, everyone),)
    )
    streams = [latency.stream(worker, seed=0) for worker in everyone]
    with pytest.raises(AssertionError, match="before the first question"):
        streams[-1].take(0.0)


def test_latency_and_recording_can_be_sent_to_another_process() -> None:
    for model in (parse_latency("exp:1s; worker 1 x2; phases x3 for 5s every 60s"), MODELS[2]):
        copy = pickle.loads(pickle.dumps(model))
        assert copy.stream(1, 0).take(0.0) == model.stream(1, 0).take(0.0)


# ---- phases ----

PHASES = Phases(factor=3, lasting=5, every=15)


def slowness(latency: Latency, worker: int, starts: np.ndarray) -> np.ndarray:
    """Return for each start whether a computation that normally takes 1 s is slow."""
    stream = latency.stream(worker, seed=11)
    times = np.array([stream.take(start) for start in starts.tolist()])
    assert set(times) <= {1.0, 3.0}
    return times == 3.0


def test_slow_phases_have_their_share_of_time_and_their_correlation() -> None:
    latency = Latency(Constant(1), phases=(PHASES,))
    slow = np.array([slowness(latency, worker, np.arange(12_000.0)) for worker in range(8)])
    assert PHASES.share == 0.25
    assert slow.mean() == pytest.approx(0.25, abs=0.015)
    # Two states with these mean lengths forget at the rate 1/5 + 1/15 a second.
    for lag in (1, 3):
        correlation = np.corrcoef(slow[:, lag:].ravel(), slow[:, :-lag].ravel())[0, 1]
        assert correlation == pytest.approx(exp(-lag * (1 / 5 + 1 / 15)), abs=0.03)
    assert abs(np.corrcoef(slow[0], slow[1])[0, 1]) < 0.1


def test_slow_and_normal_phases_have_their_mean_lengths() -> None:
    latency = Latency(Constant(1), phases=(Phases(3, lasting=50, every=150),))
    slow = slowness(latency, 0, np.arange(60_000.0))
    changes = np.flatnonzero(np.diff(slow)) + 1
    lengths = np.diff(changes)
    first_is_slow = bool(slow[changes[0]])
    assert lengths[0 if first_is_slow else 1 :: 2].mean() == pytest.approx(50, rel=0.2)
    assert lengths[1 if first_is_slow else 0 :: 2].mean() == pytest.approx(150, rel=0.2)


def test_first_computation_is_slow_as_often_as_any_other() -> None:
    latency = Latency(Constant(1), phases=(PHASES,))
    first = [latency.stream(worker, seed=3).take(0.0) == 3 for worker in range(1200)]
    assert np.mean(first) == pytest.approx(0.25, abs=0.04)


def test_slow_phases_are_independent_of_the_times_they_multiply() -> None:
    latency = Latency(Sum((Constant(1), Sometimes(0.25, Constant(10)))), phases=(PHASES,))
    first = np.array([latency.stream(worker, seed=3).take(0.0) for worker in range(600)])
    slow, long = np.isin(first, (3, 33)), first >= 11
    assert set(first) == {1, 3, 11, 33}
    assert abs(np.corrcoef(slow, long)[0, 1]) < 0.15


def test_worker_after_a_very_long_gap_is_slow_as_often_as_any_other() -> None:
    latency = Latency(Constant(1), phases=(PHASES,))
    slow = slowness(latency, 0, np.arange(3000) * 1e9)
    assert slow.mean() == pytest.approx(0.25, abs=0.035)
    assert abs(np.corrcoef(slow[1:], slow[:-1])[0, 1]) < 0.08


def test_phases_shorter_than_the_resolution_of_the_time_do_not_hang() -> None:
    latency = Latency(Constant(1), phases=(Phases(3, 1e-3, 3e-3),))
    start, resolution = 1e15, 0.125
    slow = slowness(latency, 0, start + resolution * np.arange(1000))
    assert slow.mean() == pytest.approx(0.25, abs=0.06)


def test_state_at_a_time_does_not_depend_on_earlier_calls() -> None:
    latency = Latency(Constant(1), phases=(PHASES,))
    starts = np.arange(4000.0)
    assert (slowness(latency, 0, starts)[::16] == slowness(latency, 0, starts[::16])).all()


def test_phases_multiply_the_same_times_on_their_workers_only() -> None:
    plain = Latency(Exponential(1))
    phased = replace(plain, phases=(replace(PHASES, workers=(2, 0)), Phases(7, 5, 5, (1,))))
    assert plain.is_stationary
    assert not phased.is_stationary
    for worker, factors in ((0, {1, 3}), (1, {1, 7}), (2, {1, 3}), (3, {1})):
        stream = phased.stream(worker, seed=0)
        ratios = [
            stream.take(float(start)) / time
            for start, time in enumerate(plain.stream(worker, seed=0).draws(400))
        ]
        assert {round(ratio, 9) for ratio in ratios} == factors


def test_phases_of_other_workers_change_nothing_for_a_worker() -> None:
    alone = Latency(Constant(1), phases=(PHASES,))
    among = Latency(Constant(1), phases=(Phases(7, 5, 5, (1,)), PHASES, Phases(9, 1, 2, (2,))))
    starts = np.arange(200.0)
    assert (slowness(alone, 0, starts) == slowness(among, 0, starts)).all()


def test_phases_of_two_kinds_multiply() -> None:
    latency = Latency(Constant(1), phases=(Phases(3, 5, 5), Phases(7, 5, 5)))
    stream = latency.stream(0, seed=0)
    assert {stream.take(float(start)) for start in range(400)} == {1, 3, 7, 21}
    assert latency.mean(0) == pytest.approx(2 * 4)


def test_times_with_phases_need_their_starts() -> None:
    stream = Latency(Constant(1), phases=(PHASES,)).stream(0, 0)
    with pytest.raises(SpecError, match="depend on their starts"):
        stream.draws(1)


def test_mean_with_phases_is_that_at_a_random_time() -> None:
    latency = parse_latency("exp:2s; worker 1 x2; phases x3 for 5s every 15s on worker 1")
    assert latency.mean(0) == 2
    assert latency.mean(1) == pytest.approx(2 * 2 * (0.75 + 3 * 0.25))


# ---- slow together ----

TOGETHER = replace(PHASES, together=True)
long_and_short_gaps = st.lists(st.floats(0, 50) | st.floats(0, 1e5), max_size=40)


@given(one=long_and_short_gaps, other=long_and_short_gaps, seed=st.integers(0, 3))
def test_workers_are_slow_together_whenever_they_start(one, other, seed) -> None:
    """The state at a time depends neither on the worker nor on its starts before."""
    latency = Latency(Constant(1), phases=(TOGETHER,))
    starts = [np.cumsum(one), np.cumsum(other)]
    everything = np.unique(np.concatenate(starts))
    stream = latency.stream(2, seed)
    expected = {start: stream.take(start) for start in everything.tolist()}
    for worker, own in enumerate(starts):
        stream = latency.stream(worker, seed)
        for start in own.tolist():
            assert stream.take(start) == expected[start]


def test_workers_that_are_slow_together_are_slow_for_their_share_of_the_time() -> None:
    latency = Latency(Constant(1), phases=(TOGETHER,))
    slow = slowness(latency, 5, np.arange(100_000.0))  # five segments of 1000 cycles
    assert slow.mean() == pytest.approx(0.25, abs=0.015)
    correlation = np.corrcoef(slow[1:], slow[:-1])[0, 1]
    assert correlation == pytest.approx(exp(-(1 / 5 + 1 / 15)), abs=0.03)
    first = [latency.stream(0, seed).take(0.0) == 3 for seed in range(1200)]
    assert np.mean(first) == pytest.approx(0.25, abs=0.04)
    far = slowness(latency, 0, np.arange(2000) * 1e9)
    assert far.mean() == pytest.approx(0.25, abs=0.04)


def test_only_the_named_workers_are_slow_together() -> None:
    latency = parse_latency("1s; phases x3 for 5s every 15s on workers 0,2 together")
    starts = np.arange(2000.0)
    slow = [slowness(latency, worker, starts) for worker in range(3)]
    assert (slow[0] == slow[2]).all()
    assert slow[0].any()
    assert not slow[1].any()
    assert latency.mean(0) == pytest.approx(1.5)


def test_two_kinds_of_shared_phases_are_independent() -> None:
    latency = Latency(Constant(1), phases=(TOGETHER, replace(TOGETHER, factor=7)))
    stream = latency.stream(0, seed=0)
    taken = np.array([stream.take(float(start)) for start in range(20_000)])
    assert set(taken) == {1, 3, 7, 21}
    assert abs(np.corrcoef(taken % 3 == 0, taken % 7 == 0)[0, 1]) < 0.1


def test_shared_phases_do_not_change_the_phases_of_single_workers() -> None:
    alone = Latency(Constant(1), phases=(PHASES,))
    both = Latency(Constant(1), phases=(Phases(7, 5, 5, together=True), PHASES))
    stream = both.stream(0, seed=11)
    slow = [stream.take(float(start)) in (3, 21) for start in range(400)]
    assert (slowness(alone, 0, np.arange(400.0)) == slow).all()


# ---- recordings ----


def test_times_recorded_together_are_drawn_together() -> None:
    """Each drawn row is a recorded row, and the rows of a block stay in order."""
    table = np.arange(300.0).reshape(3, 100)
    recorded = Recorded(dict(enumerate(table)), together=True)
    drawn = np.stack([recorded.stream(worker, seed=4).draws(500) for worker in range(3)])
    assert (drawn[1] == drawn[0] + 100).all()
    assert (drawn[2] == drawn[0] + 200).all()
    assert len(set(drawn[0])) > 80
    blocks = drawn[0].reshape(-1, 10)
    assert ((np.diff(blocks, axis=1) % 100) == 1).all()
    others = [recorded.stream(0, seed=5), Recorded({0: table[0]}).stream(0, seed=4)]
    assert all(np.mean(other.draws(500) == drawn[0]) < 0.1 for other in others)


@pytest.mark.parametrize(("block", "length"), [(None, 10), (7, 7), (1, 1), (250, 250)])
def test_recorded_times_keep_their_order_inside_blocks(block: int | None, length: int) -> None:
    recorded = Recorded({3: np.arange(100.0)}, block)
    drawn = recorded.stream(3, seed=1).draws(40 * length)
    blocks = drawn.reshape(40, length)
    assert set(drawn) <= set(range(100))
    assert ((np.diff(blocks, axis=1) % 100) == 1).all()
    assert len(set(blocks[:, 0])) > 20


def test_recording_is_copied_and_read_only() -> None:
    times = np.ones(5)
    recorded = Recorded({0: times})
    times[:] = 9
    assert recorded.mean(0) == 1
    with pytest.raises(ValueError, match="read-only"):
        recorded.times[0][0] = 9


def test_unrecorded_worker_is_refused_with_the_recorded_ones() -> None:
    recorded = Recorded({worker: np.ones(2) for worker in (5, 0, 1, 2, 7)})
    for ask in (recorded.mean, lambda worker: recorded.stream(worker, 0)):
        with pytest.raises(SpecError, match="not in the recording, which has workers 0-2,5,7"):
            ask(4)


BAD_VALUES = [
    (lambda: Phases(0, 1, 1), "factor must be > 0 and <= 1e+06, got 0"),
    (lambda: Phases(2, 0, 1), "lasting must be > 0 and <= 1e+12, got 0.0"),
    (lambda: Phases(2, 1, inf), "every must be > 0 and <= 1e+12, got inf"),
    (lambda: Phases(2, 1, 1, workers=()), "workers must not be empty; leave them out for all"),
    (lambda: Phases(2, 1, 1, workers=(-1,)), "an id between 0 and 999999, got -1"),
    (lambda: Latency(Constant(1), ((0, inf),)), "factor must be > 0 and <= 1e+06, got inf"),
    (lambda: Latency(Constant(1), ((-1, 2),)), "an id between 0 and 999999, got -1"),
    (lambda: Latency(Constant(1), ((4, 3), (4, 2))), "worker 4 must have one factor, got 2.0 and"),
    (lambda: Latency(Constant(1)).stream(-1, 0), "an id between 0 and 999999, got -1"),
    (lambda: Latency(Constant(1)).stream(0, -1), "seed must be >= 0, got -1"),
    (lambda: Recorded({}), "a recording must have at least one worker, got none"),
    (lambda: Recorded({3: np.array([])}), "worker 3 must have a list of times, got []"),
    (
        lambda: Recorded({3: np.ones((1, 2))}),
        "worker 3 must have a list of times, got [[1.0, 1.0]]",
    ),
    (
        lambda: Recorded({3: np.array([1, inf])}),
        "times of worker 3 must be >= 0 and finite, got inf",
    ),
    (
        lambda: Recorded({3: np.array([-1.0])}),
        "times of worker 3 must be >= 0 and finite, got -1.0",
    ),
    (lambda: Recorded({3: np.ones(1)}, block=0), "block must be >= 1, got 0"),
    (
        lambda: Recorded({0: np.ones(3), 1: np.ones(2)}, together=True),
        "workers that were recorded together must have equally many times, got 2 to 3",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD_VALUES, ids=[text for _, text in BAD_VALUES])
def test_invalid_value_is_refused_and_shown(make, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        make()
    assert message in str(caught.value)
