# SPDX-License-Identifier: BSD-3-Clause
"""The times of workers: distributions, streams, phases, recordings, strings."""

import pickle
from dataclasses import dataclass, replace
from math import exp, gamma, inf, log, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import SpecError
from paceline.latency import (
    Constant,
    Distribution,
    Exponential,
    Gamma,
    Latency,
    LogNormal,
    Mixture,
    Pareto,
    Phases,
    Recorded,
    Sometimes,
    Sum,
    TimeModel,
    Weibull,
    parse_latency,
)

# ---- distributions ----

WEIBULL_1, WEIBULL_2 = gamma(1 + 1 / 1.5), gamma(1 + 2 / 1.5)
MIXED = Mixture((0.25, 0.75), (Constant(4), Exponential(1)))

MOMENTS = [
    (Constant(0.05), 0.05, 0.0),
    (Exponential(2), 2, 2),
    (Exponential(2, shift=3), 5, 2),
    (LogNormal(2, 0.5), 2 * exp(0.125), 2 * sqrt((exp(0.25) - 1) * exp(0.25))),
    (LogNormal(2, 0.5, shift=1), 1 + 2 * exp(0.125), 2 * sqrt((exp(0.25) - 1) * exp(0.25))),
    (Gamma(6, 4), 6, 3),
    (Gamma(6, 4, shift=1), 7, 3),
    (Pareto(2, 5), 2.5, 0.5 * sqrt(5 / 3)),
    (Pareto(2, 5, shift=1), 3.5, 0.5 * sqrt(5 / 3)),
    (Weibull(2, 1.5), 2 * WEIBULL_1, 2 * sqrt(WEIBULL_2 - WEIBULL_1**2)),
    (Weibull(2, 1.5, shift=1), 1 + 2 * WEIBULL_1, 2 * sqrt(WEIBULL_2 - WEIBULL_1**2)),
    (Sometimes(0.25, Exponential(2)), 0.5, sqrt(0.25 * 8 - 0.25)),
    (Sometimes(0, Pareto(1, 1)), 0, 0),
    (Sum((Constant(1), Exponential(3), Gamma(8, 4))), 12, 5),
    (MIXED, 1.75, sqrt(0.25 * 16 + 0.75 * 2 - 1.75**2)),
    (Mixture((0, 1), (Pareto(1, 1), Constant(2))), 2, 0),
]


@pytest.mark.parametrize(("distribution", "mean", "deviation"), MOMENTS, ids=str)
def test_mean_and_deviation_are_those_of_the_theory(
    distribution: Distribution, mean: float, deviation: float
) -> None:
    n = 200_000
    sample = distribution.sample(np.random.default_rng(7), n)
    assert sample.shape == (n,)
    assert sample.dtype == np.float64
    assert distribution.mean() == pytest.approx(mean, rel=1e-12)
    assert sample.mean() == pytest.approx(mean, abs=4 * deviation / sqrt(n) + 1e-12)
    assert sample.std() == pytest.approx(deviation, rel=0.03, abs=1e-12)


@pytest.mark.parametrize(
    ("distribution", "median"),
    [
        (LogNormal(2, 3, shift=1), 3),
        (Pareto(2, 0.5, shift=1), 9),
        (Weibull(2, 0.5, shift=1), 1 + 2 * log(2) ** 2),
    ],
    ids=str,
)
def test_heavy_tails_have_the_median_of_the_theory(
    distribution: Distribution, median: float
) -> None:
    sample = distribution.sample(np.random.default_rng(7), 200_000)
    assert np.median(sample) == pytest.approx(median, rel=0.03)


def test_pareto_is_never_below_its_scale() -> None:
    assert Pareto(2, 5).sample(np.random.default_rng(7), 10_000).min() >= 2


@pytest.mark.parametrize("heavy", [Pareto(1, 1), LogNormal(1, 40), Weibull(1, 0.001)], ids=str)
def test_mean_is_infinite_where_no_float_holds_it(heavy: Distribution) -> None:
    assert heavy.mean() == inf
    assert Sum((Constant(1), Sometimes(0.1, heavy))).mean() == inf


numbers = st.floats(0, 1e12, exclude_min=True)
shifts = st.just(0.0) | numbers
named = st.one_of(
    st.builds(Constant, st.just(0.0) | numbers),
    st.builds(Exponential, numbers, shifts),
    *(st.builds(kind, numbers, numbers, shifts) for kind in (LogNormal, Gamma, Pareto, Weibull)),
)
terms = named | st.builds(Sometimes, st.floats(0, 1), named)
sums = terms | st.builds(Sum, st.lists(terms, min_size=2, max_size=3).map(tuple))
mixtures = st.builds(
    lambda share, one, other: Mixture((share, 1 - share), (one, other)), st.floats(0, 1), sums, sums
)
distributions = sums | mixtures


@given(distributions)
def test_every_draw_is_finite_and_not_negative(distribution: Distribution) -> None:
    sample = distribution.sample(np.random.default_rng(0), 16)
    assert np.isfinite(sample).all()
    assert (sample >= 0).all()
    assert distribution.mean() >= 0


def test_values_become_floats_so_that_they_compare_and_print_alike() -> None:
    assert repr(Exponential(np.float64(2), shift=1)) == "Exponential(mean_s=2.0, shift=1.0)"
    assert str(Sometimes(np.float64(0.07), Constant(1))) == "7% 1s"


BAD_VALUES = [
    (lambda: Constant(-1), "seconds must be >= 0, got -1.0"),
    (lambda: Constant(1e13), "seconds must be <= 1e+12, got 1"),
    (lambda: Exponential(0), "mean must be > 0, got 0.0"),
    (lambda: Exponential(1, shift=-0.5), "shift must be >= 0, got -0.5"),
    (lambda: Exponential(float("nan")), "mean must be > 0, got nan"),
    (lambda: Exponential(inf), "mean must be <= 1e+12, got inf"),
    (lambda: LogNormal(1, 0), "sigma must be > 0, got 0.0"),
    (lambda: Gamma(1, -2), "shape must be > 0, got -2.0"),
    (lambda: Pareto(1, 0), "alpha must be > 0, got 0.0"),
    (lambda: Weibull(0, 1), "scale must be > 0, got 0.0"),
    (lambda: Sometimes(1.5, Constant(1)), "probability must be between 0 and 1, got 1.5"),
    (lambda: Sometimes(0.5, MIXED), "Mixture must not be nested here, got '25% 4s | 75% exp:1s'"),
    (lambda: Sum((Constant(1),)), "a sum must have two parts or more, got 1"),
    (lambda: Sum((MIXED, MIXED)), "Mixture must not be nested here"),
    (lambda: Mixture((1,), (Constant(1),)), "two parts or more must have a weight >= 0 each"),
    (lambda: Mixture((2, -1), (Constant(1),) * 2), "must have a weight >= 0 each, got (2, -1)"),
    (lambda: Mixture((0.5, 0.4), (Constant(1),) * 2), "weights must add up to 100%, got 90%"),
    (lambda: Mixture((0.5, 0.5), (MIXED, Constant(1))), "Mixture must not be nested here"),
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
]


@pytest.mark.parametrize(("make", "message"), BAD_VALUES, ids=[text for _, text in BAD_VALUES])
def test_impossible_value_is_refused_with_its_value(make, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        make()
    assert message in str(caught.value)


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
def test_times_do_not_depend_on_how_they_are_asked_for(model: TimeModel, sizes: list[int]) -> None:
    stream = model.stream(2, seed=5)
    got: list[float] = []
    for size in sizes:
        got += stream.draws(size).tolist()
        got.append(stream.take(float(len(got))))
    assert got == model.stream(2, seed=5).draws(len(got)).tolist()


@each_model
def test_same_seed_gives_the_same_times_and_another_seed_or_worker_others(
    model: TimeModel,
) -> None:
    times = model.stream(0, seed=5).draws(600)
    assert (model.stream(0, seed=5).draws(600) == times).all()
    for other in (model.stream(0, seed=6), model.stream(1, seed=5)):
        values = other.draws(600)
        assert np.mean(values == times) < 0.05
        assert abs(np.corrcoef(np.argsort(values), np.argsort(times))[0, 1]) < 0.15


@each_model
def test_mean_is_that_of_the_times(model: TimeModel) -> None:
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
    """Fails the test if anything is drawn."""

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
    """Tell for each start whether a computation that takes 1 s when normal is slow."""
    stream = latency.stream(worker, seed=11)
    times = np.array([stream.take(start) for start in starts.tolist()])
    assert set(times) <= {1.0, 3.0}
    return times == 3.0


def test_slow_phases_have_their_share_of_the_time_and_last() -> None:
    latency = Latency(Constant(1), phases=(PHASES,))
    slow = np.array([slowness(latency, worker, np.arange(12_000.0)) for worker in range(8)])
    assert PHASES.share == 0.25
    assert slow.mean() == pytest.approx(0.25, abs=0.015)
    # Two states with these mean lengths forget at the rate 1/5 + 1/15 a second.
    for lag in (1, 3):
        correlation = np.corrcoef(slow[:, lag:].ravel(), slow[:, :-lag].ravel())[0, 1]
        assert correlation == pytest.approx(exp(-lag * (1 / 5 + 1 / 15)), abs=0.03)
    assert abs(np.corrcoef(slow[0], slow[1])[0, 1]) < 0.1


def test_slow_phases_and_what_is_between_have_their_mean_lengths() -> None:
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


def test_being_slow_says_nothing_about_the_time_that_is_multiplied() -> None:
    latency = Latency(Sum((Constant(1), Sometimes(0.25, Constant(10)))), phases=(PHASES,))
    first = np.array([latency.stream(worker, seed=3).take(0.0) for worker in range(600)])
    slow, long = np.isin(first, (3, 33)), first >= 11
    assert set(first) == {1, 3, 11, 33}
    assert abs(np.corrcoef(slow, long)[0, 1]) < 0.15


def test_worker_not_asked_for_ages_is_slow_as_often_as_any_other() -> None:
    latency = Latency(Constant(1), phases=(PHASES,))
    slow = slowness(latency, 0, np.arange(3000) * 1e9)
    assert slow.mean() == pytest.approx(0.25, abs=0.035)
    assert abs(np.corrcoef(slow[1:], slow[:-1])[0, 1]) < 0.08


def test_phases_shorter_than_the_resolution_of_the_time_do_not_hang() -> None:
    latency = Latency(Constant(1), phases=(Phases(3, 1e-3, 3e-3),))
    start, resolution = 1e15, 0.125
    slow = slowness(latency, 0, start + resolution * np.arange(1000))
    assert slow.mean() == pytest.approx(0.25, abs=0.06)


def test_state_at_a_time_does_not_depend_on_the_questions_before() -> None:
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


def test_times_with_phases_are_not_given_without_their_starts() -> None:
    stream = Latency(Constant(1), phases=(PHASES,)).stream(0, 0)
    with pytest.raises(SpecError, match="depend on their starts"):
        stream.draws(1)


def test_mean_with_phases_is_that_of_a_random_moment() -> None:
    latency = parse_latency("exp:2s; worker 1 x2; phases x3 for 5s every 15s on worker 1")
    assert latency.mean(0) == 2
    assert latency.mean(1) == pytest.approx(2 * 2 * (0.75 + 3 * 0.25))


# ---- recordings ----


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


def test_worker_that_was_not_recorded_is_refused_and_the_recorded_ones_named() -> None:
    recorded = Recorded({worker: np.ones(2) for worker in (5, 0, 1, 2, 7)})
    for ask in (recorded.mean, lambda worker: recorded.stream(worker, 0)):
        with pytest.raises(SpecError, match="not in the recording, which has workers 0-2,5,7"):
            ask(4)


# ---- strings ----

READ = [
    ("50ms", Latency(Constant(0.05))),
    ("1.4", Latency(Constant(1.4))),
    ("const:50ms", Latency(Constant(0.05))),
    ("1e+3s+2s", Latency(Sum((Constant(1000), Constant(2))))),
    ("exp:20ms", Latency(Exponential(0.02))),
    ("exp:mean=20ms,shift=50ms", Latency(Exponential(0.02, 0.05))),
    ("exp : 20ms , 50ms", Latency(Exponential(0.02, 0.05))),
    ("lognormal:50ms,sigma=0.3", Latency(LogNormal(0.05, 0.3))),
    ("gamma:shape=4,mean=1s", Latency(Gamma(1, 4))),
    ("pareto:50ms,2.5,shift=1s", Latency(Pareto(0.05, 2.5, 1))),
    ("weibull:50ms,1.5", Latency(Weibull(0.05, 1.5))),
    ("7% exp:1s", Latency(Sometimes(0.07, Exponential(1)))),
    ("50ms + 5% exp:0.5", Latency(Sum((Constant(0.05), Sometimes(0.05, Exponential(0.5)))))),
    ("95%50ms|5%exp:1s", Latency(Mixture((0.95, 0.05), (Constant(0.05), Exponential(1))))),
    (
        "95% 50ms + exp:5ms | 5% 50% 1s",
        Latency(
            Mixture(
                (0.95, 0.05),
                (Sum((Constant(0.05), Exponential(0.005))), Sometimes(0.5, Constant(1))),
            )
        ),
    ),
    ("1s; worker 7 x2.2", Latency(Constant(1), ((7, 2.2),))),
    (
        "1s;workers 4, 0 , 2 - 3 x 2;worker9x0.5",
        Latency(Constant(1), ((0, 2), (2, 2), (3, 2), (4, 2), (9, 0.5))),
    ),
    ("1s; phases x3 for 5s every 1m", Latency(Constant(1), (), (Phases(3, 5, 60),))),
    (
        "1s;phases x3 for 5s\nevery 1m on workers 0,3-4;phasesx2for1severy2son worker 1",
        Latency(Constant(1), (), (Phases(3, 5, 60, (0, 3, 4)), Phases(2, 1, 2, (1,)))),
    ),
]


@pytest.mark.parametrize(("text", "latency"), READ, ids=[text for text, _ in READ])
def test_string_is_read_as_what_it_says(text: str, latency: Latency) -> None:
    assert parse_latency(text) == latency


PRINTED = [
    "50ms",
    "0s",
    "3600s",
    "exp:20ms,shift=50ms",
    "lognormal:1.4s,0.3",
    "95% 50ms + 7% gamma:5ms,4 | 5% pareto:0.5s,2.5",
    "weibull:90s,1e-07",
    "50ms; workers 0,3-5 x2.2; worker 1 x0.5; phases x3 for 5s every 60s on worker 2",
]


@pytest.mark.parametrize("text", PRINTED)
def test_string_is_printed_as_a_person_would_write_it(text: str) -> None:
    assert str(parse_latency(text)) == text


ids = st.integers(0, 12) | st.integers(0, 999_999)
factors = st.floats(0, 1e6, exclude_min=True)
latencies = st.builds(
    Latency,
    distributions,
    st.dictionaries(ids, st.sampled_from([0.5, 2.2]) | factors, max_size=6).map(
        lambda found: tuple(found.items())
    ),
    st.lists(
        st.builds(
            Phases,
            factors,
            numbers,
            numbers,
            st.none() | st.lists(ids, min_size=1, max_size=6).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
)


@given(latencies)
def test_what_is_printed_reads_back_as_its_equal(latency: Latency) -> None:
    assert parse_latency(str(latency)) == latency
    assert parse_latency(str(latency).replace(" ", "")) == latency


EXP = "; write exp:mean[,shift=] as in exp:20ms,shift=50ms"
MODIFIER = "; write workers 0,3-5 x2.2 or phases x3 for 5s every 60s on worker 2"
BAD_STRINGS = [
    ("", "time must be a duration such as 50ms or 1.4s, got ''; write 50ms or exp:500ms"),
    ("50x", "time must be a duration such as 50ms or 1.4s, got '50x'; write 50ms or exp:500ms"),
    ("1s + 1y", "time must be a duration such as 50ms or 1.4s, got '1y'; write 50ms or exp:500ms"),
    ("5%", "time must be a duration such as 50ms or 1.4s, got ''; write 50ms or exp:500ms"),
    ("9e15", "seconds must be <= 1e+12, got 9000000000000000.0 in '9e15'; write 50ms or exp:500ms"),
    (
        "erlang:3",
        "distribution must be one of const, exp, lognormal, gamma, pareto, weibull, got 'erlang:3'"
        "; write exp:500ms",
    ),
    ("exp", "mean is missing in 'exp'" + EXP),
    ("exp:shift=1s", "mean is missing in 'exp:shift=1s'" + EXP),
    ("1s + exp:0", "mean must be > 0, got 0.0 in 'exp:0'" + EXP),
    ("exp:1s,2s,3s", "'3s' is one value too many in 'exp:1s,2s,3s'" + EXP),
    ("exp:1s,size=2", "'size' is not a setting in 'exp:1s,size=2'" + EXP),
    ("exp:1s,mean=2s", "mean is given twice in 'exp:1s,mean=2s'" + EXP),
    ("exp:mean=1s,mean=2s", "'exp:mean=1s,mean=2s' gives mean twice" + EXP),
    ("exp:a", "mean must be a duration such as 50ms or 1.4s, got 'a' in 'exp:a'" + EXP),
    (
        "gamma:1s,many",
        "shape must be a number, got 'many' in 'gamma:1s,many'"
        "; write gamma:mean,shape[,shift=] as in gamma:50ms,4",
    ),
    ("105% 1s", "percentage must be from 0% to 100%, got '105%'; write 5%"),
    ("some% 1s", "percentage must be from 0% to 100%, got 'some%'; write 5%"),
    ("nan% 1s", "percentage must be from 0% to 100%, got 'nan%'; write 5%"),
    ("snan% 1s", "percentage must be from 0% to 100%, got 'snan%'; write 5%"),
    ("95% 1s | exp:1s", "'exp:1s' has no percentage; write 95% 50ms | 5% exp:500ms"),
    ("1s + 95% 2s | 5% 1s", "'1s + 95% 2s' has no percentage; write 95% 50ms | 5% exp:500ms"),
    (
        "95% 1s | 6% 2s",
        "weights must add up to 100%, got 101% in '95% 1s | 6% 2s'; write 95% 50ms | 5% exp:500ms",
    ),
    ("1s;", "'' is not a modifier" + MODIFIER),
    ("1s; worker 3", "'worker 3' is not a modifier" + MODIFIER),
    ("1s; worker x2", "worker ids must be like 0,3-5, got '' in 'worker x2'" + MODIFIER),
    ("1s; worker 5-3 x2", "worker ids must be like 0,3-5, got '5-3' in 'worker 5-3 x2'" + MODIFIER),
    (
        "1s; worker 1234567 x2",
        "worker ids must be like 0,3-5, got '1234567' in 'worker 1234567 x2'" + MODIFIER,
    ),
    ("1s; worker 3 xy", "factor must be a number, got 'y' in 'worker 3 xy'" + MODIFIER),
    ("1s; worker 3 x0", "factor must be > 0 and <= 1e+06, got 0.0 in 'worker 3 x0'" + MODIFIER),
    (
        "1s; worker 3 x2; workers 2-4 x5",
        "worker 3 must have one factor, got 2.0 and 5.0 in 'workers 2-4 x5'" + MODIFIER,
    ),
    ("1s; phases x3 for 5s", "'phases x3 for 5s' is not a modifier" + MODIFIER),
    (
        "1s; phases x3 for 5s every 0s",
        "every must be > 0 and <= 1e+12, got 0.0 in 'phases x3 for 5s every 0s'" + MODIFIER,
    ),
    (
        "1s; phases x3 for 5s every 1m on worker",
        "worker ids must be like 0,3-5, got '' in 'phases x3 for 5s every 1m on worker'" + MODIFIER,
    ),
]


@pytest.mark.parametrize(("text", "message"), BAD_STRINGS, ids=[text for text, _ in BAD_STRINGS])
def test_bad_string_is_refused_with_its_part_and_the_right_form(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_latency(text)
    assert str(caught.value) == message
