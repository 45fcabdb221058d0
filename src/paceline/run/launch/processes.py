# SPDX-License-Identifier: BSD-3-Clause
"""The processes of a run on this machine: starting them, hearing of their ends, killing them.

Nothing here decides who is started and when; that is the launcher's.
"""

import os
import signal
from contextlib import suppress
from dataclasses import dataclass, field

from paceline.errors import PacelineError, PeerLost
from paceline.run.launch.child import Task
from paceline.run.launch.environment import Identity, variables
from paceline.run.launch.forkserver import ForkServer, how_it_ended
from paceline.run.launch.output import Failure, Output
from paceline.run.launch.restarts import Tries
from paceline.run.settings import Settings

__all__ = ["Child", "Processes"]


@dataclass(eq=False)
class Child:
    """A process of the run, however often it was started."""

    name: str
    who: Identity
    threads: int
    tries: Tries = field(default_factory=Tries)
    pid: int | None = None  # not None iff it is running
    code: int = 0  # that it ended with, the last time
    how: str = ""  # it ended, in words
    failure: str = ""  # what its script has failed of, the last time; "": it has not
    start_at: float | None = None  # when it is started again; None: it is not
    is_killed: bool = False  # by us

    def signal(self, number: int) -> None:
        """Send it a signal, if it is running."""
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Processes:
    """Those that are running."""

    def __init__(self, forkserver: ForkServer, output: Output, settings: Settings) -> None:
        self._forkserver = forkserver
        self._output = output
        self._settings = settings
        self._running: dict[int, Child] = {}  # by their pids

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._running)

    def start(self, child: Child) -> None:
        """Start it; raises PacelineError if the system will not have one more process."""
        settings = self._settings
        task = Task(
            variables=variables(child.who),
            script=settings.script,
            arguments=settings.arguments,
            folder=settings.folder,
            seed=settings.spec.seed,
            threads=child.threads,
        )
        try:
            ends = self._output.pipes(child.name)
        except OSError as error:
            raise PacelineError(f"cannot start a process: {error.strerror}") from None
        try:
            child.pid = self._forkserver.fork(task, ends)
        finally:
            for fd in (ends.out, ends.err, ends.told):
                os.close(fd)
        self._running[child.pid] = child
        child.start_at = None

    def ended(self) -> list[Child]:
        """Those that have ended since this was asked for last; all that they said is passed on."""
        found = []
        for ended in self._forkserver.ended():
            child = self._running.pop(ended.pid, None)
            if child is None:  # of an earlier run
                continue
            failure = self._output.drain(child.name)
            child.pid, child.code = None, ended.code
            child.how = _how(child, failure)
            # That the server is gone is no failure of the script: it may be back soon.
            is_own = ended.code > 0 and ended.code != PeerLost.exit_code
            child.failure = (failure.text if failure else child.how) if is_own else ""
            found.append(child)
        return found

    def kill(self) -> None:
        """Kill them all, and say so."""
        for child in self._running.values():
            assert child.pid is not None
            with suppress(ProcessLookupError, PermissionError):
                # With what its script has started; it may not be the leader of a group yet.
                os.killpg(child.pid, signal.SIGKILL)
            child.signal(signal.SIGKILL)
        for child in self._running.values():
            if not child.is_killed:
                child.is_killed = True
                self._output.say(f"{child.name} had not ended, and was killed")

    def forget(self) -> None:
        """The system has killed them all."""
        self._running.clear()


def _how(child: Child, failure: Failure | None) -> str:
    """Say how a process has ended."""
    if failure is not None and failure.same_as and child.code > 0:
        before = "before" if failure.same_as == child.name else failure.same_as
        return f"failed in the same way as {before}"
    how = how_it_ended(child.code)
    if -child.code == signal.SIGSEGV and child.who.worker is not None:
        how += (
            "; its script may have written to the parameters, which are the server's: see the line "
            "above, and change them in an optimizer of your own instead"
        )
    return how
