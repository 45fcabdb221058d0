# SPDX-License-Identifier: BSD-3-Clause
"""The real shell around the core: receive, decide, perform, record.

Theory of operation
    One thread, one loop. Each message from a worker becomes an event with the time at which it was
    read; the decider answers with actions, and the executor performs them in order. The event and
    the decisions go into the trace. The state of a run is the decider's ledger, the shard's
    tensors, and what the roster knows about each worker, and nothing else. While no message
    arrives, the server does what no worker waits for: it adds up gradients and writes the trace.

    A worker counts as dead when its connection closes. Whether its process is stopped (SIGSTOP),
    the server asks the OS. A stopped worker leaves the run. It joins again with its next report,
    or, if it was idle and has nothing to report, when the OS says that its process is running.
"""

from collections.abc import Callable, Iterable
from math import inf
from typing import Any

from paceline.core.decider import Decider
from paceline.core.events import (
    ApplyUpdate,
    Event,
    GradientArrived,
    StopRequested,
    TimerFired,
    UpdateApplied,
    WorkAbandoned,
    WorkerJoined,
    WorkerLeft,
)
from paceline.errors import PeerLost, ProtocolError
from paceline.run.net import messages
from paceline.run.net.transport import Connections, PeerEnd
from paceline.run.server.checkpoint import Saved
from paceline.run.server.checkpointer import Checkpointer
from paceline.run.server.end_requests import SCRIPT_ENDED, EndRequests
from paceline.run.server.executor import Executor, RunParts
from paceline.run.server.hosts import Hosts
from paceline.run.server.joining import Joining
from paceline.run.server.leasing import Leasing, epoch_shares
from paceline.run.server.other_servers import OtherServers, ServerLost
from paceline.run.server.progress import Progress
from paceline.run.server.recorder import Recorder
from paceline.run.server.reports import Report, Reports
from paceline.run.server.roster import Peer, Roster
from paceline.run.server.run_end import RunEnd
from paceline.run.server.run_failure import RunFailure
from paceline.run.server.state_requests import StateRequests
from paceline.run.server.timers import RunClock, Timers
from paceline.run.server.transfers import Transfers
from paceline.run.server.waiting_for import WaitingFor
from paceline.run.server.watchers import Watchers
from paceline.run.settings import Settings
from paceline.run.tensors.shard import Shard
from paceline.trace.event_records import Measured, record_event
from paceline.trace.schema import Ended

__all__ = ["Server"]

QUIET_S = 1e-3  # after this long without news, the server does its idle work
TICK_S = 0.5  # how often the server checks what no message reports
WORTH_SUMMING_EARLY_BYTES = 1 << 20  # adding up less takes no noticeable time during the update
LINGER_S = 10.0  # after the end, for workers that haven't joined yet
STOP_S = 12.0  # after a signal, for workers to leave; a launcher kills its own before that
SETTLE_S = 10.0  # after the end, for workers to report the rest


class Server:
    """One run, from the server's side."""

    def __init__(
        self,
        settings: Settings,
        decider: Decider,
        shard: Shard,
        connections: Connections,
        recorder: Recorder,
        checkpointer: Checkpointer,
    ) -> None:
        system = self._system = connections.system
        self._monotonic = system.monotonic
        self._settings = settings
        self._decider = decider
        self._shard = shard
        self._connections = connections
        self._recorder = recorder
        self._checkpointer = checkpointer
        self._others = OtherServers.none(shard.whole)
        self._roster = Roster(settings, shard.whole.spec, epoch_shares(decider))
        self._watchers = Watchers(decider.ledger, recorder.reached)
        self._waiting_for = WaitingFor(decider, recorder)
        self._failures = RunFailure()
        self._progress = Progress(settings, system)
        self._timers = Timers()
        self._clock = RunClock(recorder.time, system)
        parts = RunParts(
            settings=settings,
            decider=decider,
            shard=shard,
            checkpointer=checkpointer,
            roster=self._roster,
            failures=self._failures,
            progress=self._progress,
            timers=self._timers,
            clock=self._clock,
        )
        self._run_end = RunEnd(parts, recorder, self._watchers)
        self._executor = Executor(parts, recorder.began, recorder.updated)
        self._transfers = Transfers(decider, self._roster, shard.release_slot)
        self._joining = Joining(
            parts, self._executor, self._others, self._handle, self._lose, self._take
        )
        self._end: Ended | None = None
        self._leave_at = inf  # then the run doesn't wait for workers any more
        self._has_idle_work = False
        checkpointer.begin(decider.ledger.version, self._clock.now())
        self._handlers = {**self._own_handlers(), **self._other_handlers(parts)}
        self._handlers |= self._others.handlers

    def _other_handlers(self, parts: RunParts) -> dict[type, Callable[[PeerEnd, Any], None]]:
        """Return the handlers of the parts that each handle a few kinds of messages."""
        executor, recorder, leases = self._executor, self._recorder, parts.decider.leases
        ends = EndRequests(parts, executor, recorder.reached, self._handle, self._lose)
        leasing = Leasing(
            leases, parts.roster, parts.clock, recorder, lambda: self._end is not None
        )
        states = StateRequests(parts.decider, parts.shard, parts.roster, executor)
        script_settings = executor.script_settings
        reports = Reports(parts, script_settings, self._transfers, self._handle, self._rejoin)
        hosts = self._hosts = Hosts(parts, self._transfers, reports, self._take)
        all_parts = (ends, leasing, states, reports, hosts)
        return {kind: handler for one in all_parts for kind, handler in one.handlers.items()}

    def _own_handlers(self) -> dict[type, Callable[[PeerEnd, Any], None]]:
        return {
            **self._joining.handlers,
            messages.PositionReport: self._on_position_report,
            messages.Watch: self._watchers.add,
        }

    def restore(self, saved: Saved) -> None:
        """Continue from a checkpoint; the decider and the shard have loaded it already."""
        self._executor.restore(saved)
        self._checkpointer.restore(saved.positions)

    def expect_launcher(self) -> None:
        """Don't end before the launcher has come, or it would not learn how the run ended."""
        self._watchers.is_awaited = True

    def expect_return(self) -> None:
        """Let workers keep the numbers that they had at an earlier server."""
        self._joining.numbers.expect_return()

    def expect_servers(self, others: OtherServers) -> None:
        """Serve together with other servers; workers join when all of these are here."""
        self._others = self._joining.others = others
        self._transfers.set_servers(others.servers)
        self._handlers |= others.handlers

    def serve(self) -> str:
        """Run until every worker has left; return why the run failed, "" if it didn't.

        Raises ServerLost if the run has to start again from its last checkpoint.
        """
        try:
            self._serve()
            assert self._end is not None
            self._run_end.save(self._end)
        except ServerLost as error:
            self._progress.say(f"{error.why}; all servers go back to the last checkpoint")
            self._checkpointer.wait()
            self._recorder.close()
            self._connections.shut_down()
            raise
        self._others.end()
        self._connections.shut_down()
        return self._failures.failure or ("" if self._end.version else "no update was made")

    def _serve(self) -> None:
        """Handle news until all is done; no variable is a peer: a slot that was left would stay."""
        next_tick = self._monotonic()
        while not self._is_done():
            if self._monotonic() >= next_tick:
                self._tick()
                next_tick = self._monotonic() + TICK_S
            self._stop_if_wanted()
            self._wait_for_news(min(next_tick, self._watchers.due_at(self._has_idle_work)))
            self._fire_timers()
            if self._transfers:
                self._settle_transfers()
            self._watchers.report(self._monotonic(), self._has_idle_work)
            self._note_others()
            self._lose_broken()

    def _wait_for_news(self, until: float) -> None:
        """Wait for messages until then, and receive them; if there are none, use the time."""
        next_at = min(self._timers.next_at, self._transfers.next_at)
        until = min(until, self._clock.monotonic_at(next_at))
        wait_s = max(0.0, until - self._monotonic())
        ready = self._connections.wait(min(wait_s, QUIET_S) if self._has_idle_work else wait_s)
        for peer in ready:
            self._take(peer)
        if self._has_idle_work and not ready:
            self._do_idle_work()

    def _note_others(self) -> None:
        """Act on what other servers have reported, or haven't."""
        if failure := self._others.failure:
            self._executor.fail(failure)
        self._others.note_missing()
        for end, reason in self._others.take_lost_peers():
            self._roster.lose(end, reason)

    def _lose_broken(self) -> None:
        for end, reason, told in self._roster.take_broken():
            if self._roster.find(end) is not None:  # it may be broken for several reasons
                self._lose(end, reason, told)

    def _is_done(self) -> bool:
        """Return whether the run has ended and every worker knows it, including late ones."""
        if self._end is None or (self._roster.active and self._monotonic() < self._leave_at):
            return False
        have_all_joined = self._roster.known_count >= self._settings.spec.workers
        is_complete = have_all_joined and not self._watchers.is_awaited
        if is_complete or self._connections.stop_wanted:
            return True
        return self._clock.now() > self._end.t + LINGER_S

    def _stop_if_wanted(self) -> None:
        """Stop the run if a signal has asked for that, or if it has failed."""
        if self._connections.stop_wanted:
            self._leave_at = min(self._leave_at, self._monotonic() + STOP_S)
        is_wanted = self._connections.stop_wanted or self._failures.failure
        if is_wanted and not self._is_stopping:
            self._handle(StopRequested(self._clock.now()))

    @property
    def _is_stopping(self) -> bool:
        return self._end is not None or self._decider.ledger.stopping

    # --------------------------------------------------------------------------------- receiving

    def _take(self, end: PeerEnd, received: Iterable[object] | None = None) -> None:
        """Handle messages of a peer, by default those that have arrived; it may break off."""
        try:
            for message in end.receive_nowait() if received is None else received:
                if not self._others.ignores(end, message):
                    self._handlers[type(message)](end, message)
        except ProtocolError as error:
            self._lose(end, f"broke the protocol: {error}", tell_it=str(error))
        except PeerLost as error:
            self._lose(end, str(error))

    def _lose(self, end: PeerEnd, reason: str, tell_it: str = "") -> None:
        """Close a connection; if it is a member's, the worker leaves the run."""
        if number := self._others.number_of(end):
            raise self._others.lost(number, reason)
        self._connections.close(end, tell_it)
        self._watchers.remove(end)
        self._hosts.lost(end, reason)
        self._joining.numbers.remove(end)
        peer = self._roster.find(end)
        if peer is not None:
            self._roster.remove(peer)
            self._shard.remove_reader(peer.worker)
            if not peer.is_parked:
                self._leave(peer, reason)
        elif tell_it:
            self._progress.say(f"refused a connection: {tell_it}")

    def _settle_transfers(self) -> None:
        """End the turns of announced gradients that won't count, and let others be sent."""
        while worthless := self._transfers.take_worthless():
            for peer, report in worthless:
                self._take(peer.end, [report])
        self._transfers.admit(self._clock.now())

    def _leave(self, peer: Peer, reason: str) -> None:
        self._transfers.forget(peer.worker)
        self._shard.release_slot(peer.worker)
        self._checkpointer.forget(peer.worker)
        self._decider.leases.release(peer.worker)
        asked_at = self._roster.end_turn(peer, self._clock.now())
        lost = None if asked_at is None else Measured(asked_at)
        if self._end is None and reason != SCRIPT_ENDED:  # the launcher reports it, if need be
            self._progress.say(f"worker {peer.worker} left: {reason}")
        self._handle(WorkerLeft(self._clock.now(), peer.worker, reason), lost)

    def _rejoin(self, peer: Peer) -> None:
        self._roster.unpark(peer)
        self._progress.say(f"worker {peer.worker} is back")
        self._handle(WorkerJoined(self._clock.now(), peer.worker))

    def _on_position_report(self, end: PeerEnd, message: messages.PositionReport) -> None:
        worker, now = self._roster.member(end).worker, self._clock.now()
        self._checkpointer.take_position(worker, message.checkpoint, message.position, now)

    # --------------------------------------------------------------------- deciding, performing

    def _handle(
        self, event: Event, measured: Measured | None = None, report: Report | None = None
    ) -> None:
        """Decide on an event, perform what was decided, and record both."""
        self._perform(event, measured, report)
        self._has_idle_work = True
        if self._failures.failure and not self._is_stopping:
            self._perform(StopRequested(self._clock.now()))

    def _perform(
        self, event: Event, measured: Measured | None = None, report: Report | None = None
    ) -> None:
        version = self._decider.ledger.version
        actions = self._decider.handle(event)  # raises before anything is done if it is illegal
        if report is not None and (type(event) is GradientArrived or type(event) is WorkAbandoned):
            self._executor.script_settings.take(event.worker, report)
        if self._decider.ledger.finished and self._end is None:
            self._watchers.report_saving(True)
        gradient = report if isinstance(report, messages.GradientReport) else None
        performed = self._executor.perform(actions, event.time, version, gradient)
        self._watchers.note(event, actions, self._monotonic())
        self._recorder.write(record_event(event, actions, version, measured, performed.made))
        if performed.end is not None:
            self._end = performed.end
            self._executor.end_run(performed.end)
            self._watchers.report_saving(False)
        for action in actions if self._decider.learns_from_updates else ():
            if isinstance(action, ApplyUpdate):
                made = performed.made.get(action.update)  # None if the update failed
                sq_norm = None if made is None else made.sq_norm
                self._perform(UpdateApplied(event.time, action.update, sq_norm))

    # --------------------------------------------------------------------- timers and idle work

    def _fire_timers(self) -> None:
        for timer in self._timers.pop_due(self._clock.now()):
            if self._decider.ledger.awaits_timer(timer) and self._end is None:
                self._handle(TimerFired(self._clock.now(), timer))

    def _do_idle_work(self) -> None:
        """Do what no worker waits for, because no message has arrived."""
        self._has_idle_work = False
        self._recorder.flush()
        if self._shard.size_bytes >= WORTH_SUMMING_EARLY_BYTES:
            self._executor.sum_early()
        self._watchers.report(self._monotonic())

    def _tick(self) -> None:
        """Check what no message reports: stopped processes, patience, the trace on disk."""
        now = self._clock.now()
        self._recorder.flush()
        if self._recorder.failure:
            self._recorder.resume(self._run_end.gap())
        self._watchers.report(self._monotonic())
        self._executor.save_if_overdue(now)
        self._checkpointer.tick(now)
        if self._end is not None:
            self._watchers.computing = self._roster.computing
            if now > self._end.t + SETTLE_S and not self._run_end.is_saved:
                self._run_end.save(self._end)
        ledger = self._decider.ledger
        asked_at = {} if self._others.missing else self._waiting_for.check(now)
        waiting_s = {worker: now - since for worker, since in asked_at.items()}
        self._watchers.note_waiting(waiting_s, self._monotonic())
        here = [peer.worker for peer in self._roster.active]
        if not self._others.missing:  # workers that have come wait for them, too
            self._progress.tick(here, ledger.begun, ledger.samples, waiting_s)
        # Before the run begins, workers may take any time to start.
        has_begun = ledger.begun or self._roster.known_count >= self._settings.spec.workers
        is_stuck = ledger.paused and has_begun and not self._is_stopping
        self._failures.check_patience(self._settings, is_stuck, len(here), now)
        self._joining.numbers.tick()
        self._park_stopped()

    def _park_stopped(self) -> None:
        """Notice workers whose processes were stopped (SIGSTOP) or continue."""
        for peer in self._roster.members:
            stopped = peer.end.pid is not None and self._system.is_stopped(peer.end.pid)
            if stopped and not peer.is_parked:
                self._roster.park(peer)
                self._leave(peer, "stopped")
            elif peer.is_parked and peer.is_silent and not stopped:
                self._rejoin(peer)
