# SPDX-License-Identifier: BSD-3-Clause
"""A run with several servers in one process, stepped by hand, over real sockets on loopback.

The head is a real `Server` with a real `HeadShard` and `OtherServers`; the other servers are real
`PartServer`s with real listeners; the workers are real ends of the transport. Nothing moves unless
a test steps it, so a test can hold any window open: it leaves a server alone, or holds back what a
worker sends to one of them.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
import torch._dynamo  # an optimizer loads it, and it sets an environment variable
from torch import Tensor, nn

from paceline.core.decider import Decider
from paceline.core.policies import parse_policy
from paceline.errors import PeerLost, ProtocolError
from paceline.release import RELEASE
from paceline.run.launch.environment import Identity
from paceline.run.net import messages
from paceline.run.net.address import listen, of_socket
from paceline.run.net.channel import Channel
from paceline.run.net.data_socket import DataSocket
from paceline.run.net.handshake import connect, connect_data
from paceline.run.net.host_peer import HostedPeer, HostPeer
from paceline.run.net.server_messages import ServerWelcome
from paceline.run.net.shared_memory import SharedMemoryStore
from paceline.run.net.tcp import TcpPeer
from paceline.run.net.tcp_client import ControlSocket
from paceline.run.net.tcp_worker import TcpWorker
from paceline.run.server.head_shard import HeadShard
from paceline.run.server.listener import Listener
from paceline.run.server.other_servers import OtherServers
from paceline.run.server.part_host import _PartHost
from paceline.run.server.part_listener import PartListener
from paceline.run.server.part_server import PartServer, PartSession
from paceline.run.server.recorder import Recorder
from paceline.run.server.server import Server
from paceline.run.settings import Settings
from paceline.run.tensors import sums
from paceline.run.tensors.layout import TrainingState, gather
from paceline.run.tensors.optimizer_parts import can_split
from paceline.run.tensors.partition import partition
from paceline.trace.reader import read_trace
from paceline.trace.schema import Header, Trace, Update
from server_harness import TOKEN, checkpointer_for

__all__ = ["TIMEOUT_S", "UNIT", "Group", "HeldStream", "Member", "Part", "sgd", "small_units"]

TIMEOUT_S = 20.0  # a test that would wait longer fails instead of hanging
UNIT = 32  # elements that stay together, so that small models have parts on all servers

Make = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]


def small_units(patch: pytest.MonkeyPatch) -> None:
    """Have parameters cut, added up and measured in small blocks."""
    patch.setattr(sums, "BLOCK", UNIT)


def sgd(**options: Any) -> Make:
    """Return what makes a model whose parameters are all 0, and an optimizer that subtracts."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(64, 4)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        return model, torch.optim.SGD(model.parameters(), **{"lr": 1.0, **options})

    return make


class HeldStream:
    """A data connection whose sending side can be held back, or sends only a part."""

    most: int | None = None  # the bytes that are sent in one call before all others are held back

    def __init__(self, stream: DataSocket) -> None:
        self._stream = stream
        self.is_held = False
        self.fileno, self.close = stream.fileno, stream.close
        self.receive_into, self.has_unread = stream.receive_into, stream.has_unread

    def send(self, buffers: list[memoryview]) -> int:
        """Send a part of these bytes; none if they are held back."""
        if self.is_held:
            return 0
        if self.most is None:
            return self._stream.send(buffers)
        self.is_held = True
        return self._stream.send([memoryview(b"".join(buffers)[: self.most])])


class SteppedListener(Listener):
    """A listener in whose process the other servers run, too."""

    step_others: Callable[[], None]

    def wait_among(self, peers: Sequence[TcpPeer], timeout_s: float) -> None:
        """Let the other servers work, because the head waits for them."""
        del timeout_s
        self.step_others()
        super().wait_among(peers, 0.0)


@dataclass(eq=False)
class Part:
    """A server that isn't the head."""

    number: int
    server: PartServer
    connections: PartListener
    session: PartSession


class Member:
    """A worker of the group."""

    def __init__(self, group: "Group", number: int) -> None:
        self._group = group
        self.number = number
        self.streams: list[HeldStream] = []  # by server
        self.inbox: list[Any] = []  # what it has received and not used
        self.lost_by = ""  # why its connection is gone; "" if it isn't

    def join(self) -> None:
        """Connect to all servers and join the run; called on another thread.

        Raises ProtocolError if the head refuses it.
        """
        group = self._group
        channel = connect(group.address, TOKEN, TIMEOUT_S)

        def dial(address: str) -> HeldStream:
            data = connect_data(address, TOKEN, channel.session, TIMEOUT_S)
            self.streams.append(HeldStream(DataSocket(data)))
            return self.streams[-1]

        self.end = TcpWorker(ControlSocket(channel), dial(group.address), group.spec, dial)
        self.end.send(messages.Join(self.number, RELEASE, group.spec))
        answer = self.end.receive()
        if isinstance(answer, messages.Refused):
            self.end.close()
            raise ProtocolError(answer.reason)
        assert isinstance(answer, messages.Welcome), answer

    def poll(self) -> None:
        """Send and receive what is possible now."""
        try:
            while not self.lost_by and self.end.wait_readable(0.0):
                self.inbox.append(self.end.receive())
        except PeerLost as error:
            self.lost_by = str(error)

    def take(self, kind: type) -> Any:
        """Return the next message of this kind; None if there is none."""
        found = next((one for one in self.inbox if isinstance(one, kind)), None)
        if found is not None:
            self.inbox.remove(found)
        return found

    def assignment(self) -> messages.Assignment:
        """Wait for the next turn."""
        group = self._group
        group.until(lambda: any(isinstance(one, messages.Assignment) for one in self.inbox))
        found = self.take(messages.Assignment)
        assert isinstance(found, messages.Assignment)
        self.turn = found
        return found

    def parameters(self) -> Tensor:
        """Return the parameters of the turn, as one tensor."""
        views = self.end.fetch(self.turn)
        assert views is not None
        return torch.cat([one.flatten() for own in views.parameters for one in own])

    def announce(self, *values: float | Tensor) -> None:
        """Announce the gradient of the turn: each parameter has this one value, or these."""
        parameters = self.end.open_slot().slot.parameters[0]
        for i, one in enumerate(parameters):
            value = values[i % len(values)]
            if isinstance(value, Tensor):
                one.copy_(value)
            else:
                one.fill_(value)
        self.end.announce(
            messages.GradientReport(self.turn.turn, self.turn.version, 0, 1, 0.0, 1.0)
        )

    def hold(self, *servers: int) -> None:
        """Hold back what goes to these servers, and nothing else."""
        for number, stream in enumerate(self.streams):
            stream.is_held = number in servers


class Group:
    """A run with several servers."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        make: Make | None = None,
        *,
        servers: int = 3,
    ) -> None:
        self._patch = pytest.MonkeyPatch()
        small_units(self._patch)
        self.make = make or sgd()
        self.servers = servers
        self.folder = folder
        self.model, self.optimizer = self.make()
        state = gather([self.model], [self.optimizer])
        self.spec = state.spec
        is_split = (can_split(self.optimizer),)
        self.parts = partition(self.spec, servers, is_split)
        policy = parse_policy(settings.policy)
        kept = policy.versions_kept
        welcome = ServerWelcome(servers, settings.ema, kept, False, settings.wire, "exact")
        self.others = OtherServers(state, self.parts, is_split, welcome)
        self._store = SharedMemoryStore(self.parts[0].spec, self.parts[0].layout)
        self.shard = HeadShard(state, [], self._store, self.others)
        listening = listen("tcp:127.0.0.1:0")
        self.address = of_socket(listening, "tcp:127.0.0.1:0")
        self.refusals: list[str] = []
        self.listener = SteppedListener(
            [listening],
            TOKEN,
            lambda channel: TcpPeer(channel, self._store, channel.session, self.others),
            self.refusals.append,
        )
        self.listener.step_others = self.step_others
        self.listener.open_host = self._open_host
        self.others.connections = self.listener
        self.trace_path = folder / "trace.jsonl"
        self._recorder = Recorder(self.trace_path, Header.of("run", policy, settings.spec, {}))
        decider = Decider(policy, settings.spec)
        checkpointer = checkpointer_for(settings, folder)
        self.server = Server(
            settings, decider, self.shard, self.listener, self._recorder, checkpointer
        )
        self.server.expect_servers(self.others)
        self.ledger = decider.ledger
        self.running: dict[int, Part] = {}
        self.members: dict[int, Member] = {}
        self.is_closed = False

    def _open_host(self, channel: Channel[Any], agent: HostPeer | None) -> HostPeer | HostedPeer:
        if agent is not None:
            return HostedPeer(channel, self._store, channel.session, agent)
        return HostPeer(channel, self._store, channel.session, self.others)

    # -------------------------------------------------------------------------------- stepping

    def step_head(self) -> None:
        """Let the head do what can be done now."""
        server = self.server
        server._stop_if_wanted()
        server._wait_for_news(server._monotonic())
        if server._transfers:
            server._settle_transfers()
        server._note_others()
        server._lose_broken()

    def step_server(self, number: int) -> None:
        """Let another server do what can be done now."""
        self.running[number].session.step(0.0)

    def step_others(self) -> None:
        """Let all other servers do what can be done now."""
        for number in list(self.running):
            self.step_server(number)

    def until(
        self, is_met: Callable[[], object], *, without: Sequence[int] = (), idle: Sequence[int] = ()
    ) -> None:
        """Step everybody until this is met; leave the servers in `without` alone.

        Workers in `idle` neither send nor receive.
        """
        give_up_at = monotonic() + TIMEOUT_S
        while not is_met():
            assert monotonic() < give_up_at, "nothing has happened for too long"
            self.step_head()
            # Copied first: `start_server` adds one on another thread.
            for number in [n for n in list(self.running) if n not in without]:
                self.step_server(number)
            for member in [m for n, m in list(self.members.items()) if n not in idle]:
                member.poll()

    def settle(self, **options: Any) -> None:
        """Step everybody until what was sent before must have arrived."""
        steps = iter(range(30))
        self.until(lambda: next(steps, None) is None, **options)

    def meanwhile(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that waits for the servers, while they are stepped; return its result."""
        with ThreadPoolExecutor(1) as pool:
            calling = pool.submit(call, *arguments)
            self.until(calling.done)
            return calling.result()

    # -------------------------------------------------------------------------- coming and going

    def new_server(self, number: int, make: Make | None = None) -> tuple[PartServer, _PartHost]:
        """Return a server that hasn't connected, and where it runs."""
        token_file = self.folder / "token"
        token_file.write_text(TOKEN)
        identity = Identity(self.address, token_file, self.folder, None, server=number)
        model, optimizer = (make or self.make)()
        host = _PartHost(identity)
        return PartServer(number, gather([model], [optimizer]), host, print), host

    def start_server(
        self, number: int, make: Make | None = None, server: PartServer | None = None
    ) -> Part:
        """Connect another server, and let it join; raises ProtocolError if it is refused.

        `server`: one that has served another head.
        """
        new, host = self.new_server(number, make)
        server = server or new
        connections = self.meanwhile(host.connect)

        def join() -> None:  # from then on it is stepped: the head may be waiting for its answer
            self.running[number] = Part(number, server, connections, server.join(connections))

        try:
            self.meanwhile(join)
        except BaseException:
            connections.close()
            raise
        return self.running[number]

    def start_servers(self) -> "Group":
        """Let all other servers join."""
        for number in range(1, self.servers):
            self.start_server(number)
        return self

    def join(self, *workers: int) -> list[Member]:
        """Let workers join, one after the other."""
        found = []
        for number in workers:
            member = Member(self, number)
            self.meanwhile(member.join)
            self.members[number] = member
            found.append(member)
        return found

    def kill_worker(self, number: int) -> None:
        """Close the connections of a worker."""
        self.members.pop(number).end.close()

    def kill_server(self, number: int) -> None:
        """Close the connections of another server."""
        part = self.running.pop(number)
        part.connections.close()
        part.session._store.close()

    # ----------------------------------------------------------------------------- what there is

    @property
    def version(self) -> int:
        """The newest version."""
        return self.ledger.version

    def peer_of(self, worker: int) -> TcpPeer:
        """Return the head's end of the connection to a worker."""
        end = self.server._roster[worker].end
        assert isinstance(end, TcpPeer)
        return end

    def parts_left(self, worker: int) -> int:
        """Return how many parts of its gradient haven't arrived, as far as the head knows."""
        return self.peer_of(worker)._parts_left

    def weights(self) -> list[list[float]]:
        """Return the elements of the newest version that each server has."""
        shards = [self.shard, *(one.session._shard for one in self.running.values())]
        return [
            [x for own in one.newest.views.parameters for p in own for x in p.flatten().tolist()]
            for one in shards
        ]

    def whole(self) -> TrainingState:
        """Return a new copy of what is trained."""
        model, optimizer = self.make()
        return gather([model], [optimizer])

    def trace(self) -> Trace:
        """Return what was recorded so far."""
        self._recorder.flush()
        return read_trace(self.trace_path)

    def contributors(self) -> list[list[int]]:
        """Return the workers whose gradients are in each update, by the trace."""
        return [sorted(one.contributors) for one in self.trace().records if type(one) is Update]

    def close(self) -> None:
        """Close everything."""
        if self.is_closed:
            return
        self.is_closed = True
        for number in list(self.members):
            self.kill_worker(number)
        for number in list(self.running):
            self.kill_server(number)
        self.others._ends.clear()
        if not self.server._run_end.is_saved:
            self._recorder.close()
        self.listener.shut_down()
        self._store.close()
        self._patch.undo()
