# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures that write trace files, valid and invalid."""

from pathlib import Path

import msgspec
import pytest

from cli_fixtures import SLOW, Simulate
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import Trace, write_trace


@pytest.fixture
def recorded(tmp_path: Path) -> Trace:
    """Write a trace to the file run.jsonl and return it."""
    spec = RunSpec(workers=3, steps=60, seed=2)
    trace = simulate("backup:1", Cluster.parse("50ms + 10% exp:300ms"), spec)
    write_trace(trace, tmp_path / "run.jsonl")
    return trace


@pytest.fixture
def pilot(tmp_path: Path) -> Trace:
    """Write the trace of a run that cancelled nothing to the file pilot.jsonl and return it."""
    spec = RunSpec(workers=3, steps=60, seed=2)
    trace = simulate("sync", Cluster.parse("50ms + 10% exp:300ms"), spec)
    write_trace(trace, tmp_path / "pilot.jsonl")
    return trace


@pytest.fixture
def files(tmp_path: Path, recorded: Trace) -> None:
    """Create files of all kinds, most of them invalid."""
    (tmp_path / "empty").touch()
    (tmp_path / "words").write_text("one thing\nand another\n")
    (tmp_path / "garbage").write_bytes(bytes(range(128, 256)) * 4)
    (tmp_path / "header").write_bytes(msgspec.json.encode(recorded.header) + b"\n")
    (tmp_path / "table").write_text("1,900\n2,500\n")
    (tmp_path / "zero").write_text("0,900\n2,500\n")


@pytest.fixture
def simulated(tmp_path: Path) -> Simulate:
    """Return a function that simulates a run and writes its trace to the folder."""

    def simulate_it(policy: str, latency: str = SLOW, workers: int = 8, steps: int = 200) -> Trace:
        trace = simulate(policy, Cluster.parse(latency), RunSpec(workers=workers, steps=steps))
        write_trace(trace, tmp_path / "trace.jsonl")
        return trace

    return simulate_it
