# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures that run real scripts in real processes, in a fraction of a second each.

The fork server, which has imported torch, is started once and serves all tests.
"""

import textwrap
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from forked import ForkedScript
from paceline.run.launch.forkserver import ForkServer
from paceline.run.launch.launcher import Launcher
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.trace.schema import Trace
from paceline.watch.audit import audit

SPEC = ("workers", "steps", "samples", "min_workers", "late", "seed")

PREAMBLE = """
import sys
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F
import paceline
OUT = Path(sys.argv[1])

def keep(run, **values):
    torch.save(values, OUT / f"worker-{run.worker}.pt")

"""


@dataclass
class Ran:
    """The outcome of a run."""

    code: int
    out: str  # what all processes printed, prefixed with their names
    err: str
    trace: Trace
    kept: dict[int, dict[str, Any]]  # what each worker passed to `keep`
    folder: Path


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Write a script that begins with the usual imports and defines `keep(run, name=value)`."""

    def write(source: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(PREAMBLE + textwrap.dedent(source), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def forkserver() -> Iterator[ForkServer]:
    """The fork server that all tests share."""
    with ForkServer() as server:
        yield server


@pytest.fixture
def fork(forkserver: ForkServer, tmp_path: Path) -> Callable[..., ForkedScript]:
    """Fork a process that executes this source."""

    def start(source: str, name: str = "script.py", **changes: Any) -> ForkedScript:
        path = tmp_path / name
        path.write_text(source, encoding="utf-8")
        return ForkedScript(forkserver, path, **changes)

    return start


@pytest.fixture
def launch(
    tmp_path: Path,
    script: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    forkserver: ForkServer,
) -> Callable[..., Ran]:
    """Run the source of a script with these settings, and audit its trace.

    No process is restarted unless `restart` is true. The output of all processes is shown.
    """
    count = 0

    def run(
        source: str,
        *,
        workers: int = 2,
        steps: int | None = 10,
        restart: bool = False,
        **options: Any,
    ) -> Ran:
        nonlocal count
        count += 1
        run_dir = tmp_path / f"run-{count}"
        run_dir.mkdir()
        spec = {name: options.pop(name) for name in SPEC if name in options}
        settings = Settings(
            spec=RunSpec(workers=workers, steps=steps, **spec),
            script=str(script(source)),
            arguments=(str(run_dir),),
            restart=restart,
            **{"output": "all", **options},
        )
        capsys.readouterr()
        code = Launcher(settings, run_dir, forkserver).run()
        printed = capsys.readouterr()
        trace_file = run_dir / "trace.jsonl"
        assert trace_file.exists(), printed.out + printed.err
        trace = read_trace(trace_file)
        audit(trace)
        kept = {
            int(file.stem.removeprefix("worker-")): torch.load(file)
            for file in run_dir.glob("worker-*.pt")
        }
        return Ran(code, printed.out, printed.err, trace, kept, run_dir)

    return run


@pytest.fixture
def shared_forkserver(monkeypatch: pytest.MonkeyPatch, forkserver: ForkServer) -> None:
    """Make `paceline run` use the fork server that all tests share."""
    verb = import_module("paceline.cli.run")
    monkeypatch.setattr(verb, "ForkServer", lambda _: nullcontext(forkserver))
