# SPDX-License-Identifier: BSD-3-Clause
"""Links that are shared equally: complete logs of when transfers end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import SpecError
from paceline.sim.engine import Engine
from paceline.sim.network import Link, Network, parse_network


def ends(transfers, bandwidth=10.0, servers=1):
    """Return when transfers of (start, size) end, by their index in the list."""
    engine, log = Engine(), {}
    link = Link(engine, Network(model_bytes=1, bandwidth=bandwidth, servers=servers))

    def begin(i, size):
        link.begin(size, lambda: log.__setitem__(i, engine.now))

    for i, (at, size) in enumerate(transfers):
        engine.at(at, begin, i, size)
    while engine.step():
        pass
    return [log[i] for i in range(len(transfers))]


def test_one_transfer_has_the_whole_link():
    assert ends([(0, 100)]) == [10.0]


def test_two_simultaneous_transfers_take_twice_as_long():
    assert ends([(0, 100), (0, 100)]) == [20.0, 20.0]


def test_second_transfer_slows_the_first_only_while_it_lasts():
    # Alone for 5 s (50 bytes), together for 10 s (50 bytes each), then the second alone again.
    assert ends([(0, 100), (5, 100)]) == [15.0, 20.0]


def test_small_transfer_overtakes_a_large_one():
    assert ends([(0, 100), (0, 20)]) == [12.0, 4.0]


def test_several_servers_are_one_wider_link_but_a_workers_own_link_limits_it():
    assert ends([(0, 100)], servers=4) == [10.0]
    assert ends([(0, 100)] * 4, servers=4) == [10.0] * 4
    assert ends([(0, 100)] * 8, servers=4) == [20.0] * 8


def test_aborted_transfer_frees_the_link_and_returns_the_bytes_moved():
    engine, log = Engine(), []
    link = Link(engine, Network(model_bytes=1, bandwidth=10.0))
    first = link.begin(100, lambda: log.append(("first", engine.now)))
    link.begin(100, lambda: log.append(("second", engine.now)))
    engine.at(4.0, lambda: log.append(("moved", link.abort(first))))

    while engine.step():
        pass

    # 20 bytes each in the first 4 s, then 80 bytes alone.
    assert log == [("moved", 20.0), ("second", 12.0)]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 200)), min_size=1, max_size=12))
def test_link_moves_all_bytes_within_its_capacity(transfers):
    finished = ends(transfers)

    first, last = min(at for at, _ in transfers), max(finished)
    total = sum(size for _, size in transfers)
    assert last - first >= total / 10.0 - 1e-6
    for (at, size), end in zip(transfers, finished, strict=True):
        assert end >= at + size / 10.0 - 1e-6


def test_printed_network_parses_back():
    network = parse_network("model=100MB,bandwidth=1.25GB,delay=0.5ms,servers=2")

    assert network == Network(100e6, 1.25e9, 0.0005, 2)
    assert parse_network(str(network)) == network


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("model=1MB", "bandwidth is missing"),
        ("1MB", "'1MB' is not a setting"),
        ("model=1MB,bandwidth=1GB,colour=red", "'colour' is not a setting"),
        ("model=0,bandwidth=1GB", "model must be > 0"),
        ("model=1MB,bandwidth=0", "bandwidth must be > 0"),
        ("model=1MB,bandwidth=1GB,delay=-1s", "delay must be >= 0"),
        ("model=1MB,bandwidth=1GB,servers=0", "servers must be >= 1"),
        ("model=1MB,bandwidth=1GB,servers=1.9", "servers must be a whole number"),
        ("model=big,bandwidth=1GB", "model must be a size"),
    ],
)
def test_bad_string_is_refused_with_the_correct_form(text, reason):
    with pytest.raises(SpecError, match=reason) as error:
        parse_network(text)

    assert "write model=" in str(error.value)


def test_negative_delay_is_refused_by_the_constructor():
    with pytest.raises(SpecError, match="delay must be >= 0"):
        Network(1.0, 1.0, delay=-1.0)
