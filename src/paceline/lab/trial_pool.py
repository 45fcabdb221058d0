# SPDX-License-Identifier: BSD-3-Clause
"""Run many trials, one per core, and reuse the stored results of earlier ones.

Each trial computes with one thread, because tensors this small gain nothing from a second one. With
a single process, trials run in this one.
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

from paceline.lab.threads import one_thread
from paceline.lab.trial import Trial, TrialResult
from paceline.lab.trial_runner import run_trial, stored_result

__all__ = ["TrialPool", "TrialProgress"]

POLL_EVERY_S = 0.5


class TrialProgress(Protocol):
    """Called repeatedly while trials run."""

    def __call__(self, done: int, of: int, share: float) -> None:
        """Report how many trials are done, and which share of all the work."""


class TrialPool:
    """Runs trials and stores their results in a folder."""

    def __init__(self, folder: Path, processes: int | None = None) -> None:
        self._folder = folder
        self._processes = processes or len(os.sched_getaffinity(0))

    def run(self, trials: Sequence[Trial], progress: TrialProgress) -> list[TrialResult]:
        """Return the result of each trial, in order; stored ones aren't computed again."""
        known = {trial: stored_result(trial, self._folder) for trial in trials}
        missing = [trial for trial, result in known.items() if result is None]
        if missing:
            compute = self._run_here if self._processes == 1 else self._run_in_processes
            known |= zip(missing, compute(missing, progress), strict=True)
        return [result for trial in trials if (result := known[trial]) is not None]

    def _run_here(self, trials: Sequence[Trial], progress: TrialProgress) -> list[TrialResult]:
        epochs = [0.0] * len(trials)
        results: list[TrialResult] = []

        def on_epochs(number: int, used: float) -> None:
            epochs[number] = used
            progress(len(results), len(trials), _share_done(trials, epochs))

        with one_thread():
            for number, trial in enumerate(trials):
                results.append(run_trial(trial, self._folder, partial(on_epochs, number)))
                on_epochs(number, trial.epochs)
        return results

    def _run_in_processes(
        self, trials: Sequence[Trial], progress: TrialProgress
    ) -> list[TrialResult]:
        context = get_context("spawn")
        epochs, is_stopped = context.Array("d", len(trials)), context.Event()
        pool = ProcessPoolExecutor(
            self._processes,
            context,
            initializer=_init_worker,
            initargs=(epochs, is_stopped, os.getpid()),
        )
        try:
            futures = [
                pool.submit(_run_in_worker, number, trial, self._folder)
                for number, trial in enumerate(trials)
            ]
            _wait_all(
                futures, lambda done: progress(done, len(trials), _share_done(trials, epochs[:]))
            )
        finally:  # if one trial has failed, nobody needs the others
            is_stopped.set()
            pool.shutdown(cancel_futures=True)
        return [future.result() for future in futures]


def _wait_all(futures: list[Future[TrialResult]], on_done: Callable[[int], None]) -> None:
    """Wait for all futures; raise the exception of the first that fails."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, POLL_EVERY_S)
        for future in done:
            future.result()
        on_done(len(futures) - len(pending))


def _share_done(trials: Sequence[Trial], epochs: Sequence[float]) -> float:
    """Return the share of all samples that has been used."""
    done = total = 0.0
    for trial, used in zip(trials, epochs, strict=True):
        done += trial.problem.samples * min(used, trial.epochs)  # a last update may use more
        total += trial.problem.samples * trial.epochs
    return done / total


# ------------------------------------------------------------------------- in the worker processes

_epochs: "SynchronizedArray[float]"
_is_stopped: Event
_parent: int


def _init_worker(epochs: "SynchronizedArray[float]", is_stopped: Event, parent: int) -> None:
    global _epochs, _is_stopped, _parent  # a pool's initializer can't hand values on otherwise
    _epochs, _is_stopped, _parent = epochs, is_stopped, parent
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a traceback per process would tell you nothing
    torch.set_num_threads(1)


def _run_in_worker(number: int, trial: Trial, folder: Path) -> TrialResult:
    def on_epochs(epochs: float) -> None:
        _epochs[number] = epochs
        if os.getppid() != _parent:  # the parent was killed; the pool would wait for it forever
            os._exit(1)
        if _is_stopped.is_set():
            raise KeyboardInterrupt

    result = run_trial(trial, folder, on_epochs)
    _epochs[number] = trial.epochs
    return result
