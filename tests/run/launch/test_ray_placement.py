# SPDX-License-Identifier: BSD-3-Clause
"""What the processes of a run reserve on a Ray cluster, and where they may run."""

from pathlib import Path

import pytest

from paceline.errors import SpecError
from paceline.run.launch.environment import Identity
from paceline.run.launch.ray_placement import Placement

HEAD = Identity("", Path(), Path(), None)
OTHER = Identity("", Path(), Path(), None, server=1)
WORKER = Identity("", Path(), Path(), 0)


def test_worker_reserves_what_the_user_asks_for():
    placement = Placement(cpus_per_worker=2.5, gpus_per_worker=0.5)
    assert placement.bundle(WORKER) == {"CPU": 2.5, "GPU": 0.5}
    assert placement.threads(WORKER) == 2
    assert Placement(cpus_per_worker=0.5).threads(WORKER) == 1


def test_server_reserves_one_processor_and_uses_all():
    placement = Placement(cpus_per_worker=4, gpus_per_worker=1)
    assert placement.bundle(HEAD) == {"CPU": 1.0}
    assert placement.threads(HEAD) is None


def test_run_on_one_machine_needs_the_sum():
    placement = Placement(cpus_per_worker=2, gpus_per_worker=1)
    assert placement.total(workers=4, servers=2) == {"CPU": 10.0, "GPU": 4.0}


def test_head_stays_with_the_launcher_and_the_rest_runs_anywhere():
    placement = Placement()
    assert placement.selector(HEAD, "abc") == {"ray.io/node-id": "abc"}
    assert placement.selector(OTHER, "abc") == placement.selector(WORKER, "abc") == {}


def test_all_servers_run_on_nodes_with_the_label():
    placement = Placement(server_label="market=!spot")
    assert (
        placement.selector(HEAD, "abc") == placement.selector(OTHER, "abc") == {"market": "!spot"}
    )
    assert placement.selector(WORKER, "abc") == {}


@pytest.mark.parametrize("label", ["spot", "=spot", "market=", "="])
def test_bad_label_is_refused(label):
    with pytest.raises(SpecError, match="server_label must be KEY=VALUE, such as market=on-demand"):
        Placement(server_label=label)


@pytest.mark.parametrize("amount", [-1.0, float("inf"), float("nan")])
def test_bad_amount_is_refused(amount):
    with pytest.raises(SpecError, match="cpus_per_worker must be > 0"):
        Placement(cpus_per_worker=amount)
    with pytest.raises(SpecError, match="gpus_per_worker must be >= 0"):
        Placement(gpus_per_worker=amount)


def test_lack_of_a_node_is_explained():
    placement = Placement(cpus_per_worker=8, gpus_per_worker=1, server_label="market=on-demand")
    assert placement.describe_lack(WORKER) == "no node of the Ray cluster has 8 CPU and 1 GPU free"
    label = "no node of the Ray cluster has 1 CPU free and the label market=on-demand"
    assert placement.describe_lack(HEAD) == label
    here = "waiting until this node of the Ray cluster has 1 CPU free"
    assert Placement().describe_lack(HEAD) == here
