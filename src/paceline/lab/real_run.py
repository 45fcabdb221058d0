# SPDX-License-Identifier: BSD-3-Clause
"""Record a real run on this machine: worker processes, and a run folder deleted afterwards."""

import signal
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from paceline.errors import PacelineError
from paceline.run.launch.forkserver import ForkServer
from paceline.run.launch.launcher import Launcher
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace, trace_file
from paceline.trace.schema import Trace

__all__ = ["arrival_times", "record_run"]


class _SilentScreen:
    """A screen that collects lines instead of printing them."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str, to: TextIO) -> None:
        """Keep the line for the error message."""
        del to
        self.lines.append(text)

    def tick(self) -> None:
        """Do nothing: there is no progress bar to move."""

    def close(self) -> None:
        """Do nothing."""


def record_run(script: Path, spec: RunSpec, policy: str = "sync") -> Trace:
    """Run the script and return the trace; if it fails, raise PacelineError with its output."""
    screen = _SilentScreen()
    with TemporaryDirectory(prefix="paceline-lab-") as folder, ForkServer(script) as forkserver:
        settings = Settings(
            spec=spec,
            policy=policy,
            script=str(script),
            folder=folder,
            checkpoint_every="0",
            restart=False,
            progress=False,
        )
        code = Launcher(settings, Path(folder), forkserver).run(screen)
        if code == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        if code:
            raise PacelineError("\n".join(["the run on this machine failed:", *screen.lines]))
        return read_trace(trace_file(folder))


def arrival_times(trace: Trace, skip: int = 0) -> NDArray[np.float64]:
    """Return when gradients arrived, counted from the first assignment at their version.

    There is one row per update, without the first `skip` updates, and times ascend within a row.
    The trace must be of `sync`.
    """
    begins: dict[int, float] = {}
    times: defaultdict[int, list[float]] = defaultdict(list)
    for gradient in trace.gradients():
        begin = min(gradient.asked_at, begins.get(gradient.version, gradient.asked_at))
        begins[gradient.version] = begin
        times[gradient.version].append(gradient.t)
    rows = [sorted(t - begins[version] for t in own) for version, own in sorted(times.items())]
    return np.array([row for row in rows[skip:] if len(row) == trace.header.workers])
