# SPDX-License-Identifier: BSD-3-Clause
"""The connections of a simulated host: the in-process transport, with delays, cuts and deaths.

Messages of one direction of a connection keep their order; those of different connections overtake
each other. The OS cuts all connections of a process that is gone: what it sent before still
arrives, then the other side sees the end. A connection can also be cut at any time. Then the last
messages in either direction may get lost, as TCP loses what was not acknowledged.

The launcher holds the listening socket, so connections to a server that is gone wait for the next
one. Only before the first server listens are they refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple

from paceline.errors import PeerLost
from paceline.run.net.in_process import (
    InProcessNetwork,
    InProcessPeer,
    InProcessStore,
    InProcessWorker,
    Queue,
)
from paceline.run.net.messages import FromServer, decode_server, decode_worker
from paceline.run.net.tcp import NO_OTHERS
from paceline.run.net.tcp_worker import TcpWorker
from paceline.run.process_status import ProcessStatus
from paceline.run.system import System
from paceline.run.tensors.state_spec import StateSpec
from storm.peers import Observed, StormPeer, StormTcpPeer
from storm.streams import QueueControl, VirtualStream, WorkerQueues, connected_streams
from storm.world import Process, World

__all__ = ["Connections", "Kernel", "WatchEnd"]


CUT_LOSES = 0.5  # how often a cut loses messages that are under way
ONLY_OTHER = 0.4  # how often only those to other servers are cut, if there are any
ONLY_DATA = 0.3  # how often only the data connection is cut, if there is one


class VirtualCondition:
    """How processes wait for each other: on the clock of their world."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __enter__(self) -> None:
        self._world.touch()

    def __exit__(self, *_: object) -> None:
        pass

    def wait_for(self, is_met: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until this is met, or for this long."""
        return self._world.wait_for(is_met, timeout)

    def notify_all(self) -> None:
        """Do nothing: the scheduler looks by itself."""


class DelayedQueue(Queue[Any]):
    """One direction of a connection; each message arrives some time after it was sent."""

    def __init__(self, kernel: Kernel, decode: Callable[[bytes], Any]) -> None:
        super().__init__(VirtualCondition(kernel.world), decode)
        self._kernel = kernel
        self._arrivals: list[float] = []  # of the messages that weren't taken yet
        self._ends_at = 0.0  # when the end arrives

    def put(self, message: object, attachment: Any = None, limit: int | None = None) -> None:
        """Send a message."""
        super().put(message, attachment, limit)
        self._arrivals.append(self._arrival())

    def put_bytes(self, body: bytes) -> None:
        """Send bytes that may be no message at all."""
        if not self.is_closed:
            self._bodies.append((body, None))
            self._arrivals.append(self._arrival())

    def _arrival(self) -> float:
        world = self._kernel.world
        soonest = self._arrivals[-1] if self._arrivals else 0.0
        arrival = max(soonest, world.now + self._kernel.delay_s())
        world.at(arrival)
        return arrival

    def has_news(self) -> bool:
        """Return whether a message or the end has arrived."""
        now = self._kernel.world.now
        if self._arrivals:
            return self._arrivals[0] <= now
        return self.is_closed and self._ends_at <= now

    def has_message(self) -> bool:
        """Return whether a message has arrived."""
        return bool(self._arrivals) and self.has_news()

    def take(self) -> Any:
        """Return the next message that has arrived; None if there is none."""
        if self._arrivals and not self.has_news():
            return None
        if self._arrivals:
            self._arrivals.pop(0)
        elif self.is_closed and not self.has_news():
            return None
        return super().take()

    def close(self) -> None:
        """Close it; what was sent before still arrives."""
        if not self.is_closed:
            self._ends_at = self._arrival()
        self.is_closed = True

    def lose(self) -> int:
        """Lose some of the last messages that weren't taken yet; return how many."""
        lost = self._kernel.world.random.randint(0, len(self._bodies))
        for _ in range(lost):
            body, _ = self._bodies.pop()
            self._bytes -= len(body)
            self._arrivals.pop()
        return lost


class Connection(NamedTuple):
    """A connection of a process to the server, or to the next one."""

    process: Process
    to_server: DelayedQueue
    to_process: DelayedQueue
    stream: VirtualStream | None = None  # the server's end of the data connection, if it has one
    session: bytes = b""

    def close(self) -> None:
        """Close everything; what was sent before still arrives."""
        self.to_server.close()
        self.to_process.close()
        if self.stream is not None:
            self.stream.close()

    def lose(self) -> int:
        """Lose some messages and bytes of both directions; return how many messages."""
        if self.stream is not None:
            self.stream.lose()
        return self.to_server.lose() + self.to_process.lose()


class Connections(InProcessNetwork):
    """The connections of one server."""

    def __init__(
        self, kernel: Kernel, process: Process, store: InProcessStore, others: Any = None
    ) -> None:
        self._others = others or NO_OTHERS
        self.world = kernel.world
        super().__init__(store, VirtualCondition(kernel.world), kernel.system)
        self._kernel = kernel
        self._observed = kernel.observed
        self.process = process
        self.accepted: list[Connection] = []
        process.on_exit.append(self.close_all)
        self._handled: set[int] = set()

    def accept(self, connection: Connection) -> None:
        """Accept a connection that a process has made."""
        peer: Any
        if connection.stream is not None:
            control = QueueControl(connection.to_server, connection.to_process)
            peer = StormTcpPeer(control, self._store, self._observed, self.world)
            peer.join_others(connection.session, self._others)
            peer.attach(connection.stream)
        else:
            plain = InProcessPeer(connection.to_server, connection.to_process, self._store)
            peer = StormPeer(plain, self._observed, self.world)
            peer.pid = connection.process.pid
        self._peers.append(peer)
        self.accepted.append(connection)

    def cut(self, process: Process) -> int:
        """Cut the connections of a process; return how many there were."""
        found = [c for c in self.accepted if c.process is process and not c.to_server.is_closed]
        is_losing = self.world.random.random() < CUT_LOSES
        parts = list(self._kernel.parts.values())
        if parts and found and self.world.random.random() < ONLY_OTHER:
            return sum(part.cut(process, is_losing) for part in parts)
        for connection in found:
            lost = connection.lose() if is_losing else 0
            if connection.stream is not None and self.world.random.random() < ONLY_DATA:
                connection.stream.close()
            else:
                connection.close()
            self.world.note(f"a connection of {process.name} is cut, {lost} messages are lost")
        return len(found)

    def wait_among(self, peers: Sequence[StormTcpPeer], timeout_s: float) -> None:
        """Wait until one of these has news, or for this long; only their data is moved."""
        self.world.wait_for(
            lambda: any(peer.has_news() or peer.can_move_data() for peer in peers), timeout_s
        )
        for peer in peers:
            if peer.can_move_data():
                peer.move_data()

    def close_all(self) -> None:
        """Close all connections."""
        for connection in self.accepted:
            connection.close()

    def stop_on(self, *signals: int) -> None:
        """Let these signals set `stop_wanted`."""
        self._handled.update(signals)

    def signal(self, number: int) -> bool:
        """Handle a signal; return False if nobody does."""
        if number not in self._handled:
            return False
        self.stop_wanted = True
        return True

    def wait(self, timeout_s: float | None) -> list[Any]:
        """Wait until a peer has news or a signal has arrived, or for this long."""
        had_stop = self.stop_wanted

        def is_met() -> bool:  # it stays referred to, so it must not refer to a peer
            is_woken = self.stop_wanted and not had_stop
            can_move = any(peer.can_move_data() for peer in self._between_hosts)
            return is_woken or can_move or any(peer.has_news() for peer in self._peers)

        self._observed.check_slots(len(self._peers))
        self.world.wait_for(is_met, timeout_s)
        for peer in self._between_hosts:
            if peer.can_move_data():
                peer.move_data()
        return [peer for peer in self._peers if peer.has_news()]

    @property
    def _between_hosts(self) -> list[StormTcpPeer]:
        return [peer for peer in self._peers if isinstance(peer, StormTcpPeer)]

    def shut_down(self) -> None:
        """Close everything; nobody can connect from now on."""
        super().shut_down()
        self._kernel.stop_listening(self)


class WatchEnd:
    """The launcher's connection to a server."""

    def __init__(self, end: InProcessWorker) -> None:
        self._end = end
        self._is_open = True

    def send(self, message: object) -> None:
        """Send a message."""
        self._end.send(message)

    def has_news(self) -> bool:
        """Return whether there is something to receive."""
        return self._is_open and self._end._inbox.has_news()

    def receive_nowait(self) -> Iterator[FromServer]:
        """Yield the messages that have arrived."""
        message = self._end._inbox.take()
        while message is not None:
            yield message
            with suppress(PeerLost):
                message = self._end._inbox.take()
                continue
            return

    def wait_readable(self, timeout_s: float) -> bool:
        """Return whether there is something to receive within this time."""
        return self._end.wait_readable(timeout_s)

    def close(self) -> None:
        """Close the connection."""
        self._is_open = False
        self._end.close()


class Kernel:
    """What the OS of the host knows: who listens, and which processes there are."""

    def __init__(self, world: World, delay_max_s: float) -> None:
        self.world = world
        self.delay_max_s = delay_max_s
        self.parts: dict[str, Any] = {}  # the networks of servers that aren't the head, by address
        self._sessions = count(1)
        self._listening: Connections | None = None
        self._has_socket = False  # a server has listened, so the socket accepts connections
        self._backlog: list[Connection] = []  # for the next server
        self.parked = 0  # how many connections ever had to wait for one
        self.observed = Observed()  # of the last server
        self.system = System(
            monotonic=world.monotonic,
            cpu_time=lambda: 0.0,
            sleep=world.sleep,
            is_stopped=self._is_stopped,
            status=self._status,
            descendants=lambda _: [],
        )

    def delay_s(self) -> float:
        """Return how long the next message takes."""
        return self.world.random.random() ** 3 * self.delay_max_s

    def _status(self, pid: int) -> ProcessStatus | None:
        """Return the state of a process; it computes as often as it touches the outside."""
        for process in self.world.processes:
            if process.pid == pid and process.is_alive:
                waiting = "D" if process.disk_waits and not process.is_locked else "S"
                state = "T" if process.is_frozen else waiting
                return ProcessStatus(state, float(process.points))
        return None

    def _is_stopped(self, pid: int) -> bool:
        return any(p.pid == pid and p.is_frozen for p in self.world.processes)

    def listen(self, process: Process, store: InProcessStore, others: Any = None) -> Connections:
        """Listen in this process, and accept the connections that wait for it."""
        self.world.touch()
        self.observed = Observed()
        connections = self._listening = Connections(self, process, store, others)
        self._has_socket = True
        process.on_exit.append(lambda: self.stop_listening(connections))
        for connection in self._backlog:
            connections.accept(connection)
        self._backlog.clear()
        return connections

    def stop_listening(self, connections: Connections) -> None:
        """Accept no connections from now on, unless another server listens."""
        if self._listening is connections:
            self._listening = None

    def close_socket(self) -> None:
        """Refuse connections from now on, because the launcher that held the socket is gone."""
        self._has_socket = False
        for connection in self._backlog:
            connection.close()
        self._backlog.clear()

    @property
    def listening(self) -> Connections | None:
        """The server that listens."""
        return self._listening

    def dial(self, process: Process) -> InProcessWorker:
        """Connect to the server, or wait for the next one; raises PeerLost before the first."""
        connection = self._connect(process, None)
        return InProcessWorker(connection.to_process, connection.to_server)

    def dial_tcp(self, process: Process, spec: StateSpec) -> TcpWorker:
        """Connect to the server as from another host."""
        theirs, ours = connected_streams(self.world, self.delay_max_s)
        connection = self._connect(process, theirs)
        control = WorkerQueues(connection.to_process, connection.to_server, self.world)

        def dial_data(address: str) -> VirtualStream:
            if address not in self.parts:
                raise PeerLost(f"no server at {address}")
            return self.parts[address].dial(process, connection.session)

        return TcpWorker(control, ours, spec, dial_data, self.system)

    def connect(self, process: Process) -> tuple[DelayedQueue, DelayedQueue, VirtualStream]:
        """Connect another server to the head: queues to it and back, and a stream."""
        theirs, ours = connected_streams(self.world, self.delay_max_s)
        connection = self._connect(process, theirs)
        return connection.to_server, connection.to_process, ours

    def _connect(self, process: Process, stream: VirtualStream | None) -> Connection:
        self.world.touch()
        if not self._has_socket:
            raise PeerLost("no server listens")
        to_server, to_process = DelayedQueue(self, decode_worker), DelayedQueue(self, decode_server)
        session = next(self._sessions).to_bytes(32, "big")
        connection = Connection(process, to_server, to_process, stream, session)
        process.on_exit.append(connection.close)
        if self._listening is not None:
            self._listening.accept(connection)
        else:
            self.parked += 1
            self._backlog.append(connection)
        return connection
