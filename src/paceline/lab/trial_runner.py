# SPDX-License-Identifier: BSD-3-Clause
"""Run one trial: simulate, train, evaluate; store the result, and resume after an interruption."""

from collections.abc import Callable
from contextlib import suppress
from math import ceil
from pathlib import Path
from time import monotonic

import msgspec
import torch

from paceline.files import atomic_write
from paceline.lab.training import Row, Training
from paceline.lab.trial import Trial, TrialResult
from paceline.lab.updates_of_trace import schedule
from paceline.watch.curves import Target

__all__ = ["OnEpochs", "run_trial", "stored_result", "train"]

SAVE_EVERY_S = 60.0

OnEpochs = Callable[[float], None]
"""Called after each update with the epochs of data used so far."""


def train(trial: Trial) -> TrialResult:
    """Run a trial and return its result, without storing anything."""
    return _TrialRun(trial, None, lambda epochs: None).run()


def run_trial(trial: Trial, folder: Path, on_epochs: OnEpochs) -> TrialResult:
    """Return the result stored in the folder; without one, run the trial and store its result."""
    result = stored_result(trial, folder)
    if result is None:
        folder.mkdir(parents=True, exist_ok=True)
        state_file = folder / f"{trial.digest()}.pt"
        result = _TrialRun(trial, state_file, on_epochs).run()
        with atomic_write(_result_file(trial, folder), alone=False) as file:
            file.write(msgspec.json.encode(result))
        state_file.unlink(missing_ok=True)
    return result


def stored_result(trial: Trial, folder: Path) -> TrialResult | None:
    """Return the result stored in the folder, or None if there is none that can be read."""
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(_result_file(trial, folder).read_bytes(), type=TrialResult)
    return None


def _result_file(trial: Trial, folder: Path) -> Path:
    return folder / f"{trial.digest()}.json"


class _TrialRun:
    """A trial in progress."""

    def __init__(self, trial: Trial, state_file: Path | None, on_epochs: OnEpochs) -> None:
        """`state_file`: where to save the state while the trial runs; None saves nothing."""
        self._trace = trial.simulate()
        steps = schedule(self._trace)
        self._training = Training(trial.problem, steps, trial.recipe)
        self._evaluate_at = [ceil(i * len(steps) / trial.rows) for i in range(trial.rows + 1)]
        self._target = Target.parse(trial.target) if trial.target else None
        self._state_file = state_file
        self._on_epochs = on_epochs
        self._rows: list[Row] = []
        self._saved_at = monotonic()

    def run(self) -> TrialResult:
        """Train to the end, or until the target is reached."""
        self._load_state()
        training = self._training
        for version in self._evaluate_at[len(self._rows) :]:
            while training.version < version and not training.is_diverged:
                training.run(training.version + 1)
                self._after_update()
            if training.is_diverged:
                break
            self._rows.append(training.score())
            if self._is_target_reached():
                break
        is_diverged = training.is_diverged
        return TrialResult.of(self._trace, self._rows, training.version, is_diverged=is_diverged)

    def _is_target_reached(self) -> bool:
        target = self._target
        return target is not None and target.is_reached_by(self._rows[-1].scores[target.name])

    def _after_update(self) -> None:
        self._on_epochs(self._training.epochs(self._training.version))
        if self._state_file is not None and monotonic() - self._saved_at > SAVE_EVERY_S:
            rows = [msgspec.to_builtins(row) for row in self._rows]
            with atomic_write(self._state_file, alone=False) as file:
                torch.save({"training": self._training.state(), "rows": rows}, file)
            self._saved_at = monotonic()

    def _load_state(self) -> None:
        """Continue from the state that an interrupted trial saved, if it can be read."""
        if self._state_file is None or not self._state_file.exists():
            return
        with suppress(Exception):  # torch raises all kinds of exceptions for a damaged file
            saved = torch.load(self._state_file, weights_only=True)
            self._training.load_state(saved["training"])
            self._rows = msgspec.convert(saved["rows"], list[Row])
