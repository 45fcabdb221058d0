# SPDX-License-Identifier: BSD-3-Clause
"""Decide what happens to the workers that one host has in a run whose server is elsewhere.

Each worker has a seat here. When the head has given the seat a number, its process starts; it is
restarted when it dies, with the same pauses and limits as in a run on one machine. The number stays
the same, unless another worker has taken it while this host was cut off.

The supervisor never waits. Its owner calls `step` when something has happened, and at `wake_at`.
"""

import secrets
import signal
from dataclasses import dataclass, field, replace
from math import inf

from paceline.errors import PacelineError, PeerLost, ProtocolError
from paceline.run.cores import threads_of
from paceline.run.launch.agent_child import AgentChild, is_of_use
from paceline.run.launch.environment import Identity
from paceline.run.launch.hangs import EndGrace
from paceline.run.launch.head_connection import HeadConnection
from paceline.run.launch.processes import Child, Processes
from paceline.run.launch.stop_signals import StopSignals
from paceline.run.launch.unavailable_workers import UnavailableWorkers
from paceline.run.net.messages import NumberReserved
from paceline.run.settings import Settings
from paceline.run.system import SYSTEM, System

__all__ = ["WorkSupervisor"]

LEAVE_S = 10.0  # for workers to leave after a signal
TICK_S = 0.2  # between checks of what sends no event
REPORT_S = 60.0  # for the head to come back and hear which scripts have ended


@dataclass(eq=False)
class _Seat:
    """A place for one worker on this host."""

    name: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    child: Child | None = None  # None: it has no number yet
    refused: int | None = None  # the number with which its worker was refused
    code: int | None = None  # exit code; None: its worker runs, or will be started


class WorkSupervisor:
    """The decisions of a launcher of workers."""

    def __init__(
        self,
        who: Identity,
        settings: Settings,
        processes: Processes,
        link: HeadConnection,
        signals: StopSignals,
        system: System = SYSTEM,
    ) -> None:
        """`who`: the identity of all workers, but for the number, which is None if it isn't fixed.

        There are as many seats as the settings have workers.
        """
        self._who = who
        self._settings = settings
        self._processes = processes
        self._link = link
        self._signals = signals
        self._say = link.say
        self._system = system
        self._now = system.monotonic
        self._seats = [_Seat() for _ in range(settings.spec.workers)]
        self._unavailable = UnavailableWorkers(link.monitor, link.say)
        self._end_grace: EndGrace | None = None  # known with the first number
        self._agent: AgentChild | None = None  # likewise, if the workers share one
        self._signals_handled = 0
        self._ended_at: float | None = None  # when the last worker ended
        self._kill_at = inf
        self._next_tick = 0.0
        link.on_connect = self._unavailable.on_server_start

    def start(self) -> None:
        """Ask for numbers; each worker follows when it has one."""
        for seat in self._seats:
            fixed = self._who.worker
            self._link.request(seat.name, fixed, is_fixed=fixed is not None)
        self._link.start()

    @property
    def is_done(self) -> bool:
        """Whether no process is running or will be started, and the head knows what it must."""
        if self._processes or any(seat.code is None for seat in self._seats):
            return False
        link = self._link
        is_cut_off = link.is_run_gone or link.refusal or link.gave_up
        is_needed = not (link.monitor.is_over or is_cut_off or self._signals.count)
        is_late = self._ended_at is not None and self._now() > self._ended_at + REPORT_S
        return self._unavailable.are_reported or not is_needed or is_late

    @property
    def wake_at(self) -> float:
        """When to call `step`, even if nothing has happened."""
        due = [self._link.monitor.retry_at, *(child.start_at for child in self._children)]
        due += [] if self._agent is None else [self._agent.child.start_at]
        return min([self._next_tick, *(at for at in due if at is not None)])

    def step(self) -> bool:
        """Act on whatever has happened, and on what is due; return whether a tick was due."""
        for child in self._processes.take_exited():
            if self._agent is not None and child is self._agent.child:
                self._agent.on_exited()
            else:
                self._on_exited(child)
        self._connect()
        for seat in self._seats:
            if seat.child is None and seat.code is None:
                self._fill(seat)
        if self._signals.count > self._signals_handled:
            self._on_stop_signal()
        is_tick = self._now() >= self._next_tick
        if is_tick:
            self._next_tick = self._now() + TICK_S
            self._unavailable.report()
            self._end_late_workers()
        for child in self._children:
            if child.start_at is not None and self._now() >= child.start_at:
                self._restart(child)
        if self._now() >= self._kill_at:
            self._processes.kill()
        self._note_end()
        return is_tick

    def kill_all(self) -> None:
        """Kill every process, and start none from now on."""
        self._end_idle(PacelineError.exit_code)
        self._processes.kill()

    def exit_code(self) -> int:
        """Return the exit code of the launcher; a host that goes with notice is no failure."""
        if self._signals.count and self._signals.last != signal.SIGTERM:
            return 128 + self._signals.last
        failed = {seat.code for seat in self._seats if seat.code}
        [code] = failed if len(failed) == 1 else [PacelineError.exit_code if failed else 0]
        return code or 0

    @property
    def _children(self) -> list[Child]:
        return [seat.child for seat in self._seats if seat.child is not None]

    # -------------------------------------------------------------------------------- the head

    def _connect(self) -> None:
        """Try to reach the head if it is time; end what waits for one that won't come."""
        link = self._link
        retry_at = link.monitor.retry_at
        if not (link.refusal or link.gave_up):
            if retry_at is not None and self._now() >= retry_at:
                link.monitor.connect()
            return
        link.monitor.close()
        if any(seat.child is None and seat.code is None for seat in self._seats):
            self._say(link.refusal or link.gave_up)
            code = ProtocolError.exit_code if link.refusal else PeerLost.exit_code
            for seat in self._seats:
                if seat.child is None and seat.code is None:
                    seat.code = code

    def _fill(self, seat: _Seat) -> None:
        """Start the worker of a seat that has got its number."""
        reserved = self._link.reserved.get(seat.name)
        if reserved is None:
            return
        if reserved.number == seat.refused:  # it was refused for another reason than its number
            seat.code = ProtocolError.exit_code
            return
        if self._end_grace is None:
            self._begin(reserved)
        who = self._who if self._agent is None else self._agent.served(self._who)
        who = replace(who, worker=reserved.number, workers=reserved.workers, seat=seat.name)
        is_first = seat is self._seats[0]
        seat.child = Child(
            f"worker {reserved.number}", who, threads_of(len(self._seats)), is_quiet=not is_first
        )
        self._say(_start_line(reserved))
        self._processes.set_seed(reserved.seed)
        self._restart(seat.child)

    def _begin(self, reserved: NumberReserved) -> None:
        """Prepare what all workers need: the head is there."""
        self._end_grace = EndGrace(reserved.grace_s, self._link.monitor, self._system)
        if is_of_use(self._who, len(self._seats)):
            self._agent = AgentChild(self._who, self._processes, self._system)

    # ---------------------------------------------------------------------------------- workers

    def _seat_of(self, child: Child) -> _Seat:
        return next(seat for seat in self._seats if seat.child is child)

    def _on_exited(self, child: Child) -> None:
        seat, number = self._seat_of(child), child.who.worker
        assert number is not None
        if self._signals.count or child.is_killed:
            is_lost = number == 0 and not self._signals.count  # what only it does isn't done
            seat.code = PacelineError.exit_code if is_lost else 0
        elif child.code == 0:
            if not child.has_left:  # otherwise, another host may have a worker with its number
                self._unavailable.add_completed(number)
            seat.code = 0
        elif child.error_code == ProtocolError.exit_code and self._who.worker is None:
            # Another worker may have its number: then it gets another one, and is started again.
            seat.child, seat.refused = None, number
            self._link.request(seat.name, number)
        elif child.error_code in (ProtocolError.exit_code, PeerLost.exit_code):
            seat.code = child.error_code
        else:
            self._link.monitor.refresh()  # its last gradients may not be reported yet
            self._on_failed(seat, child)

    def _on_failed(self, seat: _Seat, child: Child) -> None:
        """Restart a worker that has failed or was killed, if that makes sense."""
        if not self._may_restart or child.is_broken:
            self._say(f"{child.name} {child.exit_text}")
            self._give_up(seat, child)
        else:
            assert child.who.worker is not None
            self._schedule_restart(seat, child, child.exit_text)

    @property
    def _may_restart(self) -> bool:
        return self._settings.restart and not self._link.monitor.is_over

    def _schedule_restart(self, seat: _Seat, child: Child, why: str) -> None:
        assert child.who.worker is not None
        pause_s = child.backoff.next_pause_s(self._link.progress(child.who.worker))
        self._say(child.backoff.line(f"{child.name} {why}", pause_s))
        if pause_s is None:
            self._give_up(seat, child)
        else:
            child.start_at = self._now() + pause_s

    def _give_up(self, seat: _Seat, child: Child) -> None:
        assert child.who.worker is not None
        self._unavailable.add(child.who.worker, child.exit_text)
        if self._link.monitor.is_over and not child.has_failed:
            seat.code = 0  # it was killed when it wasn't needed any more
        else:
            seat.code = child.error_code or PacelineError.exit_code

    def _restart(self, child: Child) -> None:
        child.start_at = None
        seat = self._seat_of(child)
        if not self._may_restart and child.exit_text:
            self._give_up(seat, child)
            return
        try:
            self._processes.start(child)
        except PeerLost:
            raise
        except PacelineError as error:
            self._schedule_restart(seat, child, f"could not be started: {error}")

    # ----------------------------------------------------------------------------------- the end

    def _note_end(self) -> None:
        """Note when the last worker has ended; nobody needs the agent any more then."""
        has_ended = all(seat.code is not None for seat in self._seats)
        if has_ended and self._ended_at is None:
            self._ended_at = self._now()
        if self._agent is None:
            return
        if has_ended and not any(child.pid for child in self._children):
            self._agent.end()
        else:
            self._agent.restart_if_due()

    def _on_stop_signal(self) -> None:
        """Let the workers leave at the first signal; kill them at the next."""
        is_first, self._signals_handled = self._signals_handled == 0, self._signals.count
        self._end_idle(0)
        if is_first and self._signals.count == 1:
            if self._processes:
                self._say("leaving the run; interrupt again to stop immediately")
            for seat in self._seats:
                if seat.child is not None and seat.code is None:
                    self._leave(seat, seat.child)
            self._kill_at = self._now() + LEAVE_S
        else:
            self._kill_at = 0.0

    def _leave(self, seat: _Seat, child: Child) -> None:
        """Let a worker leave: nobody waits for it any more, even if it is in a long computation."""
        assert child.who.worker is not None
        self._link.leave(child.who.worker, seat.name)
        self._processes.signal(child, signal.SIGTERM)

    def _end_idle(self, code: int) -> None:
        """Start none of the workers that aren't running."""
        for seat in self._seats:
            is_running = seat.child is not None and seat.child.pid is not None
            if seat.code is None and not is_running:
                seat.code = code
            if seat.child is not None:
                seat.child.start_at = None

    def _end_late_workers(self) -> None:
        """Kill workers that don't end after the last update; the result is safe by then."""
        over_since = self._link.monitor.over_since
        if over_since is None or self._end_grace is None:
            return
        running = [child for child in self._children if child.pid and not child.is_killed]
        limits = self._end_grace.limits(running, over_since)
        for child in [child for child in running if self._now() >= limits[child]]:
            self._say(f"{child.name} was still running long after the last update and was killed")
            self._processes.kill_silently([child])
            del limits[child]
        if limits and (line := self._end_grace.line(limits, over_since)):
            self._say(line)


def _start_line(reserved: NumberReserved) -> str:
    """Return the line that says which worker starts."""
    is_extra = reserved.number >= reserved.workers
    what = ", an additional backup," if is_extra else ""
    many = "1 worker" if reserved.workers == 1 else f"{reserved.workers} workers"
    return f"starting worker {reserved.number}{what} of a run with {many}"
