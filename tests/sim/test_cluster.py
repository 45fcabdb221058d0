# SPDX-License-Identifier: BSD-3-Clause
"""A cluster: what its strings mean, and what is refused."""

import pytest

from paceline.errors import SpecError
from paceline.latency import Recorded, parse_latency
from paceline.sim.cluster import Cluster
from paceline.sim.faults import parse_faults
from paceline.sim.network import parse_network
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import write_trace


def test_cluster_is_parsed_from_its_strings():
    network, faults = "model=1MB,bandwidth=1GB", "kill 1 at 1s"
    parsed = Cluster.parse("exp:1s", network, faults, batch=8)
    times = parse_latency("exp:1s")
    assert parsed == Cluster(times, parse_network(network), parse_faults(faults), 8)
    assert Cluster.parse("exp:1s") == Cluster(times)


def test_trace_file_is_a_latency(tmp_path):
    path = tmp_path / "run.jsonl"
    spec = RunSpec(workers=4, steps=60, seed=3)
    write_trace(simulate("sync", Cluster.parse("exp:20ms,shift=50ms; worker 2 x3"), spec), path)

    cluster = Cluster.parse(f"trace:{path}")

    assert isinstance(cluster.times, Recorded)
    assert simulate("backup:1", cluster, spec).records[-1].version == 60


def test_latency_from_a_trace_must_name_its_file():
    with pytest.raises(SpecError, match="must name its file"):
        Cluster.parse("trace: ")


def test_batch_without_samples_is_refused():
    with pytest.raises(SpecError, match="batch must be >= 1"):
        Cluster.parse("1s", batch=0)


@pytest.mark.parametrize(
    "latency", ["1s; worker 3 x2", "1s; phases x2 for 1s every 1s on worker 3"]
)
def test_latency_of_a_worker_that_the_run_does_not_have_is_refused(latency):
    Cluster.parse(latency).validate(RunSpec(workers=4))
    with pytest.raises(SpecError, match="worker 3"):
        Cluster.parse(latency).validate(RunSpec(workers=3))


def test_fault_of_a_worker_that_the_run_does_not_have_is_refused():
    cluster = Cluster.parse("1s", faults="kill any every 1s; kill 3 at 1s")
    cluster.validate(RunSpec(workers=4))
    with pytest.raises(SpecError, match="the workers are 0 to 2"):
        cluster.validate(RunSpec(workers=3))


def test_network_of_a_worker_that_the_run_does_not_have_is_refused():
    cluster = Cluster.parse("1s", "model=1MB,bandwidth=1MB; worker 3 2MB")
    cluster.validate(RunSpec(workers=4))
    with pytest.raises(SpecError, match="names worker 3"):
        cluster.validate(RunSpec(workers=3))


def test_stall_without_a_network_is_refused():
    with pytest.raises(SpecError, match="needs a network whose link can stall"):
        Cluster.parse("1s", faults="stall 1 at 1s").validate(RunSpec(workers=2))
