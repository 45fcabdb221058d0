# SPDX-License-Identifier: BSD-3-Clause
"""Take over what scripts do to the options and schedulers of their optimizers.

Workers report it with their turns, and it counts whatever becomes of their gradients. Each worker
learns of the changes that it doesn't know with its next turn.
"""

from traceback import print_exc
from typing import Any

from paceline.core.ledger import Ledger
from paceline.errors import ProtocolError
from paceline.run.net import messages
from paceline.run.server.progress import Progress
from paceline.run.server.run_failure import RunFailure
from paceline.run.tensors.group_options import (
    OptionLog,
    all_options,
    check_options,
    current_option,
    set_option,
)
from paceline.run.tensors.shard import Shard
from paceline.run.tensors.state_spec import OptionChange

__all__ = ["Report", "ScriptSettings"]

Report = messages.GradientReport | messages.AbandonReport


class ScriptSettings:
    """The options of the server's optimizers, and the calls of their schedulers."""

    def __init__(
        self, shard: Shard, ledger: Ledger, progress: Progress, failures: RunFailure
    ) -> None:
        self._shard = shard
        self._ledger = ledger
        self._progress = progress
        self._failures = failures
        self._options = OptionLog()

    def check(self, report: Report) -> None:
        """Raise ProtocolError if there is no such option, optimizer or scheduler, or a bad value.

        Nothing of the report may have been taken over yet.
        """
        optimizers = self._shard.state.optimizers
        if report.optimizer >= len(optimizers):
            raise ProtocolError(f"there is no optimizer {report.optimizer}")
        if report.options:
            check_options(optimizers, report.options)
        if report.schedulers:
            self._shard.schedules.check(report.schedulers)

    def take(self, worker: int, report: Report) -> None:
        """Take over what a script did to options and schedulers, whatever its gradient's fate."""
        if report.options:
            self.set_options(report.options, min(report.version, self._ledger.version))
        if report.schedulers:
            self._note_calls(worker, report)
        self._shard.schedules.count_turn(worker, report.optimizer)

    def set_options(self, options: tuple[OptionChange, ...], version: int) -> None:
        """Set options that a worker's script changed while it computed at this version."""
        for option in options:
            if self._options.add(option, version):
                set_option(self._shard.state.optimizers, option)

    def _note_calls(self, worker: int, report: Report) -> None:
        """Step the schedulers that a worker's script has called."""
        schedules, optimizers = self._shard.schedules, self._shard.state.optimizers
        before = all_options(optimizers) if any(one.metrics for one in report.schedulers) else None
        try:
            for line in schedules.note_calls(worker, report.schedulers):
                self._progress.say(line)
        except Exception as error:  # raised by the script's own scheduler, say
            print_exc()
            self._failures.fail(f"a scheduler failed: {error!r}")
        if before is not None:  # only the server knows what a metric has changed
            for option in all_options(optimizers):
                if option not in before:
                    self._options.add(option, self._shard.version)

    # -------------------------------------------------------------------------------- for workers

    @property
    def edition(self) -> int:
        """The number of option changes so far."""
        return self._options.edition

    def options_since(self, known: int | None) -> tuple[OptionChange, ...]:
        """Return the options whose changes came after the first `known`; None: all options."""
        optimizers = self._shard.state.optimizers
        if known is None:  # the worker may have joined an earlier server before this one
            return all_options(optimizers)
        changed = self._options.since(known)
        return tuple([current_option(optimizers, option) for option in changed])

    # -------------------------------------------------------------------------------- checkpoints

    def saved(self) -> list[Any]:
        """Return what a checkpoint keeps."""
        return self._options.saved()

    def restore(self, saved: list[Any]) -> None:
        """Continue from a checkpoint."""
        self._options.restore(saved)
