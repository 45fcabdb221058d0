# SPDX-License-Identifier: BSD-3-Clause
"""Send and receive the states that a script asks for: of an optimizer, or the average weights."""

from collections.abc import Callable
from typing import Any

from paceline.core.decider import Decider
from paceline.errors import ProtocolError, SpecError
from paceline.run.net import messages
from paceline.run.net.transport import PeerEnd
from paceline.run.server.executor import Executor
from paceline.run.server.other_servers import PartFailed
from paceline.run.server.roster import Roster
from paceline.run.tensors.shard import Shard

__all__ = ["StateRequests"]


class StateRequests:
    """Answers a worker's requests for states."""

    def __init__(self, decider: Decider, shard: Shard, roster: Roster, executor: Executor) -> None:
        self._decider = decider
        self._shard = shard
        self._roster = roster
        self._executor = executor
        self.handlers: dict[type, Callable[[PeerEnd, Any], None]] = {
            messages.StateRequest: self.on_request,
            messages.StateUpload: self.on_upload,
        }

    def on_request(self, end: PeerEnd, message: messages.StateRequest) -> None:
        """Send a state."""
        self._roster.member(end)
        try:
            if message.what == "average":
                state: Any = self._shard.averages()
                if state is None:
                    raise ProtocolError("this run keeps no average of the weights")
            else:
                state = self._shard.optimizer_state(message.optimizer)
            end.send_state(state, message.what)
        except (SpecError, PartFailed) as error:
            raise ProtocolError(str(error)) from None

    def on_upload(self, end: PeerEnd, message: messages.StateUpload) -> None:
        """Load a state into an optimizer."""
        peer = self._roster.member(end)
        state = end.receive_state(message)
        # A worker that joins late uploads what the others did at the beginning; the run has moved
        # on from there.
        is_late = self._decider.ledger.version > 0 and not message.has_begun
        if not is_late:
            self._executor.load_optimizer_state(message.optimizer, state)
        self._roster.send(peer, messages.StateReply(0))
