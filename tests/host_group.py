# SPDX-License-Identifier: BSD-3-Clause
"""Agents of hosts in a group of servers, with workers that they serve, over real sockets.

The servers are stepped by hand, see `server_group`. Each agent runs in a thread of its own, as it
waits for the head's answer when it joins. What an agent sends to a server can be held back.
"""

import secrets
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from paceline.core.events import Fate
from paceline.errors import ProtocolError
from paceline.release import RELEASE
from paceline.run.launch.environment import Identity
from paceline.run.net import messages
from paceline.run.net.address import listen
from paceline.run.net.channel import Channel
from paceline.run.net.data_socket import DataSocket
from paceline.run.net.handshake import connect
from paceline.run.net.host_peer import HostPeer
from paceline.run.net.shared_memory import SharedMemoryWorker
from paceline.run.server.agent_process import ServerLinks
from paceline.run.server.host_agent import HostAgent, LocalWorker
from paceline.run.server.listener import Listener
from paceline.trace.schema import Gradient
from server_group import TIMEOUT_S, Group, HeldStream, Member
from server_harness import TOKEN

__all__ = [
    "Agent",
    "Hosted",
    "agent_peers",
    "gradients_of",
    "join_hosted",
    "last_fates",
    "take_turns",
]


class HeldLinks(ServerLinks):
    """The agent's connections, whose sending sides can be held back."""

    def __init__(self, identity: Identity) -> None:
        super().__init__(identity)
        self.streams: list[HeldStream] = []  # by server

    def open_data(self, server: str) -> HeldStream:
        """Open a data connection of the session to a server."""
        stream = super().open_data(server)
        assert isinstance(stream, DataSocket)
        self.streams.append(HeldStream(stream))
        return self.streams[-1]


class Agent:
    """The agent of a host, in a thread."""

    def __init__(self, group: Group) -> None:
        token_file = group.folder / "token"
        token_file.write_text(TOKEN)
        self.address = f"unix:@paceline-agent-{secrets.token_hex(8)}"
        self.links = HeldLinks(Identity(group.address, token_file, group.folder, None))
        listening = listen(self.address)
        self._listener = Listener([listening], TOKEN, LocalWorker, group.refusals.append)
        self._listener.wake_up_for(self.links)
        self.agent = HostAgent(self._listener, self.links)
        self._thread = Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._listener.stop_wanted:
            self.agent.step(TIMEOUT_S)

    def hold(self, *servers: int) -> None:
        """Hold back what goes to these servers, and nothing else."""
        for number, stream in enumerate(self.links.streams):
            stream.is_held = number in servers

    def close(self) -> None:
        """End the agent, as a signal does."""
        if self._listener.stop_wanted:
            return
        self._listener.stop_wanted = True
        self._listener._waker.send(b"x")
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        self.agent.close()
        self.links.close()


class Hosted(Member):
    """A worker that an agent serves."""

    end: Any

    def __init__(self, group: Group, number: int, agent: Agent) -> None:
        super().__init__(group, number)
        self._agent = agent

    def join(self) -> None:
        """Connect to the agent and join the run; called on another thread."""
        channel: Channel[Any] = connect(self._agent.address, TOKEN, TIMEOUT_S)
        self.end = SharedMemoryWorker(channel, self._group.spec)
        self.end.send(messages.Join(self.number, RELEASE, self._group.spec))
        answer = self.end.receive()
        if isinstance(answer, messages.Refused):
            self.end.close()
            raise ProtocolError(answer.reason)
        assert isinstance(answer, messages.Welcome), answer

    def fill(self, *values: float | Tensor) -> None:
        """Write the gradient of the turn into the slot."""
        parameters = self.end.open_slot().slot.parameters[0]
        for i, one in enumerate(parameters):
            one.copy_(torch.as_tensor(values[i % len(values)]))

    def announce(self, *values: float | Tensor, samples: int = 1) -> None:
        """Announce the gradient of the turn."""
        self.fill(*values)
        turn = self.turn
        self.end.announce(messages.GradientReport(turn.turn, turn.version, 0, samples, 0.0, 1.0))


def join_hosted(group: Group, agent: Agent, *workers: int) -> list[Hosted]:
    """Let workers join through an agent, one after the other."""
    found = []
    for number in workers:
        member = Hosted(group, number, agent)
        group.meanwhile(member.join)
        group.members[number] = member
        found.append(member)
    return found


def agent_peers(group: Group) -> list[HostPeer]:
    """Return the head's ends to agents."""
    return [one for one in group.listener._connections if isinstance(one, HostPeer)]


def gradients_of(group: Group) -> list[float]:
    """Return what was subtracted from the parameters, which were 0, one number for each server."""
    return [-sum(own) / len(own) for own in group.weights()]


def take_turns(*members: Member) -> list[messages.Assignment]:
    """Wait until all of these workers have their next turn."""
    return [member.assignment() for member in members]


def last_fates(group: Group) -> dict[int, Fate]:
    """Return the fate of each worker's last gradient, by the trace."""
    records = group.trace().records
    return {record.worker: record.fate for record in records if isinstance(record, Gradient)}
