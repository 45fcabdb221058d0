# SPDX-License-Identifier: BSD-3-Clause
"""Where trials are conducted: one on each core; what was done before is not done again.

Each trial computes in a process of its own with one thread, because small tensors gain nothing from
a second one.
"""

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from multiprocessing.sharedctypes import SynchronizedArray
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Protocol

import torch

from paceline.lab.conduct import conduct, remembered
from paceline.lab.trial import Outcome, Trial

__all__ = ["Bench", "Progress"]

LOOK_EVERY_S = 0.5


class Progress(Protocol):
    """Is told how far a number of trials has come."""

    def __call__(self, done: int, of: int, share: float) -> None:
        """So many trials are done, and this share of all the work."""


class Bench:
    """Conducts trials, and remembers their outcomes in a folder."""

    def __init__(self, folder: Path, processes: int | None = None) -> None:
        self._folder = folder
        self._processes = processes or len(os.sched_getaffinity(0))

    def outcomes(self, trials: Sequence[Trial], progress: Progress) -> list[Outcome]:
        """What came of each of them, in their order."""
        known = {trial: remembered(trial, self._folder) for trial in trials}
        missing = [trial for trial, outcome in known.items() if outcome is None]
        if missing:
            known |= self._conduct(missing, progress)
        return [outcome for trial in trials if (outcome := known[trial]) is not None]

    def _conduct(self, trials: Sequence[Trial], progress: Progress) -> dict[Trial, Outcome]:
        context = get_context("spawn")
        epochs, is_over = context.Array("d", len(trials)), context.Event()
        work = [trial.epochs * trial.problem.samples for trial in trials]
        pool = ProcessPoolExecutor(
            self._processes, context, initializer=_begin, initargs=(epochs, is_over, os.getpid())
        )
        try:
            futures = [
                pool.submit(_conduct, number, trial, self._folder)
                for number, trial in enumerate(trials)
            ]
            _watch(futures, lambda done: progress(done, len(trials), _share(trials, epochs, work)))
        finally:  # whatever is still computed, because another has failed, is of no use
            is_over.set()
            pool.shutdown(cancel_futures=True)
        return {trial: future.result() for trial, future in zip(trials, futures, strict=True)}


def _watch(futures: list[Future[Outcome]], show: Callable[[int], None]) -> None:
    """Wait for all; raise what the first that fails has raised."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, LOOK_EVERY_S)
        for future in done:
            future.result()
        show(len(futures) - len(pending))


def _share(
    trials: Sequence[Trial], epochs: "SynchronizedArray[float]", work: Sequence[float]
) -> float:
    done = sum(
        amount * used / trial.epochs
        for trial, used, amount in zip(trials, epochs[:], work, strict=True)
    )
    return done / sum(work)


# ------------------------------------------------------------------------- in the other processes

_epochs: "SynchronizedArray[float]"
_is_over: Event
_parent: int


def _begin(epochs: "SynchronizedArray[float]", is_over: Event, parent: int) -> None:
    global _epochs, _is_over, _parent  # how a pool hands something on
    _epochs, _is_over, _parent = epochs, is_over, parent
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the traceback would tell nobody anything
    torch.set_num_threads(1)


def _conduct(number: int, trial: Trial, folder: Path) -> Outcome:
    def tell(epochs: float) -> None:
        _epochs[number] = epochs
        if os.getppid() != _parent:  # it was killed, and this process would wait for it for ever
            os._exit(1)
        if _is_over.is_set():
            raise KeyboardInterrupt

    outcome = conduct(trial, folder, tell)
    _epochs[number] = trial.epochs
    return outcome
