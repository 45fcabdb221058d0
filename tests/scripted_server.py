# SPDX-License-Identifier: BSD-3-Clause
"""A real worker against a scripted server, in one thread on the in-process transport.

The server answers each report with the next scripted answer as soon as it receives the report.
Tests call methods to make it send anything at other times.
"""

import torch
import torch._dynamo  # optimizers import it, and it sets an environment variable
from torch import nn

from paceline.core.events import Fate
from paceline.leases import Use
from paceline.run.net import messages
from paceline.run.net.in_process import InProcessNetwork, InProcessStore
from paceline.run.tensors.layout import gather
from paceline.run.worker.connection import ServerConnection
from paceline.run.worker.replica import Replica
from paceline.run.worker.worker import Worker

__all__ = ["ACCEPTED", "REPORTS", "ScriptedServer"]

ACCEPTED = messages.FateNotice(Fate.ACCEPTED, version=0, staleness=0, contributors=1)
REQUESTS = (
    messages.StateRequest
    | messages.StateUpload
    | messages.StopRun
    | messages.ScriptEnded
    | messages.LeaseRequest
)
REPORTS = messages.GradientReport | messages.AbandonReport


class ScriptedServer:
    """The server and the worker that it talks to."""

    def __init__(self, streams=1):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        state = gather([self.model], [self.optimizer])
        self._store = InProcessStore(state.spec)
        self._buffer = self._store.new_buffer()
        for view, parameter in zip(
            self._buffer.views.parameters[0], state.parameters[0], strict=True
        ):
            view.copy_(parameter.detach())
        self._network = InProcessNetwork(self._store)
        self.welcome = messages.Welcome(2, "", seed=0, requeue=True, averages=True, saves=True)
        self.on_join = []  # actions when a worker has joined, for each server
        self.on_report = []  # actions when a report has arrived
        self.on_request = []  # actions when a request for a state or a batch has arrived
        self.received = []
        connection = ServerConnection(0, state.spec, self._dial, (1,) * streams)
        self.worker = Worker(0, Replica(state, [self.model]), [], connection)

    def _dial(self):
        end = self._network.connect()
        self._peer = self._network._peers[-1]
        send, announce = end.send, end.announce

        def send_and_answer(message):
            send(message)
            self._receive(message)

        def announce_and_answer(report):
            announce(report)
            self._receive(report)

        end.send, end.announce = send_and_answer, announce_and_answer
        return end

    def _receive(self, message):
        self.received.append(message)
        if isinstance(message, messages.Join):
            self._slot = self._peer.open_slot(self.welcome)
            _act(self.on_join)
        elif isinstance(message, REPORTS):
            _act(self.on_report)
        elif isinstance(message, REQUESTS):
            _act(self.on_request)

    # What the server does:

    def assign(self, turn, version=0, notice=None, **fields):
        message = messages.Assignment(turn, version, 0, (), 0.0, notice=notice, **fields)
        self._peer.publish(message, self._buffer)

    def cancel(self, turn):
        self._peer.send(messages.CancelTurn(turn))

    def refuse(self, reason):
        self._peer.send(messages.Refused(reason))

    def request_position(self, checkpoint):
        self._peer.send(messages.PositionRequest(checkpoint))

    def end(self, version=0, notice=None, **fields):
        self._peer.publish(messages.RunEnded(version, 0, (), notice, **fields), self._buffer)

    def die(self):
        self._network.close(self._peer)

    def send_state(self, state):
        self._peer.send_state(state, "state")

    def send_reply(self):
        self._peer.send(messages.StateReply(0))

    def send_lease(self, number, epochs=(0,)):
        self._peer.send(messages.LeaseReply(Use(0, (number,)), epochs))

    # What the script does:

    def begin(self, turn=1, version=0, **fields):
        """Begin the run with this turn, and forget the messages that led to it."""
        self.assign(turn, version, **fields)
        self.worker.begin()
        self.received.clear()

    def loss(self, hook=None):
        """Compute a loss; `hook` runs between the gradients of the two layers."""
        hidden = self.model[0](torch.ones(4, 2))
        if hook is not None:
            hidden.register_hook(lambda grad: hook())
        return self.model[1](hidden).square().mean()

    def step(self):
        self.optimizer.zero_grad()
        self.loss().backward()
        self.worker.push(0)

    def reports(self):
        return [message for message in self.received if isinstance(message, REPORTS)]


def _act(actions):
    if actions:
        actions.pop(0)()
