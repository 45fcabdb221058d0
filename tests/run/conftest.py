# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures that run real scripts in real processes, in a fraction of a second each.

The fork server, which has imported torch, is started once and serves all tests.
"""

import sys
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
from paceline.cli import main
from paceline.run.launch.forkserver import ForkServer
from paceline.run.launch.launcher import Launcher
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.trace.schema import Trace
from paceline.watch.audit import audit
from server_harness import STEPS, Harness, Served, no_intruder, serve

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

    No process is restarted unless `restart` is true.
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
            **options,
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
def call(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    forkserver: ForkServer,
) -> Callable[..., tuple[Any, str, str]]:
    """Run the command line in this process; return the exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    verb = import_module("paceline.cli.run")
    monkeypatch.setattr(verb, "ForkServer", lambda _: nullcontext(forkserver))

    def run(*words: object) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["paceline", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return run


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
