# SPDX-License-Identifier: BSD-3-Clause
"""Real runs of real scripts on real processes, in a fraction of a second each.

The process with torch in it that all others are forked from is started once, and serves all tests.
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
from server_harness import STEPS, Scene, Served, nobody, serve

SPEC = ("workers", "steps", "min_workers", "late", "seed")

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
    """What came of a run."""

    code: int
    out: str  # what all processes printed, with their names in front
    err: str
    trace: Trace
    kept: dict[int, dict[str, Any]]  # what each worker gave to `keep`
    folder: Path


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Write a script. It begins with the usual imports, and `keep(run, name=value)`."""

    def write(source: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(PREAMBLE + textwrap.dedent(source), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def forkserver() -> Iterator[ForkServer]:
    """What all processes of all tests are forked from."""
    with ForkServer() as one:
        yield one


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
    """Run the source of a script with these settings, and check its trace.

    Nobody is started again unless `restart` says so.
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
    """Call the command line with these words in this process; return exit code, out, err."""
    monkeypatch.chdir(tmp_path)
    verb = import_module("paceline.cli.run")
    monkeypatch.setattr(
        verb, "ForkServer", lambda _: nullcontext(forkserver)
    )  # there is one for all tests

    def call_it(*words: object) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["paceline", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return call_it


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """The run to which nobody comes."""
    return serve(nobody, tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def unharmed(
    undisturbed: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[[Callable[[Scene], object]], tuple[Served, str]]:
    """Let somebody come in; check that the run is as it would have been, and give what was said."""

    def check(intrude: Callable[[Scene], object]) -> tuple[Served, str]:
        capsys.readouterr()
        served = serve(intrude, tmp_path)
        assert served.failure == ""
        contributors = [sorted(update.contributors) for update in served.trace.updates()]
        assert contributors == [[0, 1]] * STEPS
        assert torch.equal(served.weights, undisturbed.weights)
        assert torch.equal(served.momentum, undisturbed.momentum)
        return served, capsys.readouterr().out

    return check
