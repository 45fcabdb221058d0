# SPDX-License-Identifier: BSD-3-Clause
"""How a run has ended: the exit code of the launcher, and why it is that one."""

from collections.abc import Sequence
from typing import NamedTuple

from paceline.errors import (
    CheckpointError,
    InternalError,
    PacelineError,
    SpecError,
    TraceError,
)
from paceline.run.launch.processes import Child
from paceline.run.launch.restarts import Follower
from paceline.run.settings import Settings

__all__ = ["Outcome", "of_updates", "outcome"]

# Errors whose code is that of the run, too: if the server has them, and if a worker has.
_SERVERS = (SpecError, TraceError, CheckpointError, InternalError)
_WORKERS = (SpecError, CheckpointError, InternalError)


class Outcome(NamedTuple):
    """How a run has ended."""

    code: int
    why: str = ""  # "": it was said before, or nothing need be said


def outcome(
    settings: Settings, server: Child, workers: Sequence[Child], follower: Follower
) -> Outcome:
    """How a run has ended that nobody has interrupted."""
    code, end = _code(server, workers), follower.end
    if code:
        return Outcome(code, _despite(workers, code) if follower.is_finished else "")
    if not follower.has_begun:
        why = "the script has never called run.prepare(), so nothing was trained"
        return Outcome(PacelineError.exit_code, why)
    if workers[0].code:
        why = "worker 0 was lost: what the script does once, if run.is_first, is not done"
        return Outcome(PacelineError.exit_code, why)
    if end is None or follower.is_finished:
        return Outcome(0)
    if follower.version > end.version:  # the scripts had come to their ends by then
        lost = (
            f"update {end.version + 1} and later ones were lost with a server, and nobody is left"
        )
        return Outcome(PacelineError.exit_code, f"{lost} to make them again")
    ended = "the scripts ended" if follower.is_deserted else "the run was stopped"
    where = f"at update {end.version}{of_updates(settings)}"
    return Outcome(0, f"{ended} {where}, before the run came to its goal{_goal(settings)}")


def _code(server: Child, workers: Sequence[Child]) -> int:
    """What the processes that have failed make of it; 0: none has."""
    codes = [worker.code for worker in workers]
    for kind in _SERVERS:
        if server.code == kind.exit_code or (kind in _WORKERS and kind.exit_code in codes):
            return kind.exit_code
    has_failed = server.code or any(code > 0 for code in codes)
    return PacelineError.exit_code if has_failed else 0


def _despite(workers: Sequence[Child], code: int) -> str:
    """Why a run that came to its goal has failed all the same."""
    failed = [worker for worker in workers if worker.code > 0]
    if not failed:  # it is the server's, and was said
        return ""
    more = f", and {len(failed) - 1} more failed" if len(failed) > 1 else ""
    return f"the run came to its goal, but {failed[0].name} {failed[0].how}{more}: exit code {code}"


def of_updates(settings: Settings) -> str:
    """After the number of an update: of how many, if that is known."""
    return "" if settings.spec.steps is None else f" of {settings.spec.steps}"


def _goal(settings: Settings) -> str:
    """What the run was to come to, where the number of updates does not say it."""
    if settings.samples is not None:
        return f", {settings.samples} samples"
    return "" if settings.epochs is None else f", {settings.epochs:g} epochs"
