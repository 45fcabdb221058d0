# SPDX-License-Identifier: BSD-3-Clause
"""A worker's side of a run: compute, report, wait, load.

Each `optimizer.step()` of the script is one `push`. The gradient is already in the worker's slot,
so the report is one short message. The answer has the fate of the gradient and the version to
compute at next. While the worker computes, the server may cancel the turn or end the run: the
worker polls for that during `backward`, during an injected delay, and before it reports.

If the server dies, everything that it hadn't saved is lost. The worker waits for the next server,
returns to the position in its data that this server knows, and continues from there.

The module `states` has the table of a worker's states.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from paceline.core.events import Fate
from paceline.errors import PeerLost, ProtocolError
from paceline.run.net import messages
from paceline.run.worker.batches import Batches
from paceline.run.worker.connection import ServerConnection
from paceline.run.worker.extra_steps import ExtraSteps
from paceline.run.worker.last_gradient import Last
from paceline.run.worker.leases import HeldLeases
from paceline.run.worker.logged_scalars import LoggedScalars
from paceline.run.worker.optimizer_sync import OptimizerSettings, SettingChanges
from paceline.run.worker.position import PositionTracker
from paceline.run.worker.replica import Replica
from paceline.run.worker.requests import Requests
from paceline.run.worker.states import Backward, Connection, Turn, WorkerEvent, WorkerState
from paceline.run.worker.turn_clock import TurnClock
from paceline.run.worker.turn_reports import TurnReports

__all__ = ["Worker"]

POLL_S = 1e-3  # a backward pass polls for a cancellation at most this often

Report = messages.GradientReport | messages.AbandonReport
Answer = messages.Assignment | messages.RunEnded


class _BackwardCut(Exception):
    """Ends a backward pass whose gradient is no longer wanted."""


class Worker:
    """The link between a script and its run."""

    def __init__(
        self,
        number: int,
        replica: Replica,
        schedulers: Sequence[LRScheduler],
        server: ServerConnection,
    ) -> None:
        """Join the run; raises ProtocolError if the server refuses this worker."""
        self.number = number
        self.version = 0
        self.last: Last | None = None
        self.batches = Batches(len(replica.optimizers), replica.models)
        self.position = PositionTracker()
        self._settings = OptimizerSettings(replica.optimizers, schedulers, number, self.batches)
        self._replica = replica
        self._server = server
        self._monotonic = server.system.monotonic
        self._state = WorkerState()
        self.requests = Requests(server, self._state, self)
        forget = self.batches.forget_numbers
        self.leases = HeldLeases(len(server.ahead), self.requests, forget)
        self._join()
        self._assignment: messages.Assignment | None = None  # of the current turn; None iff idle
        self._early: messages.Assignment | None = None  # arrived before the last turn was closed
        self._polled_at = 0.0
        self._clock = TurnClock(self.welcome.latency, self.number, self.welcome.seed, server.system)
        self._scalars = LoggedScalars()
        self._extra_steps = ExtraSteps()
        self._reports = TurnReports(replica, self.batches, self._scalars, self.leases, self._clock)

    def _join(self) -> None:
        """Join a server and move to the position it knows; raises PeerLost if none appears."""
        self._checkpoint = 0  # needs our position once the current wait is over; 0: none does
        self.welcome, opened = self._server.join()
        self._replica.set_slot(opened.slot)
        self._replica.load_constants(opened.constants)
        self.leases.forget()
        self.position.move_to(self.welcome.position)
        self._settings.join()

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self._state.is_over

    def begin(self) -> None:
        """Wait for the run to begin, and load its parameters."""
        self._replica.on_gradients(self._on_gradient, self.batches.discard)
        self.batches.on_training_batch = self._on_training_batch
        self.position.record()
        self._wait_and_load()
        self._record_position()

    # --------------------------------------------------------------------------------- one gradient

    def push(self, optimizer: int) -> None:
        """Report the gradient of this optimizer, wait as the policy says, load the next version."""
        self._settings.count_push(optimizer)
        turn = self._assignment
        if turn is None:
            self._extra_steps.count(optimizer, self.version)
            self.batches.step_after_end(optimizer)
            self.last = self.last or Last(Fate.LATE, self.version, 0, 0, 0.0)
            return
        self.batches.hand_in(optimizer)
        self._report(turn, optimizer)
        self._assignment = None
        self._state.apply(WorkerEvent.CLOSED)
        waits_from = self._monotonic()
        notice = self._wait_and_load()
        if notice is None:  # the turn was void, or the run ended before its fate was decided
            staleness = max(0, self.version - turn.version)
            notice = messages.FateNotice(Fate.LATE, turn.version, staleness, 0)
        self._settle(optimizer, notice, waited_s=self._monotonic() - waits_from)

    def _report(self, turn: messages.Assignment, optimizer: int) -> None:
        """Report the gradient, or that there is none, unless the server was lost."""
        if self._state.is_void:
            self._scalars.forget()
            return
        changes = self._settings.changes(optimizer)
        try:
            report: Report | None = None
            if self._state.turn is not Turn.CUT and not self._poll_worthless():
                report = self._reports.of_gradient(turn, optimizer, changes)
            is_wanted = report is not None and self._wait_until_due()
            if self._state.is_void:
                return
            if report is None or not is_wanted:
                is_cut = self._state.turn is Turn.CUT
                report = self._reports.of_worthless(turn, optimizer, changes, is_cut=is_cut)
            self._send_report(report)
        except PeerLost:
            self._state.apply(WorkerEvent.SERVER_LOST)

    def _wait_until_due(self) -> bool:
        """Wait out an injected delay; return whether the gradient is still wanted after it."""
        while self._server.end.wait_readable(self._clock.remaining_s):
            self._receive_notice()
            if self._state.is_worthless:
                return False
        return True

    def _send_report(self, report: Report) -> None:
        """Send the report; a server that left because the run has ended doesn't need it."""
        try:
            if isinstance(report, messages.GradientReport) and not report.cancelled:
                self._server.end.announce(report)
            else:
                self._server.end.send(report)
        except PeerLost:
            while self._server.end.wait_readable(0.0) and not self.is_over:
                self._receive_notice()
            if not self.is_over:
                raise

    def _settle(self, optimizer: int, notice: messages.FateNotice, waited_s: float) -> None:
        """Record the fate of the gradient."""
        fate = notice.fate
        self.last = Last(fate, notice.version, notice.staleness, notice.contributors, waited_s)
        self.batches.settle(optimizer, fate)
        self._scalars.settle(fate)
        self._settings.settle(optimizer, notice.contributors)
        # If the end of the run interrupts a turn, the position stays where the turn began.
        self._record_position(is_new=not self.is_over or fate is Fate.ACCEPTED)

    def discard(self, optimizer: int) -> None:
        """Forget which batches the gradient of this optimizer was computed on."""
        self.batches.discard(optimizer)
        self._replica.start_over(optimizer)

    def backward(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        """Run `loss.backward()`, and stop early once the gradient is no longer wanted."""
        if self._state.backward is Backward.INSIDE:  # called by a hook: the outer pass may be cut
            loss.backward(*arguments, **options)
            return
        if self._assignment is None or self._poll_worthless():
            self._state.apply(WorkerEvent.BACKWARD_CUT)
            self.batches.touch_all()
            self._replica.fill_gaps()
            return
        self._state.apply(WorkerEvent.BACKWARD_STARTED)
        try:
            loss.backward(*arguments, **options)
        except _BackwardCut:
            self._state.apply(WorkerEvent.BACKWARD_CUT)
            self._replica.fill_gaps()
        finally:
            self._state.apply(WorkerEvent.BACKWARD_FINISHED)

    def _on_gradient(self, optimizer: int) -> None:
        """Note that a backward pass has computed the gradient of a parameter."""
        self._scalars.begin()
        self.batches.touch(optimizer)
        if self._state.backward is Backward.INSIDE and self._poll_worthless():
            raise _BackwardCut

    def _on_training_batch(self) -> None:
        self._scalars.begin()
        self._settings.catch_up()

    def log(self, scalars: dict[str, float | Tensor]) -> None:
        """Send these numbers with the next gradient; numbers of one name are averaged."""
        for name, value in scalars.items():
            self._scalars.log(name, float(value.item() if isinstance(value, Tensor) else value))

    # --------------------------------------------------------------------------- ending the run

    def stop(self) -> None:
        """End the run for all workers, and load its last version."""
        if not self.is_over:
            with suppress(PeerLost):  # the run has ended, and the server is already gone
                self.requests.stop()

    def leave(self) -> None:
        """Tell the server that the script has ended; if it is worker 0's, the run ends."""
        with suppress(PeerLost):  # then the launcher tells the next server
            if not self.is_over:
                self._server.end.send(messages.ScriptEnded())
            while self.number == 0 and not self.is_over:
                self._receive_notice()

    # ------------------------------------------------------------------------------------ receiving

    def _poll_worthless(self) -> bool:
        """Return whether the gradient is no longer wanted; polls the server now and then."""
        now = self._monotonic()
        if now - self._polled_at > POLL_S and self._state.connection is not Connection.LOST:
            self._polled_at = now
            try:
                while self._server.end.wait_readable(0.0):
                    self._receive_notice()
            except PeerLost:
                self._state.apply(WorkerEvent.SERVER_LOST)
        return self._state.is_worthless

    def _receive_notice(self) -> None:
        """Handle a message that arrives during a turn."""
        message = self._server.end.receive()
        if isinstance(message, messages.Assignment) and self._state.is_void:
            self.keep_for_later(message)  # from the server that has replaced the lost one
        elif not self.handle_notice(message):
            raise ProtocolError(f"expected no answer before a report, got {message!r}")

    def handle_notice(self, message: messages.FromServer) -> bool:
        """Handle a message that the server may send at any time; return whether it is one."""
        if isinstance(message, messages.CancelTurn):
            # A cancellation for an earlier turn crossed our report: ignore it.
            if self._assignment is not None and message.turn == self._assignment.turn:
                self._state.apply(WorkerEvent.TURN_CANCELLED)
        elif isinstance(message, messages.PositionRequest):
            self._send_position(message.checkpoint)
        elif isinstance(message, messages.RunEnded):
            self._load(message)
            if self._checkpoint and self._state.has_turn:  # the turn won't count
                self._send_position(self._checkpoint)
                self._checkpoint = 0
        elif isinstance(message, messages.Refused):
            raise self._server.refusal(message)
        else:
            return False
        return True

    def _wait_and_load(self) -> messages.FateNotice | None:
        """Wait for this server or the next one to assign a turn or end the run; load the version.

        Returns the fate of the last gradient; None if it is unknown.
        """
        notices: list[messages.FateNotice | None] = []
        while (connection := self._state.connection) is not Connection.ENDED:
            if connection is Connection.LOST:
                self.rejoin()
            try:
                answer = self._wait_for_answer()
                notices.append(answer.notice)  # the first is about the last gradient
                self._load(answer)
            except PeerLost:
                self._state.apply(WorkerEvent.SERVER_LOST)
            if self._assignment is not None:
                break
        return notices[0] if notices else None

    def _wait_for_answer(self) -> Answer:
        message = self._early or self._server.end.receive()
        while not isinstance(message, Answer):
            if not self.handle_notice(message):
                raise ProtocolError(f"expected an assignment, got {message!r}")
            message = self._server.end.receive()
        self._early = None
        return message

    def rejoin(self) -> None:
        """Join the server that replaces the lost one."""
        self._join()
        self._scalars.forget()
        self._state.apply(WorkerEvent.REJOINED)
        self._early = None  # it was from the lost server

    def keep_for_later(self, message: messages.Assignment) -> None:
        """Keep an assignment that arrives before the last turn is closed."""
        self._early = message

    # -------------------------------------------------------------------------------------- loading

    def _load(self, answer: Answer) -> None:
        """Load the version, the schedulers and the options that the answer names."""
        optimizer = answer.optimizer if isinstance(answer, messages.Assignment) else None
        views = self._server.end.fetch(answer)
        if views is not None:
            self._replica.load(views, optimizer)
            self.version = answer.version
        self.leases.receive(answer)
        self._checkpoint = answer.position_wanted or self._checkpoint
        options = answer.options if isinstance(answer, messages.Assignment) else ()
        self._settings.follow(answer.version, answer.scheduler_steps, answer.epochs, options)
        if isinstance(answer, messages.Assignment):
            self._assignment = answer
            self._state.apply(WorkerEvent.ASSIGNED)
            self._clock.begin(answer.asked_at if self._server.end.shares_clock else None)
            if views is None:
                self._skip(answer)
        else:
            self._replica.detach()
            self._state.apply(WorkerEvent.RUN_ENDED)

    def _skip(self, turn: messages.Assignment) -> None:
        """End a turn that was cancelled before its version had arrived."""
        self._state.apply(WorkerEvent.TURN_CANCELLED)
        self._state.apply(WorkerEvent.BACKWARD_CUT)
        self._state.apply(WorkerEvent.CLOSED)
        self._assignment = None
        report = self._reports.of_worthless(turn, 0, SettingChanges(), is_cut=True)
        self._server.end.send(report)

    def _record_position(self, is_new: bool = True) -> None:
        """Record the position where the turn begins, and send it if a checkpoint needs it."""
        if self.welcome.saves and is_new:
            self.position.record(thorough=bool(self._checkpoint))
        if self._checkpoint:
            self._send_position(self._checkpoint)
            self._checkpoint = 0

    def _send_position(self, checkpoint: int) -> None:
        with suppress(PeerLost):  # the next message will notice
            self._server.end.send(messages.PositionReport(checkpoint, self.position.encode()))

    # ------------------------------------------------------------------------------------- requests

    def optimizer_state(self, optimizer: int) -> dict[str, Any]:
        """Return the state of the server's optimizer, with the options as the script has them."""
        state = self.requests.optimizer_state(optimizer)
        self._settings.put_own_options(optimizer, state)
        return state

    def load_optimizer_state(self, optimizer: int, state: dict[str, Any]) -> None:
        """Load a state into the server's optimizer."""
        self.requests.load_optimizer_state(optimizer, state, has_begun=self.last is not None)
        self._settings.adopt(optimizer, state)
