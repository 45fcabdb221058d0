# SPDX-License-Identifier: BSD-3-Clause
"""Conducting a trial: simulate, train, evaluate; remember the outcome, and go on after a stop."""

from collections.abc import Callable
from contextlib import suppress
from math import ceil
from pathlib import Path
from time import monotonic

import msgspec
import torch

from paceline.files import written_whole
from paceline.lab.schedule import schedule
from paceline.lab.training import Row, Training
from paceline.lab.trial import Outcome, Trial
from paceline.watch.curves import Target

__all__ = ["OnEpochs", "conduct", "remembered", "train"]

SAVE_EVERY_S = 60.0

OnEpochs = Callable[[float], None]
"""Is told how much data was used by now."""


def train(trial: Trial) -> Outcome:
    """The outcome of a trial; nothing is kept."""
    return _Conduct(trial, None, lambda epochs: None).run()


def conduct(trial: Trial, folder: Path, on_epochs: OnEpochs) -> Outcome:
    """The outcome of a trial: the one that is kept in the folder, or a new one, then kept."""
    outcome = remembered(trial, folder)
    if outcome is None:
        folder.mkdir(parents=True, exist_ok=True)
        save = folder / f"{trial.digest()}.pt"
        outcome = _Conduct(trial, save, on_epochs).run()
        with written_whole(_home(trial, folder), alone=False) as partial:
            partial.write_bytes(msgspec.json.encode(outcome))
        save.unlink(missing_ok=True)
    return outcome


def remembered(trial: Trial, folder: Path) -> Outcome | None:
    """The outcome that is kept in the folder; None: there is none that can be read."""
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(_home(trial, folder).read_bytes(), type=Outcome)
    return None


def _home(trial: Trial, folder: Path) -> Path:
    return folder / f"{trial.digest()}.json"


class _Conduct:
    """A trial that is under way."""

    def __init__(self, trial: Trial, save: Path | None, on_epochs: OnEpochs) -> None:
        """`save`: where its state is kept while it lasts; None: nowhere."""
        self._trace = trial.simulate()
        steps = schedule(self._trace)
        self._training = Training(trial.problem, steps, trial.recipe)
        self._marks = [ceil(i * len(steps) / trial.rows) for i in range(trial.rows + 1)]
        self._target = Target.parse(trial.target) if trial.target else None
        self._save = save
        self._on_epochs = on_epochs
        self._rows: list[Row] = []
        self._saved_at = monotonic()

    def run(self) -> Outcome:
        """Train to the end, or until the target is reached."""
        self._load()
        training = self._training
        for mark in self._marks[len(self._rows) :]:
            while training.version < mark and not training.is_diverged:
                training.run(training.version + 1)
                self._tick()
            if training.is_diverged:
                break
            self._rows.append(training.score())
            if self._is_there():
                break
        is_diverged = training.is_diverged
        return Outcome.of(self._trace, self._rows, training.version, is_diverged=is_diverged)

    def _is_there(self) -> bool:
        target = self._target
        return target is not None and target.is_reached_by(self._rows[-1].scores[target.name])

    def _tick(self) -> None:
        self._on_epochs(self._training.epochs(self._training.version))
        if self._save is not None and monotonic() - self._saved_at > SAVE_EVERY_S:
            rows = [msgspec.to_builtins(row) for row in self._rows]
            with written_whole(self._save, alone=False) as partial:
                torch.save({"training": self._training.state(), "rows": rows}, partial)
            self._saved_at = monotonic()

    def _load(self) -> None:
        """Go on from what an interrupted trial has saved, if that can be read."""
        if self._save is None or not self._save.exists():
            return
        with suppress(Exception):  # there is no end to what torch raises at a damaged file
            saved = torch.load(self._save, weights_only=True)
            self._training.load_state(saved["training"])
            self._rows = msgspec.convert(saved["rows"], list[Row])
