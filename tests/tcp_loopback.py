# SPDX-License-Identifier: BSD-3-Clause
"""Real TCP connections on loopback, with a real listener, in one thread."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ssl import SSLContext
from time import monotonic

import torch
import torch._dynamo  # an optimizer loads it, and it sets an environment variable
from torch import nn

from paceline.run.net import messages
from paceline.run.net.address import listen, of_socket
from paceline.run.net.data_socket import DataSocket
from paceline.run.net.handshake import connect, connect_data, new_token
from paceline.run.net.shared_memory import SharedMemoryStore
from paceline.run.net.tcp import TcpPeer
from paceline.run.net.tcp_client import ControlSocket
from paceline.run.net.tcp_worker import TcpWorker
from paceline.run.net.transport import Announcement
from paceline.run.server.listener import Listener
from paceline.run.system import SYSTEM, System
from paceline.run.tensors.layout import TrainingState, Views, gather
from paceline.run.tensors.state_spec import StateSpec

__all__ = ["REPORT", "TIMEOUT_S", "WELCOME", "Tcp", "assign", "pump", "state_of_size", "turn"]

TIMEOUT_S = 10.0  # a test that would wait longer fails instead of hanging
WELCOME = messages.Welcome(2, "", 0, False, False)
REPORT = messages.GradientReport(1, 0, 0, 1, 0.5, 1.0)


class Tcp:
    """A listener on loopback; the gradient is sent when the server admits it."""

    def __init__(
        self,
        spec: StateSpec,
        server_tls: SSLContext | None = None,
        client_tls: SSLContext | None = None,
    ) -> None:
        self._spec = spec
        self._tls = client_tls
        self.token = new_token()
        self.refusals: list[str] = []
        listening = listen("tcp:127.0.0.1:0")
        self.address = of_socket(listening, "tcp:127.0.0.1:0")
        self.store = SharedMemoryStore(spec)
        self.connections = Listener(
            [listening],
            self.token,
            lambda channel: TcpPeer(channel, self.store),
            self.refusals.append,
            tls=server_tls,
        )
        self._workers: list[TcpWorker] = []

    def connect(self, system: System = SYSTEM) -> tuple[TcpPeer, TcpWorker]:
        """Return both ends of a new connection."""
        before = set(self.connections._connections)
        with ThreadPoolExecutor(1) as pool:
            connecting = pool.submit(self._connect_worker, system)
            while not connecting.done():
                self.connections.wait(0.01)
            self._workers.append(connecting.result())
        [peer] = set(self.connections._connections) - before
        assert isinstance(peer, TcpPeer)
        return peer, self._workers[-1]

    def _connect_worker(self, system: System) -> TcpWorker:
        channel = connect(self.address, self.token, TIMEOUT_S, self._tls)
        data = connect_data(self.address, self.token, channel.session, TIMEOUT_S, self._tls)
        return TcpWorker(ControlSocket(channel), DataSocket(data), self._spec, system=system)

    def join(self) -> tuple[TcpPeer, TcpWorker, Views]:
        """Connect and welcome a worker; return both ends and the worker's slot."""
        peer, worker = self.connect()
        peer.open_slot(WELCOME)
        while not worker.wait_readable(0.0):
            self.connections.wait(0.0)
        assert worker.receive() == WELCOME
        return peer, worker, worker.open_slot().slot

    def close(self) -> None:
        """Close everything."""
        for worker in self._workers:
            worker.close()
        self.connections.shut_down()
        self.store.close()


def pump(tcp: Tcp, *workers: TcpWorker) -> Iterator[list[TcpPeer]]:
    """Let everyone send and receive, again and again; yield the peers that have news.

    Fails the test if it takes too long.
    """
    give_up_at = monotonic() + TIMEOUT_S
    while monotonic() < give_up_at:
        for worker in workers:
            worker.wait_readable(0.0)
        yield tcp.connections.wait(0.0)
    raise AssertionError("nothing has happened for too long")


def turn(
    tcp: Tcp, peer: TcpPeer, worker: TcpWorker, number: int, others: Iterable[TcpWorker] = ()
) -> messages.GradientReport:
    """Let the worker deliver the gradient of a turn; return its report."""
    worker.announce(messages.GradientReport(number, 0, 0, 1, 0.5, 1.0))
    for ready in pump(tcp, worker, *others):
        if peer in ready:
            for message in peer.receive_nowait():
                if isinstance(message, Announcement):
                    message.admit()
                else:
                    assert isinstance(message, messages.GradientReport)
                    return message
    raise AssertionError


def assign(turn: int, buffer: int = 0) -> messages.Assignment:
    """Return an assignment."""
    return messages.Assignment(turn, turn, buffer, (turn,), 0.0)


def state_of_size(size_bytes: int) -> TrainingState:
    """Return a state with one parameter of this size."""
    model = nn.Linear(size_bytes // 4, 1, bias=False)
    return gather([model], [torch.optim.SGD(model.parameters(), lr=0.1)])
