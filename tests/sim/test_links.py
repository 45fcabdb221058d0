# SPDX-License-Identifier: BSD-3-Clause
"""Links that transfers share fairly: complete logs of when transfers end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.sim.engine import Engine
from paceline.sim.links import LOCAL_BANDWIDTH, Links
from paceline.sim.network import Network


def logged(transfers, **network):
    """Return when transfers of (start, size, direction, worker) end, by their index in the list."""
    engine, log = Engine(), {}
    links = Links(engine, Network(**{"model_bytes": 1, "bandwidth": 10.0} | network))

    def begin(i, size, direction, worker):
        links.begin(direction, worker, size, lambda: log.__setitem__(i, engine.now))

    for i, (at, *transfer) in enumerate(transfers):
        engine.at(at, begin, i, *transfer)
    while engine.step():
        pass
    return [log[i] for i in range(len(transfers))]


def ends(transfers, **network):
    """Return when pushes of (start, size) end, each from a worker of its own."""
    return logged([(*each, "up", worker) for worker, each in enumerate(transfers)], **network)


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
    links = Links(engine, Network(model_bytes=1, bandwidth=10.0))
    first = links.begin("up", 0, 100, lambda: log.append(("first", engine.now)))
    links.begin("up", 1, 100, lambda: log.append(("second", engine.now)))
    engine.at(4.0, lambda: log.append(("moved", links.abort(first))))

    while engine.step():
        pass

    # 20 bytes each in the first 4 s, then 80 bytes alone.
    assert log == [("moved", 20.0), ("second", 12.0)]


def test_stalled_link_moves_nothing_until_it_recovers():
    engine, log = Engine(), []
    links = Links(engine, Network(model_bytes=1, bandwidth=10.0))
    first = links.begin("up", 0, 100, lambda: log.append(("first", engine.now)))
    links.begin("up", 1, 100, lambda: log.append(("second", engine.now)))
    engine.at(4.0, links.set_stalled, 0, True, first)
    engine.at(30.0, links.set_stalled, 0, False, first)

    while engine.step():
        pass

    # 20 bytes each in the first 4 s; the second has the link alone, the first after 30 s.
    assert log == [("second", 12.0), ("first", 38.0)]


def test_transfer_that_begins_on_a_stalled_link_waits_and_can_be_aborted():
    engine, log = Engine(), []
    links = Links(engine, Network(model_bytes=1, bandwidth=10.0))
    links.set_stalled(0, True, None)
    transfer = links.begin("down", 0, 100, lambda: log.append("done"))
    engine.at(50.0, lambda: log.append(links.abort(transfer)))

    while engine.step():
        pass

    assert log == [0.0]


def test_directions_are_independent():
    assert logged([(0, 100, "up", 0), (0, 100, "down", 1)]) == [10.0, 10.0]


def test_slow_link_leaves_the_rest_to_the_others():
    """Worker 2 gets its 1 byte/s; the other two share 9."""
    assert ends([(0, 45), (0, 45), (0, 45)], own_links=((2, 1.0),)) == [10.0, 10.0, 45.0]


def test_slow_link_takes_its_fair_share_if_that_is_less():
    assert ends([(0, 25)] * 4, own_links=((3, 4.0),)) == [10.0] * 4


def test_fast_link_does_not_get_more_than_the_server_has():
    assert ends([(0, 100), (0, 100)], own_links=((1, 1000.0),)) == [20.0, 20.0]


BESIDE = {"servers": 4, "beside": True}


def test_servers_beside_all_workers_reach_the_bound_of_a_ring():
    """Of 100 bytes, 75 leave each host and 75 enter it, so that a transfer takes 7.5 s."""
    assert ends([(0, 100)] * 4, **BESIDE) == pytest.approx([7.5] * 4)
    pulls = [(0, 100, "down", worker) for worker in range(4)]
    assert logged(pulls, **BESIDE) == pytest.approx([7.5] * 4)


def test_link_of_a_host_carries_the_traffic_of_its_worker_and_of_its_server():
    """Worker 0 pushes 75 bytes out of host 0, whose server sends 25 bytes to each of the others."""
    pulls = [(0, 100, "down", worker) for worker in (1, 2, 3)]
    push, *pulled = logged([(0, 100, "up", 0), *pulls], **BESIDE)

    assert push == pytest.approx((75 + 75) / 10)
    assert pulled == pytest.approx([15.0] * 3)


def test_slow_host_without_a_server_slows_down_only_itself():
    network = {"servers": 3, "beside": True, "own_links": ((3, 1.0),)}

    *fast, slow = ends([(0, 90)] * 4, **network)

    # Hosts 0 to 2 receive 30 bytes from each of two others, and a third of worker 3's byte/s.
    assert fast == pytest.approx([60 / (10 - 1 / 3)] * 3)
    assert slow == pytest.approx(90.0)


def test_slow_host_with_a_server_slows_down_all():
    assert max(ends([(0, 100)] * 3, own_links=((0, 1.0),), **BESIDE)) >= 50


def test_worker_beside_the_only_server_does_not_use_the_network():
    own, other = ends([(0, 100), (0, 100)], servers=1, beside=True)

    assert own == pytest.approx(100 / LOCAL_BANDWIDTH)
    assert other == pytest.approx(10.0)


def test_workers_of_a_host_share_its_link():
    """Hosts 0 and 1 have two workers each; the links of two servers could carry 20 bytes/s."""
    assert ends([(0, 50)] * 4, servers=2, workers_per_host=2) == pytest.approx([10.0] * 4)
    assert ends([(0, 50)] * 2, servers=2, workers_per_host=2) == pytest.approx([10.0] * 2)


def test_slow_link_is_that_of_all_workers_of_a_host():
    network = {"servers": 2, "workers_per_host": 2, "own_links": ((3, 1.0),)}
    assert ends([(0, 50)] * 4, **network) == pytest.approx([10.0, 10.0, 100.0, 100.0])


def test_half_of_the_model_leaves_a_host_for_each_worker_if_two_hosts_have_servers():
    network = {"servers": 2, "beside": True, "workers_per_host": 4}
    assert ends([(0, 100)] * 8, **network) == pytest.approx([4 * 50 / 10] * 8)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 200)), min_size=1, max_size=12))
def test_link_moves_all_bytes_within_its_capacity(transfers):
    finished = ends(transfers)

    first, last = min(at for at, _ in transfers), max(finished)
    total = sum(size for _, size in transfers)
    assert last - first >= total / 10.0 - 1e-6
    for (at, size), end in zip(transfers, finished, strict=True):
        assert end >= at + size / 10.0 - 1e-6


@given(
    st.lists(
        st.tuples(
            st.integers(0, 50),
            st.integers(1, 200),
            st.sampled_from(["up", "down"]),
            st.integers(0, 5),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 4),
    st.booleans(),
)
def test_no_link_of_a_host_carries_more_than_its_bandwidth(transfers, servers, beside):
    """The bytes through each link fit into the time in which they were moved."""
    network = {"servers": servers, "beside": beside, "own_links": ((5, 2.0),)}

    finished = logged(transfers, **network)

    first, last = min(at for at, *_ in transfers), max(finished)
    for server in range(servers):
        for out in ("up", "down"):
            shares = [
                (servers - 1) / servers if beside and worker == server and way == out
                else 0.0 if way == out or (beside and worker == server)
                else 1 / servers
                for _, _, way, worker in transfers
            ]  # fmt: skip
            carried = sum(s * size for s, (_, size, *_) in zip(shares, transfers, strict=True))
            assert carried <= 10.0 * (last - first) * (1 + 1e-6)
    for (at, size, _, worker), end in zip(transfers, finished, strict=True):
        if worker >= servers:
            assert end >= at + size / (2.0 if worker == 5 else 10.0) - 1e-6
