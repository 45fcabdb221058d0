# SPDX-License-Identifier: BSD-3-Clause
"""The real shell around the core: receive, decide, perform, record.

Theory of operation
    One thread, one loop. Whatever a worker says becomes an event with the time at which it was
    read; the decider answers with actions, which are performed in their order: tensors by the
    shard, everything else by a message. The event and what was decided go into the trace. A run has
    no other state than the ledger of the decider, the tensors of the shard, and what each peer was
    told last. What nobody waits for is done when nobody has anything to say: gradients that have
    come are added up, and the trace is written.

    A worker's death is its connection closing. A worker that was stopped is found by asking the
    system; it leaves the run, and joins again with its next report, or, if it had nothing to report
    on but waited, when the system tells that it goes on.
"""

from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Any

from paceline.core.decider import Decider
from paceline.core.events import (
    Event,
    GradientArrived,
    SendParams,
    StopRequested,
    TimerFired,
    WorkAbandoned,
    WorkerJoined,
    WorkerLeft,
    WorkerMissing,
)
from paceline.errors import PeerLost, ProtocolError
from paceline.run.net import messages
from paceline.run.server.checkpoint import Saved
from paceline.run.server.checkpointer import Checkpointer
from paceline.run.server.executor import Executor
from paceline.run.server.gradient_checks import check_gradient, is_of_another_optimizer
from paceline.run.server.listener import Listener
from paceline.run.server.peers import Peer, is_stopped
from paceline.run.server.recorder import Recorder
from paceline.run.settings import Settings
from paceline.run.tensors.group_options import group_of, set_option
from paceline.run.tensors.shard import Shard
from paceline.trace.records import Measured, record_event
from paceline.trace.schema import Ended

__all__ = ["Server"]

QUIET_S = 1e-3  # when nobody has said anything for so long, there is time for chores
TICK_S = 0.5  # how often the server looks after things that nobody tells it
WORTH_ADDING_EARLY_BYTES = 1 << 20  # less is added up in no time when the update is made
LINGER_S = 10.0  # for workers that have not come yet when the run is over


class Server:
    """One run, from the server's side."""

    def __init__(
        self,
        settings: Settings,
        decider: Decider,
        shard: Shard,
        listener: Listener,
        recorder: Recorder,
        checkpointer: Checkpointer,
    ) -> None:
        self._settings = settings
        self._decider = decider
        self._shard = shard
        self._listener = listener
        self._recorder = recorder
        self._checkpointer = checkpointer
        self._executor = Executor(settings, decider, shard, checkpointer)
        self._executor.began, self._executor.updated = recorder.began, recorder.updated
        self._roster, self._goal = self._executor.roster, self._executor.goal
        self._progress, self._timers = self._executor.progress, self._executor.timers
        self._has_chores = False
        self._waits_since: float | None = None  # for workers; None: it does not
        self._began = monotonic() - recorder.time
        checkpointer.begin(decider.ledger.version, self._now())
        self._handlers: dict[type, Callable[[Peer, Any], None]] = {
            messages.Join: self._on_join,
            messages.GradientReport: self._on_gradient,
            messages.AbandonReport: self._on_abandoned,
            messages.StateRequest: self._on_state_wanted,
            messages.StateUpload: self._on_state_given,
            messages.PositionReport: lambda peer, m: checkpointer.take(
                _member(peer), m.checkpoint, m.place
            ),
            messages.WorkerUnavailable: self._on_missing,
        }

    def restore(self, saved: Saved) -> None:
        """Go on from there; the decider and the shard are there already."""
        self._executor.restore(saved)
        self._checkpointer.know(saved.places)

    def serve(self) -> str:
        """Run to the end, until everybody has gone; return why it failed, "" if it did not."""
        next_tick = monotonic()
        while not self._is_done():
            if monotonic() >= next_tick:
                self._tick()
                next_tick = monotonic() + TICK_S
            wait_s = self._wait_s(next_tick)
            heard = self._listener.wait(min(wait_s, QUIET_S) if self._has_chores else wait_s)
            for peer in heard:
                self._hear(peer)
            if self._has_chores and not heard:
                self._do_chores()
            self._fire_timers()
            self._lose_the_lost()
            if self._listener.stop_wanted and not self._stops:
                self._tell(StopRequested(self._now()))
        assert self._end is not None
        self._checkpointer.finish()
        self._recorder.write([self._end])
        self._recorder.close()
        self._listener.shut()
        return self._goal.failure or ("" if self._end.version else "no update was made")

    def _is_done(self) -> bool:
        """Whether the run is over and everybody has been told, those too that come late to it."""
        if self._end is None or self._roster.active:
            return False
        all_came = len(self._roster.ever) >= self._settings.spec.workers
        return all_came or self._listener.stop_wanted or self._now() > self._end.t + LINGER_S

    @property
    def _end(self) -> Ended | None:
        return self._executor.end

    @property
    def _stops(self) -> bool:
        return self._end is not None or self._decider.ledger.stopping

    def _now(self) -> float:
        return monotonic() - self._began

    def _wait_s(self, next_tick: float) -> float:
        until = min(next_tick - self._began, self._timers.next_at)
        return max(0.0, until - self._now())

    # ------------------------------------------------------------------------ hearing of workers

    def _hear(self, peer: Peer) -> None:
        try:
            for message in self._listener.hear(peer):
                self._handlers[type(message)](peer, message)
        except ProtocolError as error:
            self._lose(peer, f"broke the rules: {error}", tell_it=str(error))
        except PeerLost as error:
            self._lose(peer, str(error))

    def _lose(self, peer: Peer, reason: str, tell_it: str = "") -> None:
        self._listener.close(peer, tell_it)
        if peer.worker is None:
            if tell_it:
                self._progress.say(f"refused a stranger: {reason}")
        elif self._roster.members.get(peer.worker) is peer:
            del self._roster.members[peer.worker]
            self._shard.leave(peer.worker)
            if not peer.is_parked:
                self._leave(peer.worker, peer, reason)

    def _lose_the_lost(self) -> None:
        while self._roster.lost:
            self._lose(*self._roster.lost.pop())

    def _leave(self, worker: int, peer: Peer, reason: str) -> None:
        self._shard.free_slot(worker)
        self._checkpointer.leave(worker)
        lost = None if peer.asked_at is None else Measured(peer.asked_at)
        peer.asked_at = None
        if self._end is None:
            self._progress.say(f"worker {worker} left: {reason}")
        self._tell(WorkerLeft(self._now(), worker, reason), lost)

    def _on_join(self, peer: Peer, message: messages.Join) -> None:
        self._roster.welcome(peer, message, self._checkpointer)
        self._join(peer, message.worker)

    def _on_missing(self, peer: Peer, message: messages.WorkerUnavailable) -> None:
        """The launcher tells that a worker will not come; of one that came we know ourselves."""
        del peer
        if message.worker not in self._roster.ever:
            self._roster.ever.add(message.worker)
            self._progress.say(f"nobody waits for worker {message.worker}: {message.reason}")
            self._tell(WorkerMissing(self._now(), message.worker, message.reason))

    def _join(self, peer: Peer, worker: int) -> None:
        self._tell(WorkerJoined(self._now(), worker))
        if self._end is not None:
            self._roster.send_over(peer)

    def _on_gradient(self, peer: Peer, message: messages.GradientReport) -> None:
        worker = self._reporter(peer, message)
        if worker is None:
            return
        check_gradient(self._decider, self._shard, worker, message)
        now = self._now()
        measured = peer.measured(message.compute_s, now, message.sq_norm)
        if is_of_another_optimizer(self._decider, self._shard, worker, message):
            self._report(peer, WorkAbandoned(now, worker, message.turn), measured, message)
        else:
            finite = message.cancelled or message.sq_norm is not None
            turn, version, samples = message.turn, message.version, message.samples
            event = GradientArrived(now, worker, turn, version, samples, finite)
            self._report(peer, event, measured, message)

    def _on_abandoned(self, peer: Peer, message: messages.AbandonReport) -> None:
        worker = self._reporter(peer, message)
        if worker is not None:
            now = self._now()
            measured = peer.measured(message.compute_s, now)
            self._report(peer, WorkAbandoned(now, worker, message.turn), measured, message)

    def _reporter(
        self, peer: Peer, message: messages.GradientReport | messages.AbandonReport
    ) -> int | None:
        """Who reports; None: one that was parked. Its work is void, and it begins anew."""
        worker = _member(peer)
        for option in message.options:
            group_of(self._shard.common.optimizers, option)  # raises if there is none
        if not peer.is_parked:
            if peer.asked_at is None or message.turn != self._decider.ledger.turns[worker]:
                raise ProtocolError(f"nobody waits for turn {message.turn}")
            return worker
        self._shard.leave(worker)
        self._take_options(message)
        self._come_back(worker, peer)
        return None

    def _take_options(self, message: messages.GradientReport | messages.AbandonReport) -> None:
        """What a script has set by hand holds for all, whatever becomes of its gradient."""
        version = min(message.version, self._decider.ledger.version)
        for option in message.options:
            if self._roster.options.enter(option, version):
                set_option(self._shard.common.optimizers, option)

    def _come_back(self, worker: int, peer: Peer) -> None:
        peer.is_parked = False
        self._progress.say(f"worker {worker} is back")
        self._join(peer, worker)

    def _report(
        self,
        peer: Peer,
        event: GradientArrived | WorkAbandoned,
        measured: Measured,
        message: messages.GradientReport | messages.AbandonReport,
    ) -> None:
        peer.asked_at = None
        self._shard.leave(event.worker)
        try:
            self._tell(event, measured, message)
        except ProtocolError:
            peer.asked_at = measured.asked_at  # its work is lost with it; the trace says since when
            raise

    def _on_state_wanted(self, peer: Peer, message: messages.StateRequest) -> None:
        _member(peer)
        self._roster.give_state(peer, message)

    def _on_state_given(self, peer: Peer, message: messages.StateUpload) -> None:
        _member(peer)
        # A newcomer does what the others did in the beginning; the run has gone on from there.
        is_late = self._decider.ledger.version > 0 and not message.has_begun
        state = self._roster.take_state(peer, message)
        if not is_late:
            self._executor.load_state(message.optimizer, state)
        self._roster.send(peer, messages.StateReply(0))

    # --------------------------------------------------------------------- deciding, performing

    def _tell(
        self,
        event: Event,
        measured: Measured | None = None,
        message: messages.GradientReport | messages.AbandonReport | None = None,
    ) -> None:
        version = self._decider.ledger.version
        actions = self._decider.handle(event)  # raises, if it is illegal, before anything is done
        if message is not None:
            self._take_options(message)
        gradient = message if isinstance(message, messages.GradientReport) else None
        made = self._executor.perform(actions, event.time, version, gradient)
        self._recorder.write(record_event(event, actions, version, measured, made))
        self._has_chores = True
        if self._checkpointer.is_gathering:
            self._recorder.flush()  # a trace is never behind a checkpoint
        if self._goal.is_reached and not self._stops:
            self._tell(StopRequested(self._now()))
        if self._end is None:  # and when everything else is done:
            for action in actions:
                if not isinstance(action, SendParams):
                    continue
                if not self._decider.ledger.members[action.worker].cancelled:  # by that stop
                    self._executor.send_params(action, event.time, self._began + event.time)

    # ------------------------------------------------------------------------- looking after it

    def _fire_timers(self) -> None:
        ledger = self._decider.ledger
        for timer in self._timers.due(self._now()):
            if timer == ledger.timer and ledger.timer_runs and self._end is None:
                self._tell(TimerFired(self._now(), timer))

    def _do_chores(self) -> None:
        """Nobody has anything to say: do what nobody waits for."""
        self._has_chores = False
        self._recorder.flush()
        if self._shard.layout.size >= WORTH_ADDING_EARLY_BYTES:
            ledger = self._decider.ledger
            limit: float = inf
            if self._decider.policy.needed(ledger) >= len(ledger.members):
                # It takes everybody, in the order of their numbers: so a run repeats bit for bit.
                limit = min((w for w, m in ledger.members.items() if m.work), default=inf)
            self._shard.add_early(self._shard.version + 1, limit)

    def _tick(self) -> None:
        """Look after what nobody tells: who was stopped, what the run waits for, the trace."""
        self._recorder.flush()
        self._executor.save_overdue(self._now())
        self._checkpointer.tick(self._now())
        self._progress.tick(len(self._roster.active), self._decider.ledger.begun)
        self._lose_patience()
        for worker, peer in list(self._roster.members.items()):
            stopped = peer.pid is not None and is_stopped(peer.pid)
            if stopped and not peer.is_parked:
                peer.is_parked, peer.is_mute = True, peer.asked_at is None
                self._leave(worker, peer, "stopped")
            elif peer.is_parked and peer.is_mute and not stopped:
                self._come_back(worker, peer)

    def _lose_patience(self) -> None:
        """End a run that has waited in vain for as many workers as it must have."""
        ledger, spec = self._decider.ledger, self._settings.spec
        # Before it has begun, workers that are still starting may take their time.
        is_stuck = ledger.begun or len(self._roster.ever) >= spec.workers
        if self._stops or not (ledger.paused and is_stuck):
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = self._now()
        elif self._now() - self._waits_since >= self._settings.patience_s:
            here, patience_s = len(self._roster.active), self._settings.patience_s
            self._goal.fail(
                f"only {here} of at least {spec.min_workers} workers were here for {patience_s:g} s"
            )
            self._tell(StopRequested(self._now()))


def _member(peer: Peer) -> int:
    """Who this is; raises ProtocolError if it has not joined."""
    if peer.worker is None:
        raise ProtocolError("it must join before anything else")
    return peer.worker
