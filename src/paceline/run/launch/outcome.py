# SPDX-License-Identifier: BSD-3-Clause
"""The exit code of a run that wasn't interrupted, and the reason for it."""

from collections.abc import Sequence
from typing import NamedTuple

from paceline.errors import (
    CheckpointError,
    InternalError,
    PacelineError,
    SpecError,
    TraceError,
)
from paceline.run.launch.monitor import RunMonitor
from paceline.run.launch.processes import Child
from paceline.run.settings import Settings

__all__ = ["Outcome", "of_updates", "outcome"]

# Errors whose exit code becomes that of the run, if the server or a worker exits with it.
_FROM_SERVER = (SpecError, TraceError, CheckpointError, InternalError)
_FROM_WORKERS = (SpecError, CheckpointError, InternalError)


class Outcome(NamedTuple):
    """How a run ended."""

    code: int
    why: str = ""  # "": already said, or nothing to explain


def outcome(
    settings: Settings, server: Child, workers: Sequence[Child], monitor: RunMonitor
) -> Outcome:
    """Return the exit code of a run that wasn't interrupted, and the reason."""
    code, end = _failure_code(server, workers), monitor.end
    if not monitor.is_finished and any(worker.is_broken for worker in workers):
        code = code or PacelineError.exit_code
    if code:
        return Outcome(code, _failed_despite_goal(workers, code) if monitor.is_finished else "")
    if not monitor.was_served:
        why = "nothing was trained: the script never called run.prepare()"
        return Outcome(PacelineError.exit_code, why)
    if workers[0].code:
        why = "worker 0 was lost, so what the script does only once (`if run.is_first`) is not done"
        return Outcome(PacelineError.exit_code, why)
    if end is None or monitor.is_finished:
        return Outcome(0)
    if monitor.version > end.version:  # and the scripts had already ended
        why = (
            f"update {end.version + 1} and later ones were lost when the server died, and no "
            "worker is left to redo them"
        )
        return Outcome(PacelineError.exit_code, why)
    ended = "the scripts ended" if monitor.have_scripts_ended else "the run was stopped"
    where = f"at update {end.version}{of_updates(settings)}"
    return Outcome(0, f"{ended} {where}{_unreached_goal(settings)}")


def _failure_code(server: Child, workers: Sequence[Child]) -> int:
    """Return the exit code if any process failed, else 0."""
    codes = [worker.code for worker in workers]
    for kind in _FROM_SERVER:
        if server.code == kind.exit_code or (kind in _FROM_WORKERS and kind.exit_code in codes):
            return kind.exit_code
    has_failed = server.code or any(code > 0 for code in codes)
    return PacelineError.exit_code if has_failed else 0


def _failed_despite_goal(workers: Sequence[Child], code: int) -> str:
    """Explain why a run that reached its goal failed anyway."""
    failed = [worker for worker in workers if worker.code > 0]
    if not failed:  # the server failed, which was already said
        return ""
    more = f" and {len(failed) - 1} more failed" if len(failed) > 1 else ""
    return (
        f"the run reached its goal, but {failed[0].name} {failed[0].exit_text}{more}: "
        f"exit code {code}"
    )


def of_updates(settings: Settings) -> str:
    """Return what follows the number of an update: " of 100", if the total is known."""
    return "" if settings.spec.steps is None else f" of {settings.spec.steps}"


def _unreached_goal(settings: Settings) -> str:
    """Return that the run didn't reach its goal, if it had one."""
    before = ", before the run reached its goal"
    if settings.spec.samples is not None:
        return f"{before} of {settings.spec.samples} samples"
    if settings.epochs is not None:
        return f"{before} of {settings.epochs:g} epochs"
    return "" if settings.spec.steps is None else before
