# SPDX-License-Identifier: BSD-3-Clause
"""Latency strings: what they mean, how they are printed, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latency_examples import distributions, numbers
from paceline.errors import SpecError
from paceline.latency import (
    Constant,
    Exponential,
    Gamma,
    Latency,
    LogNormal,
    Mixture,
    Pareto,
    Phases,
    Sometimes,
    Sum,
    Weibull,
    parse_latency,
)

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
    (
        "1s;phases x3 for 5s every 1m together;phases x2 for 1s every 2s on workers 0-1 together",
        Latency(
            Constant(1),
            (),
            (Phases(3, 5, 60, together=True), Phases(2, 1, 2, (0, 1), together=True)),
        ),
    ),
]


@pytest.mark.parametrize(("text", "latency"), READ, ids=[text for text, _ in READ])
def test_strings_are_parsed(text: str, latency: Latency) -> None:
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
    "50ms; phases x3 for 5s every 60s together; phases x2 for 1s every 9s on workers 0-3 together",
]


@pytest.mark.parametrize("text", PRINTED)
def test_latency_is_printed_as_a_person_would_write_it(text: str) -> None:
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
            st.booleans(),
        ),
        max_size=2,
    ).map(tuple),
)


@given(latencies)
def test_printed_latency_parses_back_to_an_equal_one(latency: Latency) -> None:
    assert parse_latency(str(latency)) == latency
    assert parse_latency(str(latency).replace(" ", "")) == latency


EXP = "; write exp:mean[,shift=] as in exp:20ms,shift=50ms"
MODIFIER = "; write workers 0,3-5 x2.2 or phases x3 for 5s every 60s on worker 2"
BAD_STRINGS = [
    ("", "latency must be a duration such as 50ms or 1.4s, got ''; write 50ms or exp:500ms"),
    ("50x", "latency must be a duration such as 50ms or 1.4s, got '50x'; write 50ms or exp:500ms"),
    (
        "1s + 1y",
        "latency must be a duration such as 50ms or 1.4s, got '1y'; write 50ms or exp:500ms",
    ),
    ("5%", "latency must be a duration such as 50ms or 1.4s, got ''; write 50ms or exp:500ms"),
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
def test_bad_string_is_refused_with_its_part_and_the_correct_form(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_latency(text)
    assert str(caught.value) == message
