# SPDX-License-Identifier: BSD-3-Clause
"""The tables in docs/scale.md follow from bench/one_server.csv, and from the simulator."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from paceline.run.settings import WORKERS_MAX

BENCH = Path(__file__).parent.parent / "bench"
GBITS = 10


@pytest.fixture(scope="module")
def scale():
    """Return the module bench/scale.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        yield import_module("scale")
        for name in ("scale", "one_server"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def costs(scale):
    return scale.Costs(
        per_gradient_s=2e-4,
        per_byte_s=0.5e-9,
        sgd_s=0.2e-9,
        adamw_s=0.6e-9,
        shared_gradient_s=1e-4,
        shared_byte_s=0.1e-9,
    )


def test_page_has_the_tables_of_the_measurements(scale):
    measured = scale.medians(scale.FILE)
    page = scale.PAGE.read_text(encoding="utf-8")
    tables = {name: scale.table(name, measured) for name in scale.TABLES}
    assert len(tables) == 5
    assert [name for name in tables if f"<!-- table: {name} -->" not in page] == []
    assert scale.with_tables(page, tables) == page


CLUSTERS = [
    (workers, servers, backups)
    for workers in (1, 2, 7, 40)
    for servers in (1, 2, 3, 5, 16)
    for backups in (0, 1, 5)
    if servers <= workers and backups < workers
]


@pytest.mark.parametrize(("workers", "servers", "backups"), CLUSTERS)
def test_closed_form_agrees_with_the_simulator(scale, costs, workers, servers, backups):
    cluster = scale.Step(costs, 100e6, GBITS, workers, servers, backups)
    # Cancelled workers pull a little later than the others.
    close = pytest.approx(cluster.network_s, rel=2e-3 if backups else 1e-6)
    assert cluster.simulated_s("1s", 4, 2) - 1.0 == close


def test_link_or_processor_limits_a_process(scale, costs):
    assert scale.Step(costs, 1e9, 10, 4).rate == pytest.approx(0.956 * 10e9 / 8)
    assert scale.Step(costs, 1e9, 100, 4).rate == pytest.approx(4e9)


def test_smallest_number_of_servers_is_enough_in_the_simulator_and_one_less_is_not(scale, costs):
    cluster = scale.Step(costs, 100e6, GBITS, 100)
    servers = scale.smallest(cluster, 2.0)
    took_s = [
        one.simulated_s("1s", 4, 2) - 1.0 + one.server_s
        for one in (cluster._replace(servers=servers), cluster._replace(servers=servers - 1))
    ]
    assert took_s[0] <= 2.0 < took_s[1]


def test_no_number_of_servers_is_enough_for_a_slow_link_or_a_busy_head(scale, costs):
    slow_link = scale.Step(costs, 10e9, GBITS, 100)
    busy_head = scale.Step(costs, 1e3, GBITS, 10_000)
    assert scale.smallest(slow_link, 10.0) is None
    assert scale.smallest(busy_head, 1.9) is None
    assert scale.smallest(busy_head, 2.1) is not None


def test_server_saturates_at_the_last_number_of_workers_that_it_serves_in_time(scale, costs):
    one = scale.Step(costs, 100e6, GBITS, 1)
    workers = scale.saturating(one, 10.0)
    assert one._replace(workers=workers).communication_s <= 10.0
    assert one._replace(workers=workers + 1).communication_s > 10.0
    assert scale.saturating(one, 0.01) == 0


def test_costs_follow_from_the_slope_and_from_large_models(scale, tmp_path):
    """Three rounds, of which one is disturbed: medians count."""
    rows = ["round,model,workers,transport,optimizer,overhead_ms,server_ms,optimizer_ms"]
    for number, disturbed in enumerate((1, 10, 1)):
        for how, per_gradient in (("auto", 0.1), ("tcp", 0.3)):
            for workers in (8, 16, 64):
                server_ms = disturbed * (2 + per_gradient * workers)
                rows.append(f"{number},tiny,{workers},{how},sgd,5,{server_ms},0.1")
        gigabytes = scale.MODEL_BYTES / 1e9
        for how, optimizer, per_gb in (
            ("auto", "sgd", 100),
            ("tcp", "sgd", 600),
            ("tcp", "adamw", 0),
        ):
            step_ms = disturbed * gigabytes * (200 if optimizer == "sgd" else 700)
            server_ms = step_ms + disturbed * 4 * gigabytes * per_gb
            rows.append(f"{number},25m,4,{how},{optimizer},5,{server_ms},{step_ms}")
    file = tmp_path / "one_server.csv"
    file.write_text("\n".join(rows), encoding="ascii")

    found = scale.costs_of(scale.medians(file))

    assert found == pytest.approx((3e-4, 0.6e-9, 0.2e-9, 0.7e-9, 1e-4, 0.1e-9))
    assert found.process_rate == pytest.approx(2 / 0.6e-9)


def test_page_says_how_many_workers_a_run_accepts(scale):
    page = " ".join(scale.PAGE.read_text(encoding="utf-8").split())
    assert f"at most {WORKERS_MAX:,} workers today" in page
