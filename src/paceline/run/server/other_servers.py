# SPDX-License-Identifier: BSD-3-Clause
"""The head's connections to the other servers of its run.

The other servers connect to the head, as workers do. They do what the head says, in the order in
which it says it. The head waits for them only where it needs their answer: for the norm of an
update, and for their parts of a state. What they report meanwhile is noted, and the head's event
loop acts on it later.

If a server is lost, so is its part of the newest version, and the run has to go back to its last
checkpoint on all servers. The head then raises `ServerLost` and ends. Its launcher restarts it.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, TypeVar

from paceline.errors import PacelineError, PeerLost, ProtocolError, SpecError
from paceline.release import RELEASE
from paceline.run.launch.environment import SERVER_LOST
from paceline.run.net import messages
from paceline.run.net import server_messages as to_servers
from paceline.run.net.server_messages import (
    Blamed,
    JoinAsServer,
    PartArrived,
    PartLost,
    PartMoved,
    PartReduced,
    PeerOpened,
    ServerFailed,
)
from paceline.run.net.tcp import OtherAddresses, TcpPeer, VersionMessage, what_travels
from paceline.run.net.transport import Moved, PeerEnd, ServerConnections
from paceline.run.tensors.layout import TrainingState, difference
from paceline.run.tensors.partition import Part

__all__ = ["OtherServers", "PartFailed", "ServerLost"]

T = TypeVar("T")

LEAVE_S = 5.0  # for servers to leave after the end
SAY_S = 10.0  # between two lines about servers that the run is waiting for
# How often the head looks up while it waits for an answer. Rarely: a launcher takes a server that
# uses the processor for one that works, not for one that waits for another that hangs.
ANSWER_S = 2.0


class ServerLost(SystemExit):
    """Another server of the run is gone: all of them continue from the last checkpoint.

    It ends the head's process. No handler of exceptions may keep the run going.
    """

    def __init__(self, why: str) -> None:
        super().__init__(SERVER_LOST)
        self.why = why


class PartFailed(PacelineError):
    """An error on another server, such as one of the optimizer: the run can't go on."""


class OtherServers:
    """The servers of a run but the head, by number from 1 on."""

    def __init__(
        self,
        whole: TrainingState,
        parts: Sequence[Part],
        is_split: Sequence[bool],
        welcome: to_servers.ServerWelcome,
    ) -> None:
        """`parts`: of all servers. `is_split`: which optimizers work element by element."""
        self.parts = parts
        self.is_split = tuple(is_split)
        self.connections: ServerConnections  # set before the first message can arrive
        self.welcome = welcome
        self.failure = ""
        """Why the run can't go on; "" if it can."""
        self._whole = whole
        self._ends: dict[int, TcpPeer] = {}  # by number, those that have joined
        self._addresses: dict[int, str] = {}
        self._peers: dict[int, TcpPeer] = {}  # of workers, by their number at the other servers
        self._lost_peers: list[tuple[TcpPeer, str]] = []
        self._next_peer = count(1)
        self._awaited_since: float | None = None  # not None iff servers are awaited
        self._say_at = 0.0  # when to say so
        self.handlers: dict[type, Callable[[PeerEnd, Any], None]] = {
            PartArrived: self._on_part_arrived,
            PartLost: self._on_part_lost,
            PartMoved: self._on_part_moved,
            ServerFailed: self._on_failed,
            PartReduced: self._on_unasked,
            Blamed: self._on_unasked,
            PeerOpened: self._on_unasked,
        }

    @classmethod
    def none(cls, whole: TrainingState) -> "OtherServers":
        """Return the other servers of a run that has only one."""
        return cls(whole, (), (), to_servers.ServerWelcome(1, None, 1, False, "exact", "exact"))

    @property
    def servers(self) -> int:
        """How many servers the run has, with the head."""
        return max(1, len(self.parts))

    # ---------------------------------------------------------------------------------- joining

    @property
    def numbers(self) -> list[int]:
        """The servers that have joined."""
        return list(self._ends)

    @property
    def missing(self) -> list[int]:
        """The servers that haven't joined."""
        return [number for number in range(1, len(self.parts)) if number not in self._ends]

    def admit(self, end: PeerEnd, join: JoinAsServer) -> None:
        """Make a connection one of the servers; raises ProtocolError if it can't be one."""
        if not isinstance(end, TcpPeer) or not 0 < join.number < self.servers:
            raise ProtocolError(
                f"the servers of this run are 0 to {self.servers - 1}, got server {join.number}"
            )
        if not end.is_attached:
            raise ProtocolError("a server needs its data connection before it joins")
        if join.number in self._ends:
            raise ProtocolError(f"there is already a server {join.number}")
        if join.release != RELEASE:
            raise ProtocolError(f"expected Paceline {RELEASE} in a server, got {join.release}")
        mismatch = difference(join.spec, self._whole.spec)
        if mismatch is None and join.is_split != self.is_split:
            mismatch = f"it can split the optimizers {join.is_split}, the head {self.is_split}"
        if mismatch:
            raise ProtocolError(f"the server's script differs from the head's: {mismatch}")
        self._ends[join.number], self._addresses[join.number] = end, join.address
        end.send(self.welcome)

    def number_of(self, end: PeerEnd) -> int | None:
        """Return which server this connection is; None if it isn't one."""
        return next((number for number, one in self._ends.items() if one is end), None)

    # ---------------------------------------------------------------------------------- talking

    def send(self, number: int, message: object) -> None:
        """Send a message to one server."""
        self._attempt(number, lambda end: end.send(message))

    def send_state(self, number: int, message: object, state: Any, what: str) -> None:
        """Send a message and a state to one server."""
        self.send(number, message)
        self._attempt(number, lambda end: end.send_state(state, what))

    def broadcast(self, message: object) -> None:
        """Send a message to all servers."""
        for number in self.numbers:
            self.send(number, message)

    def _attempt(self, number: int, call: Callable[[TcpPeer], None]) -> None:
        try:
            call(self._ends[number])
        except PeerLost as error:
            raise self.lost(number, str(error)) from None

    def lost(self, number: int, reason: str) -> ServerLost:
        """Say nothing more to the servers, because one of them is gone; return the error."""
        self._ends.clear()
        return ServerLost(f"lost server {number}: {reason}")

    def answers(self, kind: type[T]) -> list[T]:
        """Wait until every server has sent a message of this kind; return them in order.

        Raises ServerLost, or PartFailed if a server reports that it has failed.
        """
        found: dict[int, T] = {}
        while True:
            for number in self.numbers:
                self._receive(number, kind, found)
            awaited = [number for number in self._ends if number not in found]
            if self.failure:
                raise PartFailed(self.failure)
            self._note_awaited(awaited)
            if not awaited:
                return [found[number] for number in sorted(found)]
            self.connections.wait_among([self._ends[n] for n in awaited], ANSWER_S)

    def note_missing(self) -> None:
        """Say which servers the run waits for before it can begin, if that takes long."""
        if self.parts:
            self._note_awaited(self.missing)

    def _note_awaited(self, servers: list[int]) -> None:
        """Say now and then which servers the run is waiting for."""
        if not servers:
            self._awaited_since = None
            return
        now = self.connections.system.monotonic()
        if self._awaited_since is None:
            self._awaited_since, self._say_at = now, now + SAY_S
        elif now >= self._say_at:
            self._say_at = now + SAY_S
            which = f"server{'s' * (len(servers) > 1)} {', '.join(map(str, servers))}"
            print(f"waiting for {which} for {now - self._awaited_since:.0f} s", flush=True)

    def _receive(self, number: int, kind: type[T], found: dict[int, T]) -> None:
        """Take what a server has sent; keep its answer."""
        end = self._ends[number]
        try:
            for message in end.receive_nowait():
                if isinstance(message, kind) and number not in found:
                    found[number] = message
                else:
                    self._take(end, message)
        except (PeerLost, ProtocolError) as error:
            raise self.lost(number, str(error)) from None

    def _take(self, end: TcpPeer, message: object) -> None:
        """Handle a message that isn't an answer."""
        if self.ignores(end, message):
            return
        if type(message) not in self.handlers:
            raise ProtocolError(f"expected no {type(message).__name__} now")
        self.handlers[type(message)](end, message)

    def ignores(self, end: PeerEnd, message: object) -> bool:
        """Return whether a message is an answer that the head no longer waits for."""
        answers = messages.StateUpload | PartReduced | Blamed | PeerOpened
        is_answer = isinstance(message, answers)
        return is_answer and self.failure != "" and self.number_of(end) is not None

    def collect(self) -> list[Any]:
        """Return the state of every server's part; raises PartFailed if a server has failed."""
        if self.failure:  # an upload that was asked for before may still be on its way
            raise PartFailed(self.failure)
        self.broadcast(to_servers.CollectPart())
        uploads = self.answers(messages.StateUpload)
        return [self._ends[n].receive_state(one) for n, one in enumerate(uploads, start=1)]

    def end(self) -> None:
        """Tell all servers that the run is over, and wait a little until they have left."""
        if not self._ends:
            return
        for one in self._ends.values():
            with suppress(PeerLost):  # everything is saved
                one.send(to_servers.RunOver())
        until = self.connections.system.monotonic() + LEAVE_S
        left, self._ends = self._ends, {}
        while left and self.connections.system.monotonic() < until:
            self.connections.wait_among(list(left.values()), ANSWER_S)
            for number, end in list(left.items()):
                with suppress(ProtocolError):
                    try:
                        for _ in end.receive_nowait():
                            pass
                    except PeerLost:
                        del left[number]

    def take_lost_peers(self) -> list[tuple[TcpPeer, str]]:
        """Return the ends of workers whose data connections to other servers are gone, and why."""
        lost, self._lost_peers = self._lost_peers, []
        return lost

    def _on_part_arrived(self, end: PeerEnd, message: PartArrived) -> None:
        self._check(end)
        peer = self._peers.get(message.peer)
        if peer is not None:
            peer.count_moved(Moved(message.to_worker, message.to_server))
            peer.part_arrived(message.payload)

    def _on_part_moved(self, end: PeerEnd, message: PartMoved) -> None:
        self._check(end)
        peer = self._peers.get(message.peer)
        if peer is not None:
            peer.count_moved(Moved(message.to_worker, message.to_server))

    def _on_part_lost(self, end: PeerEnd, message: PartLost) -> None:
        self._check(end)
        peer = self._peers.get(message.peer)
        if peer is not None:
            self._lost_peers.append((peer, message.reason))

    def _on_failed(self, end: PeerEnd, message: ServerFailed) -> None:
        reason = f"server {self._check(end)} failed: {message.reason}"
        self.failure = self.failure or reason  # later ones follow from it

    def _on_unasked(self, end: PeerEnd, message: object) -> None:
        self._check(end)
        raise ProtocolError(f"nobody has asked for {type(message).__name__}")

    def _check(self, end: PeerEnd) -> int:
        number = self.number_of(end)
        if number is None:
            raise ProtocolError("only a server may send this")
        return number

    # --------------------------------------------------------- what the head's ends to workers do

    def open(self, peer: TcpPeer, session: bytes, worker: int | None) -> tuple[int, OtherAddresses]:
        """Expect data connections of this session at all servers, and have slots for it there.

        `worker`: its number; None: the peer is the agent of a host. Raises SpecError if a server
        has no memory for a slot.
        """
        number = next(self._next_peer)
        self.broadcast(to_servers.OpenPeer(number, worker, session))
        with suppress(PartFailed):  # the run has failed: its workers are only told of the end
            opened = dict(enumerate(self.answers(PeerOpened), start=1))
            failures = [f"server {n}: {one.failure}" for n, one in opened.items() if one.failure]
            if failures:
                for n in [n for n, one in opened.items() if not one.failure]:
                    self.send(n, to_servers.ClosePeer(number))
                raise SpecError(failures[0])
        self._peers[number] = peer
        addresses = tuple([self._addresses[n] for n in sorted(self._addresses)])
        return number, OtherAddresses(addresses, self.is_split)

    def publish(self, peer: int, payload: int, message: VersionMessage) -> None:
        """Send their parts of a version."""
        optimizer, is_last = what_travels(message)
        self.broadcast(to_servers.PublishPart(peer, payload, message.version, optimizer, is_last))

    def stop(self, peer: int, payload: int) -> None:
        """Send nothing more of them."""
        self.broadcast(to_servers.StopPart(peer, payload))

    def expect(self, peer: int, payload: int, optimizer: int) -> int:
        """Receive their parts of a gradient; return how many there are."""
        holders = [n for n, part in enumerate(self.parts) if n and part.has(optimizer)]
        for number in holders:
            self.send(number, to_servers.ExpectPart(peer, payload, optimizer))
        return len(holders)

    def skip(self, peer: int, payload: int) -> None:
        """Don't receive their parts of a gradient any more."""
        self.broadcast(to_servers.SkipPart(peer, payload))

    def close(self, peer: int) -> None:
        """Close the data connections of a worker."""
        if self._peers.pop(peer, None) is not None:
            self.broadcast(to_servers.ClosePeer(peer))
