# SPDX-License-Identifier: BSD-3-Clause
"""A real run on this machine: processes of its own, in a folder that is gone afterwards."""

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

__all__ = ["arrivals", "recorded"]


class _Unseen:
    """A screen that keeps what it should show."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str, to: TextIO) -> None:
        """Keep it."""
        del to
        self.lines.append(text)

    def tick(self) -> None:
        """Nothing moves here."""

    def close(self) -> None:
        """Nothing is left to do."""


def recorded(script: Path, spec: RunSpec, policy: str = "sync") -> Trace:
    """The trace of a run of this script; raises PacelineError with what it said if it fails."""
    screen = _Unseen()
    with TemporaryDirectory(prefix="paceline-lab-") as folder, ForkServer(script) as nursery:
        settings = Settings(
            spec=spec,
            policy=policy,
            script=str(script),
            folder=folder,
            checkpoint_every="0",
            restart=False,
            progress=False,
        )
        code = Launcher(settings, Path(folder), nursery).run(screen)
        if code == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        if code:
            raise PacelineError("\n".join(["the run on this machine has failed:", *screen.lines]))
        return read_trace(trace_file(folder))


def arrivals(trace: Trace, skip: int = 0) -> NDArray[np.float64]:
    """When gradients arrived, counted from the first that was asked for at their version.

    One row an update, after those to skip; in each the times ascend. For a trace of `sync`.
    """
    begins: dict[int, float] = {}
    times: defaultdict[int, list[float]] = defaultdict(list)
    for gradient in trace.gradients():
        begin = min(gradient.asked_at, begins.get(gradient.version, gradient.asked_at))
        begins[gradient.version] = begin
        times[gradient.version].append(gradient.t)
    rows = [sorted(t - begins[version] for t in own) for version, own in sorted(times.items())]
    return np.array([row for row in rows[skip:] if len(row) == trace.header.workers])
