# SPDX-License-Identifier: BSD-3-Clause
"""Where trials are conducted: one on each core; what was done before is not done again.

Each trial computes with one thread, because small tensors gain nothing from a second one. Where one
process is enough, it is this one.
"""

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from functools import partial
from multiprocessing import get_context
from multiprocessing.sharedctypes import SynchronizedArray
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Protocol

import torch

from paceline.lab.conduct import conduct, remembered
from paceline.lab.threads import one_thread
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
            conducted = self._here if self._processes == 1 else self._elsewhere
            known |= zip(missing, conducted(missing, progress), strict=True)
        return [outcome for trial in trials if (outcome := known[trial]) is not None]

    def _here(self, trials: Sequence[Trial], progress: Progress) -> list[Outcome]:
        epochs = [0.0] * len(trials)
        outcomes: list[Outcome] = []

        def tell(number: int, used: float) -> None:
            epochs[number] = used
            progress(len(outcomes), len(trials), _share(trials, epochs))

        with one_thread():
            for number, trial in enumerate(trials):
                outcomes.append(conduct(trial, self._folder, partial(tell, number)))
                tell(number, trial.epochs)
        return outcomes

    def _elsewhere(self, trials: Sequence[Trial], progress: Progress) -> list[Outcome]:
        context = get_context("spawn")
        epochs, is_over = context.Array("d", len(trials)), context.Event()
        pool = ProcessPoolExecutor(
            self._processes, context, initializer=_begin, initargs=(epochs, is_over, os.getpid())
        )
        try:
            futures = [
                pool.submit(_conduct, number, trial, self._folder)
                for number, trial in enumerate(trials)
            ]
            _watch(futures, lambda done: progress(done, len(trials), _share(trials, epochs[:])))
        finally:  # whatever is still computed, because another has failed, is of no use
            is_over.set()
            pool.shutdown(cancel_futures=True)
        return [future.result() for future in futures]


def _watch(futures: list[Future[Outcome]], show: Callable[[int], None]) -> None:
    """Wait for all; raise what the first that fails has raised."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, LOOK_EVERY_S)
        for future in done:
            future.result()
        show(len(futures) - len(pending))


def _share(trials: Sequence[Trial], epochs: Sequence[float]) -> float:
    """Of all samples, those that were used by now."""
    done = wanted = 0.0
    for trial, used in zip(trials, epochs, strict=True):
        done += trial.problem.samples * min(used, trial.epochs)  # a last update may take more
        wanted += trial.problem.samples * trial.epochs
    return done / wanted


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
