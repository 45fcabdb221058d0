# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures for the tests of the runtime, on top of those in `run_fixtures.py`."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from certificates import Authority
from cli_fixtures import Call
from paceline.run.launch import restarts
from paceline.run.net.tls import TlsFiles
from server_harness import STEPS, Harness, Served, no_intruder, serve


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restart processes soon after they died."""
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 0.01)


@pytest.fixture
def call(call: Call, shared_forkserver: None) -> Call:
    """Return a function that calls the command line, with the fork server that all tests share."""
    return call


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """A CA."""
    return Authority(tmp_path_factory.mktemp("tls") / "ca")


@pytest.fixture(scope="session")
def tls_files(authority: Authority) -> TlsFiles:
    """A certificate of the CA for this host, which both sides may use."""
    return authority.issue("both")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A run without an intruder."""
    return serve(no_intruder, tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def unharmed(
    undisturbed: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[[Callable[[Harness], object]], tuple[Served, str]]:
    """Serve a run with an intruder; check that its result is that of the undisturbed run.

    Return the outcome and what was printed.
    """

    def check(intrude: Callable[[Harness], object]) -> tuple[Served, str]:
        capsys.readouterr()
        served = serve(intrude, tmp_path)
        assert served.failure == ""
        contributors = [sorted(update.contributors) for update in served.trace.updates()]
        assert contributors == [[0, 1]] * STEPS
        assert torch.equal(served.weights, undisturbed.weights)
        assert torch.equal(served.momentum, undisturbed.momentum)
        return served, capsys.readouterr().out

    return check
