# SPDX-License-Identifier: BSD-3-Clause
"""A run on this machine: who is started, who is started again, and a clean end.

Processes are forked from one in which torch is loaded already. A worker that dies is started again,
and so is a server that was killed, until several starts in a row have brought nothing. A run whose
workers all fail in the same way has nothing to hope for, and ends.
"""

import os
import selectors
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from types import FrameType

import msgspec

from paceline.errors import PacelineError, PeerLost, SpecError
from paceline.run.launch.child import STOPS
from paceline.run.launch.forkserver import ForkServer
from paceline.run.launch.outcome import of_updates, outcome
from paceline.run.launch.output import Output, OutputStream, PipeSafeScreen, PlainScreen, Screen
from paceline.run.launch.processes import Child, Processes
from paceline.run.launch.restarts import TRIES_MAX, Follower, tell_missing
from paceline.run.launch.run_folder import (
    discard_pending_spec,
    lock,
    mark_finished,
    write_run_files,
)
from paceline.run.settings import Settings

__all__ = ["Launcher"]

GRACE_S = 10.0  # for a worker to end once the server has; and for all to end when killed
READY_S = 1.0  # for a server to begin, if all workers have failed already
TICK_S = 0.2  # how often we look after things that nobody tells us


class Launcher:
    """One run on this machine."""

    def __init__(
        self, settings: Settings, run_dir: Path, forkserver: ForkServer | None = None
    ) -> None:
        self._settings = _placed(settings)
        self._run_dir = run_dir.resolve()
        self._trace = self._run_dir / "trace.jsonl"
        self._forkserver = forkserver or ForkServer()
        self._own_forkserver = forkserver is None
        self._server: Child | None = None
        self._workers: list[Child] = []
        self._missing: dict[int, str] = {}  # workers that are not started again, and why
        self._untold: set[int] = set()  # those of them that the server does not know of
        self._ended: set[int] = set()  # workers that came to their ends, and nothing was said of it
        self._interrupts = 0
        self._heeded = 0  # of them
        self._number = 0  # the signal that came last
        self._is_ending = False  # nobody is started any more
        self._is_given_up = False  # all workers are gone before the end
        self._end_server_by: float | None = None  # not None iff nobody is left that it serves
        self._is_server_told = False  # to end
        self._was_lost_late = False  # the server was, after the last update: who is left was told
        self._kill_at: float | None = None
        self._next_tick = 0.0

    def run(self, screen: Screen | None = None, first_line: str = "") -> int:
        """Run to the end, shown on this screen after a first line; return the exit code."""
        self._screen = PipeSafeScreen(screen or PlainScreen())
        with ExitStack() as stack:
            stack.callback(self._screen.close)
            stack.enter_context(lock(self._run_dir))
            if first_line:
                self._screen.line(first_line, sys.stderr)
            stack.callback(discard_pending_spec, self._run_dir)
            stack.enter_context(_on_signals(self._on_signal))
            self._selector = stack.enter_context(selectors.DefaultSelector())
            self._output = Output(self._selector, self._screen, self._run_dir / "output")
            self._processes = Processes(self._forkserver, self._output, self._settings)
            if self._own_forkserver:
                stack.callback(self._forkserver.close)
            stack.callback(self._output.close)
            stack.callback(self._end_whoever_is_left)
            return self._run()

    def _run(self) -> int:
        try:
            self._start()
            while self._processes or any(child.start_at is not None for child in self._children):
                self._look()
        except PeerLost as error:  # so the system has killed all that were forked from it
            self._output.say(f"{error}: the run cannot go on")
            self._processes.forget()
            return PacelineError.exit_code
        return self._exit_code()

    @property
    def _children(self) -> list[Child]:
        return [*([self._server] if self._server else []), *self._workers]

    def _start(self) -> None:
        who = write_run_files(self._run_dir, self._settings)
        spec = self._settings.spec
        self._follower = Follower(self._trace, spec.steps)
        self._forkserver.start()
        while not self._forkserver.wait_ready(TICK_S):
            if self._interrupts:
                return
            self._screen.tick()
        self._selector.register(self._forkserver, selectors.EVENT_READ)
        cores = len(os.sched_getaffinity(0))
        threads = max(1, cores // spec.workers)
        self._server = Child("server", who, cores)
        self._workers = [
            Child(f"worker {worker}", replace(who, worker=worker), threads)
            for worker in range(spec.workers)
        ]
        for child in self._children:
            self._start_one(child)

    # ---------------------------------------------------------------------------- looking after it

    def _look(self) -> None:
        """Pass on what was printed, see who has ended, and do what follows from it."""
        due = [child.start_at for child in self._children if child.start_at is not None]
        until = min([self._next_tick, *due])
        for key, _ in self._selector.select(max(0.0, until - monotonic())):
            if isinstance(key.data, OutputStream):
                self._output.read(key.data)
        for child in self._processes.ended():
            self._follower.look()
            if child is self._server:
                self._on_end_of_server(child)
            else:
                self._on_end_of_worker(child)
        if self._interrupts > self._heeded:
            self._heed()
        if monotonic() >= self._next_tick:
            self._next_tick = monotonic() + TICK_S
            self._follower.look()
            self._output.tick(monotonic())
            self._screen.tick()
            self._tell_missing()
            self._tell_ends()
            self._end_server()
        for child in self._children:
            if child.start_at is not None and monotonic() >= child.start_at:
                self._start_again(child)
        if self._kill_at is not None and monotonic() > self._kill_at:
            self._processes.kill()

    def _on_end_of_worker(self, worker: Child) -> None:
        assert worker.who.worker is not None
        if worker.code == 0:
            self._miss(worker, "it has come to its end")
            self._ended.add(worker.who.worker)
        elif not worker.is_killed:
            if not self._may_start(worker) or self._all_failed_alike():
                self._output.say(f"{worker.name} {worker.how}")
                self._miss(worker, worker.how)
            else:
                progress = self._follower.accepted[worker.who.worker]
                self._try_again(worker, worker.how, progress)
        self._end_if_nobody_is_left()

    def _on_end_of_server(self, server: Child) -> None:
        self._was_lost_late |= server.code < 0 and self._follower.is_over
        if server.code < 0 and not server.is_killed and self._may_start(server):
            self._try_again(server, server.how, self._follower.version)
            if server.start_at is not None:
                return  # the workers find it when it is back
        elif server.code and not server.is_killed and not self._is_given_up:
            self._output.say(f"server {server.how}")
        self._start_nobody()
        if self._was_lost_late and not self._interrupts:
            return  # the workers were told, and come to their ends
        # Whoever is left was stopped, or has lost the server: nobody waits for it.
        self._kill_at = monotonic() + (GRACE_S if server.code == 0 else 1.0)

    # ------------------------------------------------------------------------------ starting again

    def _may_start(self, child: Child) -> bool:
        """Whether it is of use; after the last update, only a server is that has to write it."""
        follower = self._follower
        if self._interrupts or follower.end is not None or not self._settings.restart:
            return False
        if follower.is_over:
            return child is self._server
        return not self._is_ending

    def _try_again(self, child: Child, how: str, progress: int) -> None:
        pause = child.tries.next_pause(progress)
        if pause is None:
            self._output.say(
                f"{child.name} is not started again: it {how}, and {TRIES_MAX} starts in a row "
                "have brought nothing"
            )
            self._miss(child, how)
        else:
            child.start_at = monotonic() + pause
            self._output.say(
                f"{child.name} {how}; it is started again in {pause:g} s "
                f"({child.tries.count} of {TRIES_MAX})"
            )

    def _start_again(self, child: Child) -> None:
        child.start_at = None
        self._follower.look()
        if self._may_start(child):
            try:
                self._start_one(child)
            except PeerLost:
                raise
            except PacelineError as error:
                self._try_again(child, f"could not be started: {error}", 0)
        self._end_if_nobody_is_left()

    def _start_one(self, child: Child) -> None:
        if child is self._server:  # which knows nothing of the one before
            self._untold = set(self._missing)
            self._end_server_by, self._is_server_told = None, False
            self._follower.begin()
        self._processes.start(child)

    def _start_nobody(self) -> None:
        self._is_ending = True
        for child in self._children:
            if not self._may_start(child):
                child.start_at = None

    def _miss(self, child: Child, reason: str) -> None:
        """A worker is not started again: a run that has not begun must not wait for it."""
        if child.who.worker is not None:
            self._missing[child.who.worker] = reason
            self._untold.add(child.who.worker)

    def _tell_missing(self) -> None:
        """Tell the server, once it can hear us."""
        if not self._untold or self._is_ending or self._follower.end is not None:
            return
        if self._server is None or self._server.pid is None:
            return
        who = self._server.who
        untold = {worker: self._missing[worker] for worker in sorted(self._untold)}
        if tell_missing(who.address, who.token(), untold):
            self._untold.clear()

    def _tell_ends(self) -> None:
        """Say whose script has ended in the middle of the run; if all have, that is said once."""
        is_going = any(worker.pid is not None for worker in self._workers)
        if is_going or self._follower.is_finished:
            early = self._ended & self._follower.left.keys()
            self._ended -= early
            for worker in sorted(early):
                at = f"{self._follower.left[worker]}{of_updates(self._settings)}"
                self._output.say(f"worker {worker} has come to its end at update {at}")

    # ------------------------------------------------------------------------------------- the end

    def _all_failed_alike(self) -> bool:
        """Whether nobody runs, for the same reason: to try again is of no use."""
        if any(worker.pid is not None for worker in self._workers):
            return False
        failures = {worker.failure for worker in self._workers}
        return len(failures) == 1 and failures != {""}

    def _end_if_nobody_is_left(self) -> None:
        """Nobody would bring the run to its end."""
        if any(worker.pid is not None for worker in self._workers):
            return
        alike = self._all_failed_alike()
        if not alike and any(worker.start_at is not None for worker in self._workers):
            return
        has_failed = any(worker.code and not worker.is_killed for worker in self._workers)
        if has_failed and not self._is_ending and not self._follower.is_over:
            self._is_given_up = True
            self._output.say(self._why_nobody_is_left(alike))
        self._start_nobody()
        if self._end_server_by is None:
            self._end_server_by = monotonic() + (READY_S if has_failed else GRACE_S)
            self._end_server()

    def _end_server(self) -> None:
        """There is nobody left to serve. A server that is just getting ready ends in good order."""
        if self._end_server_by is None or self._is_server_told or self._server is None:
            return
        if self._follower.is_begun or monotonic() >= self._end_server_by:
            self._server.signal(signal.SIGTERM)
            self._is_server_told = True

    def _why_nobody_is_left(self, alike: bool) -> str:
        if len(self._workers) == 1:
            return "the only worker is gone, so the run ends"
        if alike:
            return "all workers have failed in the same way, so the run ends"
        return "all workers are gone, and none is started again, so the run ends"

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._interrupts += 1
        self._number = number

    def _heed(self) -> None:
        """We were interrupted: stop in good order, or at once if it was not the first time."""
        if self._heeded == 0:
            self._output.say("stopping; once more to stop at once")
        self._heeded = self._interrupts
        self._start_nobody()
        if self._interrupts == 1 and self._server is not None and self._server.pid is not None:
            self._server.signal(signal.SIGTERM)
        else:
            self._kill_at = 0.0

    def _end_whoever_is_left(self) -> None:
        until = monotonic() + GRACE_S
        self._is_ending = True
        for child in self._children:
            child.start_at = None
        with suppress(OSError, PeerLost):  # nobody reads what we print; all are gone
            self._processes.kill()
            while self._processes and monotonic() < until:
                self._look()

    def _exit_code(self) -> int:
        self._follower.look()
        self._tell_ends()
        end = self._follower.end
        if end is not None and self._follower.is_finished and not self._workers[0].code:
            mark_finished(self._run_dir, end.version)
        if self._interrupts:
            return 128 + self._number
        assert self._server is not None
        code, why = outcome(self._settings, self._server, self._workers, self._follower)
        if why:
            self._output.say(why)
        return code


@contextmanager
def _on_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let this be told of what asks a run to stop; after `nohup` a closed terminal does not."""
    heard = [number for number in STOPS if not _is_without_terminal(number)]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _is_without_terminal(number: int) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def _placed(settings: Settings) -> Settings:
    """The settings with whole paths; raises SpecError at what is not there, or no text."""
    script, folder = Path(settings.script), Path(settings.folder or ".")
    if not script.is_file():
        raise SpecError(f"there is no script {script}")
    if not folder.is_dir():
        raise SpecError(
            f"the folder {folder}, in which the script worked, is gone; make it again, or name the "
            "script and its arguments to let it work where you are"
        )
    try:
        script, folder = script.resolve(), folder.resolve()
    except OSError as error:
        raise SpecError(f"cannot tell where we are: {error.strerror}") from None
    for text in (str(script), str(folder), *settings.arguments):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise SpecError(f"a script and its arguments must be UTF-8, got {text!r}") from None
    return msgspec.structs.replace(settings, script=str(script), folder=str(folder))
