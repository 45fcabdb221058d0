# SPDX-License-Identifier: BSD-3-Clause
"""The exit code of a run that wasn't interrupted, and the reason for it.

Exit code 0 means that the version that was asked for is in the weights on disk, and that the trace
has its end. A run whose scripts end before its goal was asked for no more than that. The server
exits with code 0 only if it has written both, and reports the end only then, so everything else is
a failure here.
"""

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

__all__ = ["Outcome", "of_updates", "outcome", "why_no_worker_is_left"]

# Errors whose exit code becomes that of the run, if they end the server or a worker.
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
    # A server that was killed after it had written everything is no loss.
    has_written = monitor.end is not None and not monitor.has_failed
    is_lost = server.code > 0 or (server.code < 0 and not has_written)
    if code := _failure_code(server, workers, is_lost):
        return Outcome(code, _why_failed(workers, code, monitor))
    if why := _why_incomplete(workers, monitor):
        return Outcome(PacelineError.exit_code, why)
    if monitor.is_finished:
        return Outcome(0)
    assert monitor.end is not None
    where = f"at update {monitor.end.version}{of_updates(settings)}{_unreached_goal(settings)}"
    if monitor.have_scripts_ended:
        return Outcome(0, f"the scripts ended {where}")
    return Outcome(PacelineError.exit_code, f"the server was stopped {where}")


def _why_incomplete(workers: Sequence[Child], monitor: RunMonitor) -> str:
    """Return what is missing although no process failed; "" if nothing is."""
    if not monitor.was_served:
        return "nothing was trained: the script never called run.prepare()"
    if workers and not workers[0].has_completed:
        return (
            "worker 0 was lost, so what the script does only once (`if run.is_first`) is not done"
        )
    if monitor.end is None:
        return "the server exited before the run had ended"
    if not monitor.is_finished and monitor.version > monitor.end.version:
        # The scripts had already ended when the server died.
        return (
            f"update {monitor.end.version + 1} and later ones were lost when the server died, and "
            "no worker is left to redo them"
        )
    return ""


def _failure_code(server: Child, workers: Sequence[Child], is_server_lost: bool) -> int:
    """Return the exit code if any process failed, else 0."""
    codes = [worker.error_code for worker in workers]
    for kind in _FROM_SERVER:
        is_workers = kind in _FROM_WORKERS and kind.exit_code in codes
        if server.error_code == kind.exit_code or is_workers:
            return kind.exit_code
    has_failed = is_server_lost or any(worker.has_failed for worker in workers)
    return PacelineError.exit_code if has_failed else 0


def _why_failed(workers: Sequence[Child], code: int, monitor: RunMonitor) -> str:
    """Explain why a run failed that ended by itself, because it reached its goal or was stopped."""
    failed = [worker for worker in workers if worker.has_failed]
    if not failed or monitor.end is None or monitor.has_failed:  # the server has said why
        return ""
    ended = "reached its goal" if monitor.is_finished else f"ended at update {monitor.end.version}"
    more = f" and {len(failed) - 1} more failed" if len(failed) > 1 else ""
    return f"the run {ended}, but {failed[0].name} {failed[0].exit_text}{more}: exit code {code}"


def why_no_worker_is_left(workers: int, failed_alike: bool) -> str:
    """Return why a run of this many workers has none left."""
    if workers == 1:
        return "the only worker is gone"
    if failed_alike:
        return "all workers failed in the same way"
    return "all workers are gone and none will be restarted"


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
