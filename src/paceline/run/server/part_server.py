# SPDX-License-Identifier: BSD-3-Clause
"""A server that holds a part of the parameters, but isn't the head.

It does what the head says, in that order, and decides nothing. Workers exchange their part of the
parameters and gradients with it, over data connections that the head has announced.

If the head is lost, everything here is out of date: the server closes its connections and waits for
the next head, which sends it its part again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from traceback import print_exc
from typing import Any, Protocol

from paceline.core.events import ApplyUpdate, Contribution
from paceline.errors import PeerLost, ProtocolError, SpecError
from paceline.release import RELEASE
from paceline.run.net import messages
from paceline.run.net import server_messages as told
from paceline.run.net.data_peer import PartPeer
from paceline.run.net.tcp import spans_of_version
from paceline.run.net.transport import TensorStore
from paceline.run.server.head_search import find_head
from paceline.run.system import System
from paceline.run.tensors.group_options import set_option
from paceline.run.tensors.layout import Layout, TrainingState, Views
from paceline.run.tensors.optimizer_parts import can_split
from paceline.run.tensors.optimizer_states import load_exactly
from paceline.run.tensors.part_tensors import take_part
from paceline.run.tensors.partition import Part, partition
from paceline.run.tensors.shard import Shard, limit_threads
from paceline.run.tensors.sums import SlotGradient

__all__ = ["HeadEnd", "PartConnections", "PartHost", "PartServer", "PartSession"]

TICK_S = 1.0


class HeadEnd(Protocol):
    """The connection to the head."""

    def send(self, message: object) -> None:
        """Send a message."""

    def receive(self) -> Any:
        """Wait for the next message; raises PeerLost if the head is gone."""

    def wait_readable(self, timeout_s: float) -> bool:
        """Return whether there is something to receive within this time."""

    def send_state(self, optimizer: int, state: Any, has_begun: bool) -> None:
        """Send a state."""

    def receive_state(self, reply: messages.StateReply) -> Any:
        """Return the state that came with the reply."""

    def close(self) -> None:
        """Close the connection."""


class PartConnections(Protocol):
    """The connections to the head and to the workers."""

    @property
    def address(self) -> str:
        """Where workers reach this server."""

    @property
    def head(self) -> HeadEnd:
        """The connection to the head."""

    def expect(self, session: bytes, peer: PartPeer) -> None:
        """Attach the data connection of this session to the peer, when it is there."""

    def wait(self, timeout_s: float) -> list[PartPeer]:
        """Wait until the head or a peer has news, or for this long; return those peers."""

    def close_peer(self, peer: PartPeer) -> None:
        """Close the data connection of a peer."""

    def close(self) -> None:
        """Close everything."""


class PartHost(Protocol):
    """Where a server runs."""

    @property
    def system(self) -> System:
        """The system that it runs on."""

    def new_store(self, part: Part) -> TensorStore:
        """Return memory for a part."""

    def connect(self) -> PartConnections:
        """Connect to the head once; raises PeerLost if there is none.

        The error is NobodyListens if no process listens at its address.
        """


@dataclass(eq=False)
class _Worker:
    """A worker or the agent of a host, as this server knows it."""

    peer: PartPeer
    number: int | None  # of the worker; None: it is the agent of a host
    slot: Views


class PartServer:
    """One server of a run, from its beginning to its end."""

    def __init__(
        self,
        number: int,
        whole: TrainingState,
        host: PartHost,
        say: Callable[[str], None] = print,
    ) -> None:
        """`number`: from 1 on. `whole`: everything that the script trains."""
        self._number = number
        self._whole = whole
        self._is_split = tuple(map(can_split, whole.optimizers))
        self._host = host
        self._say = say
        self._taken: tuple[Part, TrainingState] | None = None  # what this server has of the whole

    def serve(self) -> None:
        """Serve until the run has ended; raises PeerLost if no head is found for a long time."""
        while (connections := self._find_head()) is not None and not self._serve_head(connections):
            self._say(f"server {self._number} lost the head; waiting for it to restart")
        self._say(f"server {self._number}: the run has ended")

    def _find_head(self) -> PartConnections | None:
        has_joined = self._taken is not None
        return find_head(self._host.connect, self._say, self._host.system, has_joined=has_joined)

    def _serve_head(self, connections: PartConnections) -> bool:
        """Serve one head; return whether the run is over."""
        try:
            return self.join(connections).serve()
        except PeerLost:
            return False
        finally:
            connections.close()

    def join(self, connections: PartConnections) -> "PartSession":
        """Join the run of this head; raises ProtocolError if it refuses this server."""
        welcome = self._join(connections)
        return PartSession(self._take(welcome), welcome, connections, self._host)

    def _join(self, connections: PartConnections) -> told.ServerWelcome:
        join = told.JoinAsServer(
            self._number, RELEASE, self._whole.spec, self._is_split, connections.address
        )
        connections.head.send(join)
        answer = connections.head.receive()
        if isinstance(answer, messages.Refused):
            raise ProtocolError(f"the head refused server {self._number}: {answer.reason}")
        if not isinstance(answer, told.ServerWelcome):
            raise ProtocolError(f"expected a welcome, got {answer!r}")
        return answer

    def _take(self, welcome: told.ServerWelcome) -> tuple[Part, TrainingState]:
        """Return what this server has of the whole; the script's tensors shrink to it once."""
        if self._taken is None:
            spec = self._whole.spec
            part = partition(spec, welcome.servers, self._is_split)[self._number]
            limit_threads(Layout.of(spec).size)
            self._taken = part, take_part(self._whole, part)
        return self._taken


class PartSession:
    """What this server does for one head."""

    def __init__(
        self,
        taken: tuple[Part, TrainingState],
        welcome: told.ServerWelcome,
        connections: PartConnections,
        host: PartHost,
    ) -> None:
        self._part, state = taken
        self._welcome = welcome
        self._connections = connections
        self._head = connections.head
        self._store = host.new_store(self._part)
        self._shard = Shard(
            state,
            (),
            self._store,
            versions_kept=welcome.versions_kept,
            ema=welcome.ema,
            apart=welcome.is_apart,
        )
        self._workers: dict[int, _Worker] = {}  # by the number of their connection
        self._slots: dict[int, Views] = {}  # by the number of the worker
        self._to_load: told.LoadPart | told.LoadOptimizerPart | None = None
        self._is_over = False
        self._has_failed = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            **self._connection_handlers(),
            **self._shard_handlers(),
            told.LoadPart: self._await_state,
            told.LoadOptimizerPart: self._await_state,
            messages.StateReply: self._on_state,
            told.CollectPart: self._on_collect,
            told.RunOver: self._on_over,
        }

    def serve(self) -> bool:
        """Serve the head until the run is over; return whether it is. Raises PeerLost."""
        try:
            while not self._is_over:
                self.step(TICK_S)
        finally:
            self._store.close()
        return True

    def step(self, timeout_s: float) -> None:
        """Wait for news, or for this long, and act on them."""
        for peer in self._connections.wait(timeout_s):
            self._report(peer)
        while not self._is_over and self._head.wait_readable(0.0):
            self.handle(self._head.receive())

    def handle(self, message: Any) -> None:
        """Do what the head says; tell it if that fails."""
        if isinstance(message, messages.Refused):
            raise PeerLost(message.reason)
        try:
            self._handlers[type(message)](message)
        except PeerLost:
            raise
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Report an error; only the first, because others follow from it."""
        if not self._has_failed:
            self._has_failed = True
            print_exc()
            self._head.send(told.ServerFailed(f"{type(error).__name__}: {error}"[:1000]))

    def _report(self, peer: PartPeer) -> None:
        """Tell the head what has arrived from a worker."""
        number = next((n for n, one in self._workers.items() if one.peer is peer), None)
        if number is None:
            return
        try:
            for payload in peer.take_arrived():
                self._head.send(told.PartArrived(number, payload, *peer.take_moved()))
        except PeerLost as error:
            self._connections.close_peer(peer)
            self._head.send(told.PartLost(number, str(error)))

    # ------------------------------------------------------------------------------ connections

    def _connection_handlers(self) -> dict[type, Callable[[Any], None]]:
        return {
            told.OpenPeer: self._on_open,
            told.ClosePeer: self._on_close,
            told.PublishPart: self._on_publish,
            told.StopPart: self._on_stop,
            told.ExpectPart: self._on_expect,
            told.SkipPart: self._on_skip_part,
        }

    def _on_open(self, message: told.OpenPeer) -> None:
        try:
            slot = self._store.new_accumulator()
        except SpecError as error:  # no memory for another slot; the run goes on without it
            self._head.send(told.PeerOpened(message.peer, str(error)))
            return
        self._head.send(told.PeerOpened(message.peer, ""))
        is_agent = message.worker is None
        peer = PartPeer(self._welcome.wire, self._welcome.wire_parameters, is_agent=is_agent)
        if message.worker is not None:
            self._slots[message.worker] = slot
        self._workers[message.peer] = _Worker(peer, message.worker, slot)
        self._connections.expect(message.session, peer)

    def _on_close(self, message: told.ClosePeer) -> None:
        worker = self._workers.pop(message.peer)
        self._connections.close_peer(worker.peer)
        if worker.number is not None and self._slots.get(worker.number) is worker.slot:
            del self._slots[worker.number]

    def _on_publish(self, message: told.PublishPart) -> None:
        views = self._shard.buffer_of(message.version).views
        spans = spans_of_version(views, message.optimizer, may_round=not message.is_last)
        if spans:
            self._workers[message.peer].peer.send(message.payload, spans)

    def _on_stop(self, message: told.StopPart) -> None:
        self._workers[message.peer].peer.stop(message.payload)
        self._report_moved(message.peer)

    def _on_skip_part(self, message: told.SkipPart) -> None:
        self._workers[message.peer].peer.skip(message.payload)
        self._report_moved(message.peer)

    def _report_moved(self, number: int) -> None:
        """Tell the head what was moved for a turn of which nothing more will arrive."""
        moved = self._workers[number].peer.take_moved()
        if any(moved):
            self._head.send(told.PartMoved(number, *moved))

    def _on_expect(self, message: told.ExpectPart) -> None:
        worker = self._workers[message.peer]
        worker.peer.expect(message.payload, spans_of_version(worker.slot, message.optimizer))

    # ---------------------------------------------------------------------------------- tensors

    def _shard_handlers(self) -> dict[type, Callable[[Any], None]]:
        shard = self._shard
        return {
            told.AddReader: self._on_add_reader,
            told.RemoveReader: lambda m: shard.remove_reader(m.worker, m.optimizer),
            told.AddPart: self._on_add,
            told.SumEarly: lambda m: shard.sum_early(m.update, m.limit),
            told.ReleaseSlot: lambda m: shard.release_slot(m.worker),
            told.ReducePart: self._on_reduce,
            told.StepUpdate: self._on_step,
            told.SkipUpdate: self._on_skip,
            told.FindBlame: self._on_find_blame,
        }

    def _on_add_reader(self, message: told.AddReader) -> None:
        self._shard.add_reader(message.worker, message.version, message.optimizer)

    def _on_add(self, message: told.AddPart) -> None:
        unused = self._part.unused(message.optimizer, frozenset(message.unused))
        slot = None
        if not message.is_in_sum and message.host is None:
            slot = self._slots[message.worker]
        elif message.host is not None and not message.is_in_sum:
            slot = self._workers[message.host].slot
        own = message.worker, message.optimizer, message.samples, message.scale
        self._shard.add(message.update, SlotGradient(*own, unused, slot, message.host))

    def _on_reduce(self, message: told.ReducePart) -> None:
        pairs = zip(message.workers, message.samples, strict=True)
        contributions = tuple([Contribution(worker, 0, samples) for worker, samples in pairs])
        decided = ApplyUpdate(
            message.update, contributions, message.weights, message.scales, len(contributions)
        )
        squares = {
            index: tuple([tuple(blocks) for blocks in flats])
            for index, flats in self._shard.measure(decided).items()
        }
        self._head.send(told.PartReduced(message.update, squares))

    def _on_step(self, message: told.StepUpdate) -> None:
        for option in message.options:
            set_option(self._shard.state.optimizers, option)
        try:
            self._shard.step(message.update, message.scale)
            self._shard.publish(message.update)
        except Exception as error:  # raised by the optimizer, say
            self._fail(error)
            self._shard.skip(message.update)  # workers still get a last version

    def _on_skip(self, message: told.SkipUpdate) -> None:
        if message.update > self._shard.version:  # otherwise only the head's step has failed
            self._shard.skip(message.update)

    def _on_find_blame(self, message: told.FindBlame) -> None:
        workers = self._shard.workers_to_blame(message.update)
        self._head.send(told.Blamed(message.update, tuple(workers)))

    # ----------------------------------------------------------------------------------- states

    def _await_state(self, message: told.LoadPart | told.LoadOptimizerPart) -> None:
        self._to_load = message

    def _on_state(self, message: messages.StateReply) -> None:
        state, target = self._head.receive_state(message), self._to_load
        if isinstance(target, told.LoadPart):
            self._shard.load_part(target.version, state)
        elif target is not None:
            optimizer = self._shard.state.optimizers[target.optimizer]
            load_exactly(optimizer, self._shard.state.parameters[target.optimizer], state)

    def _on_collect(self, message: told.CollectPart) -> None:
        del message
        self._head.send_state(0, self._shard.part_dict(), has_begun=True)

    def _on_over(self, message: told.RunOver) -> None:
        del message
        self._is_over = True
