# SPDX-License-Identifier: BSD-3-Clause
"""Runs that a real torchrun starts, and the processes that belong to them."""

import os
import select
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from descendants import wait_until_gone
from failures import HELPERS, LOOP, TRAINING
from paceline.trace.reader import read_trace
from paceline.trace.schema import Trace
from paceline.watch.audit import audit

__all__ = [
    "HELPERS_WITHOUT_ROLE",
    "PATIENCE_S",
    "QUIET",
    "RESUMABLE",
    "TorchrunJob",
    "held",
    "same",
    "take_pids",
    "torchrun_command",
]

PATIENCE_S = 120
MARK = "PACELINE_TEST_JOB"

QUIET = "def trouble(run): pass\n"

RESUMABLE = "--steps 12 --checkpoint-every 1 --min-workers 2"
"""Options of a run that two workers end as if nothing had happened: none goes on alone."""

HELD = """
def trouble(run):
    if run.version == 6 and not was_told("go"):
        tell(f"pid-{run.worker}", os.getpid())
        wait_for("go")
"""
"""Every worker waits at version 6 until the test tells it to go on."""

# Nobody has a role before `paceline.join()`.
HELPERS_WITHOUT_ROLE = HELPERS.replace('os.environ["PACELINE_ROLE"]', '""')


def held(loop: str = LOOP) -> str:
    """Return the source of a script whose workers are held."""
    return HELPERS_WITHOUT_ROLE + TRAINING + HELD + loop


def take_pids(job: "TorchrunJob") -> list[int]:
    """Wait until both workers are held; return their pids, and forget them."""
    words = [job.folder / f"pid-{worker}.word" for worker in range(2)]
    job.wait_for(*[word.name for word in words])
    pids = [int(word.read_text()) for word in words]
    for word in words:
        word.unlink()
    return pids


def same(weights: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    """Return whether these are the same, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def torchrun_command(*words: object) -> list[str]:
    """Return the command line of torchrun with these words."""
    return [sys.executable, "-m", "torch.distributed.run", *map(str, words)]


class TorchrunJob:
    """One torchrun on this host, or in a network namespace, with one worker per process."""

    def __init__(
        self, folder: Path, options: str = "", popen: Any = subprocess.Popen, name: str = "job"
    ) -> None:
        """`options`: those of the run. `popen`: starts a program, as `subprocess.Popen` does."""
        self.folder = folder
        self._name = name
        self._popen = popen
        self._mark = f"{MARK}={folder}"
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")},
            MARK: str(folder),
            "PACELINE_OPTIONS": options,
            "OMP_NUM_THREADS": "1",
        }

    def start(self, *words: object) -> subprocess.Popen[str]:
        """Start torchrun."""
        with self._path("out").open("w") as out, self._path("err").open("w") as err:
            self._process = self._popen(
                torchrun_command(*words),
                cwd=self.folder,
                env=self._environment,
                stdout=out,
                stderr=err,
            )
        return self._process

    def run(self, *words: object) -> int:
        """Run torchrun to its end; return its exit code."""
        self.start(*words)
        return self.wait()

    def wait(self) -> int:
        """Wait for torchrun to exit; return its exit code."""
        return self._process.wait(PATIENCE_S)

    @property
    def out(self) -> str:
        """What all processes have printed."""
        return self._path("out").read_text()

    @property
    def err(self) -> str:
        """What they have printed to standard error."""
        return self._path("err").read_text()

    def _path(self, kind: str) -> Path:
        return self.folder / f"{self._name}.{kind}"

    def trace(self, folder: str = "run") -> Trace:
        """Return the trace of the run, after checking it."""
        trace = read_trace(self.folder / folder / "trace.jsonl")
        audit(trace)
        return trace

    def weights(self, folder: str = "run") -> list[torch.Tensor]:
        """Return the final weights."""
        return list(torch.load(self.folder / folder / "weights.pt").values())

    def pids(self) -> list[int]:
        """Return the processes of this job that are alive."""
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdecimal():
                try:
                    variables = (path / "environ").read_bytes().decode(errors="replace")
                except OSError:  # it has exited, or belongs to another user
                    continue
                if self._mark in variables.split("\0"):
                    found.append(int(path.name))
        return found

    def wait_until_nothing_is_left(self) -> None:
        """Wait until every process of this job has exited, which must not take long."""
        wait_until_gone(*self.pids())
        assert self.pids() == []

    def wait_for(self, *names: str) -> None:
        """Wait until the scripts have written these files, while torchrun is running."""
        pidfd = os.pidfd_open(self._process.pid)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        missing = _missing(self.folder, names)
        for _ in range(PATIENCE_S * 50):
            if not missing:
                break
            assert not poll.poll(20), f"torchrun has exited\n{self.out}\n{self.err}"
            missing = _missing(self.folder, names)
        os.close(pidfd)
        assert not missing


def _missing(folder: Path, names: Sequence[str]) -> list[str]:
    return [name for name in names if not (folder / name).exists()]
