# SPDX-License-Identifier: BSD-3-Clause
"""Scripts that end a run: `run.stop()` in any worker, or the end of worker 0's script.

Either ends the run at its newest version, for all workers. Gradients that aren't part of an update
yet are dropped, so under `sync` the last version is the one that the script has just evaluated.

`run.stop()` always finishes a run. The end of worker 0's script finishes one without a goal; a run
that hasn't reached its goal is only stopped, so that it can be resumed.
"""

from collections.abc import Callable
from typing import Any

from paceline.core.events import Event, StopRequested, WorkerMissing
from paceline.run.net import messages
from paceline.run.net.transport import PeerEnd
from paceline.run.server.executor import Executor, RunParts
from paceline.run.server.roster import Peer
from paceline.trace.schema import WITH_NOTICE

__all__ = ["SCRIPT_ENDED", "EndRequests"]

SCRIPT_ENDED = "its script ended"
"""Why a worker left whose script ended with exit code 0."""


class EndRequests:
    """Handles the messages about scripts that have ended, or want the run to end."""

    def __init__(
        self,
        parts: RunParts,
        executor: Executor,
        reached: int,
        handle: Callable[[Event], None],
        lose: Callable[[PeerEnd, str], None],
    ) -> None:
        """`reached`: the highest version of earlier servers. `lose`: closes a connection."""
        self._parts = parts
        self._executor = executor
        self._reached = reached
        self._handle = handle
        self._lose = lose
        self.handlers: dict[type, Callable[[PeerEnd, Any], None]] = {
            messages.StopRun: self._on_stop_run,
            messages.ScriptEnded: self._on_script_ended,
            messages.LeaveRun: self._on_leave,
            messages.WorkerUnavailable: self._on_worker_unavailable,
        }

    def _on_stop_run(self, end: PeerEnd, message: messages.StopRun) -> None:
        del message
        peer = self._parts.roster.member(end)
        if not self._is_ending:
            self._parts.progress.say(f"worker {peer.worker} called run.stop()")
            self._stop(is_complete=True)
        self._parts.roster.send(peer, messages.StateReply(0))

    def _on_script_ended(self, end: PeerEnd, message: messages.ScriptEnded) -> None:
        del message
        worker = self._parts.roster.member(end).worker
        self._parts.roster.give_up(worker)
        if worker == 0:
            self._end_with_script()  # it waits for the end, in case a checkpoint needs its position
        else:
            self._lose(end, SCRIPT_ENDED)

    def _on_leave(self, end: PeerEnd, message: messages.LeaveRun) -> None:
        """Let a worker leave whose host is about to go; another one may take its number."""
        peer = self._parts.roster.get(message.worker)
        if peer is not None and peer.end is not end and _is_about(message, peer):
            self._lose(peer.end, WITH_NOTICE)
        end.send(messages.StateReply(0))

    def _on_worker_unavailable(self, end: PeerEnd, message: messages.WorkerUnavailable) -> None:
        """The launcher won't start a worker; of one that has joined we know ourselves."""
        del end
        roster, worker, reason = self._parts.roster, message.worker, message.reason
        is_known = roster.is_known(worker)
        roster.give_up(worker)
        if worker == 0 and message.has_completed:
            self._end_with_script()
        elif not is_known:
            self._parts.progress.say(f"not waiting for worker {worker}: {reason}")
            self._handle(WorkerMissing(self._parts.clock.now(), worker, reason))

    @property
    def _is_ending(self) -> bool:
        ledger = self._parts.decider.ledger
        return ledger.finished or ledger.stopping

    def _end_with_script(self) -> None:
        """End the run, because the script of worker 0 has ended."""
        if self._is_ending:
            return
        spec, ledger = self._parts.settings.spec, self._parts.decider.ledger
        has_goal = spec.steps is not None or spec.samples is not None
        # If this server replaces one that died, the script may have seen updates that are lost.
        self._stop(is_complete=not has_goal and ledger.version >= self._reached)

    def _stop(self, is_complete: bool) -> None:
        self._executor.is_complete = is_complete
        self._handle(StopRequested(self._parts.clock.now(), at_once=True))


def _is_about(message: messages.LeaveRun, peer: Peer) -> bool:
    """Return whether it is this very worker that leaves, and not one that has its number now."""
    return (bool(message.session) and message.session == peer.session) or (
        bool(message.seat) and message.seat == peer.seat
    )
