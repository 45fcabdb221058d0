# SPDX-License-Identifier: BSD-3-Clause
"""Strategies that build any distribution, for tests of the package and of its strings."""

from hypothesis import strategies as st

from paceline.latency import (
    Constant,
    Exponential,
    Gamma,
    LogNormal,
    Mixture,
    Pareto,
    Sometimes,
    Sum,
    Weibull,
)

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
