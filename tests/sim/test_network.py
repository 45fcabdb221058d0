# SPDX-License-Identifier: BSD-3-Clause
"""Network strings, and what they say about hosts."""

import pytest

from paceline.errors import SpecError
from paceline.sim.network import NETWORK_FORM, TRANSFERS, Network, parse_network
from paceline.spec import RunSpec


def test_settings_have_defaults():
    network = parse_network("model=100MB,bandwidth=1.25GB,delay=0.5ms,servers=2")

    assert network == Network(100e6, 1.25e9, 0.0005, 2)
    assert not network.beside
    assert network.transfers == TRANSFERS


@pytest.mark.parametrize(
    "text",
    [
        "model=100MB,bandwidth=1.25GB,delay=0.5ms,servers=2",
        "model=1MB,bandwidth=125MB,servers=4,beside=true,transfers=all",
        "model=1MB,bandwidth=125MB,transfers=3; worker 3 12.5MB; workers 0,5-6 1GB",
        "model=1MB,bandwidth=125MB,workers_per_host=4; worker 3 12.5MB",
        NETWORK_FORM,
    ],
)
def test_printed_network_parses_back(text):
    network = parse_network(text)

    assert parse_network(str(network)) == network


def test_links_of_workers_are_named_one_by_one_or_together():
    network = parse_network("model=1MB,bandwidth=100MB; worker 3 10MB; workers 0, 5-6 1GB")

    assert [network.link(worker) for worker in range(8)] == [
        1e9, 1e8, 1e8, 1e7, 1e8, 1e9, 1e9, 1e8,
    ]  # fmt: skip


def test_servers_run_on_the_first_hosts_if_they_are_beside_workers():
    beside = parse_network("model=1MB,bandwidth=1MB,servers=2,beside=true")
    apart = parse_network("model=1MB,bandwidth=1MB,servers=2")

    assert [beside.hosts_server(worker) for worker in range(3)] == [True, True, False]
    assert not any(apart.hosts_server(worker) for worker in range(3))


def test_workers_of_a_host_have_the_same_link_and_server():
    network = parse_network(
        "model=1MB,bandwidth=100MB,servers=1,beside=true,workers_per_host=2; worker 3 10MB"
    )

    assert [network.link(worker) for worker in range(5)] == [1e8, 1e8, 1e7, 1e7, 1e8]
    assert [network.hosts_server(worker) for worker in range(3)] == [True, True, False]


def test_all_transfers_may_be_under_way_at_once():
    assert parse_network("model=1MB,bandwidth=1MB,transfers=all").transfers is None
    assert parse_network("model=1MB,bandwidth=1MB,transfers=3,servers=2").transfers == 3


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("; worker 4 1MB", "names worker 4; the workers are 0 to 3"),
        (",servers=5,beside=true", "5 servers can't run beside 4 workers; write servers=4"),
        (
            ",servers=3,beside=true,workers_per_host=2",
            "3 servers can't run beside 4 workers on 2 hosts; write servers=2",
        ),
    ],
)
def test_network_must_fit_the_run(text, reason):
    network = parse_network("model=1MB,bandwidth=1MB" + text)

    network.validate(RunSpec(workers=5))
    with pytest.raises(SpecError, match=reason):
        network.validate(RunSpec(workers=4))


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
        ("model=1MB,bandwidth=1GB,beside=yes", "beside must be true or false, got 'yes'"),
        ("model=1MB,bandwidth=1GB,transfers=0", "transfers must be >= 1 or all, got 0"),
        ("model=1MB,bandwidth=1GB,transfers=some", "transfers must be a number"),
        ("model=1MB,bandwidth=1GB,transfers=1.5", "transfers must be a whole number"),
        ("model=1MB,bandwidth=1GB,workers_per_host=0", "workers_per_host must be >= 1, got 0"),
        (
            "model=1MB,bandwidth=1GB,workers_per_host=2; worker 2 1MB; worker 3 2MB",
            "worker 2 is on a host whose link is given twice",
        ),
        ("model=1MB,bandwidth=1GB; worker 3", "'worker 3' is not the link of a worker"),
        ("model=1MB,bandwidth=1GB; worker 3 0", "bandwidth must be > 0"),
        ("model=1MB,bandwidth=1GB; worker 5-3 1MB", "worker ids must be like 0,3-5"),
    ],
)
def test_bad_string_is_refused_with_the_correct_form(text, reason):
    with pytest.raises(SpecError, match=reason) as error:
        parse_network(text)

    assert "write model=" in str(error.value)


def test_negative_delay_is_refused_by_the_constructor():
    with pytest.raises(SpecError, match="delay must be >= 0"):
        Network(1.0, 1.0, delay=-1.0)
