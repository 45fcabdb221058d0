# SPDX-License-Identifier: BSD-3-Clause
"""The workers of a run, as the server sees them. Only the roster changes a peer.

A connection becomes a member when it joins with a spec that equals the run's. A member is *busy*
while it computes a turn and *idle* while it waits for the next one. A member whose process was
stopped (SIGSTOP, Ctrl-Z) is *parked*: it has left the run and keeps its connection and slot.

The roster decides nothing. If a message can't be sent, its peer is marked as broken, and so is one
that has broken the protocol while an event is handled; the server collects broken peers with
`take_broken` once it has finished its current event.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from paceline.core.events import Fate
from paceline.errors import PeerLost, ProtocolError, SpecError
from paceline.leases import Use
from paceline.release import RELEASE
from paceline.run.net import messages
from paceline.run.net.transport import PeerEnd
from paceline.run.settings import Settings
from paceline.run.tensors.layout import difference
from paceline.run.tensors.state_spec import StateSpec
from paceline.run.tensors.version_buffers import ParameterBuffer
from paceline.trace.event_records import Measured

__all__ = ["Peer", "Roster"]

Report = messages.GradientReport | messages.AbandonReport

LEASES_MAX = 1000  # with one turn; a worker asks for more if it needs them


@dataclass(eq=False)
class Peer:
    """A worker that has joined. For reading only; the roster changes it."""

    worker: int
    end: PeerEnd
    session: bytes = b""  # identifies its process, which may connect again; empty: it doesn't
    seat: bytes = b""  # at a launcher that has reserved its number; empty: it has none
    options_known: int | None = None  # option changes that were sent to it; None: unknown
    asked_at: float | None = None  # when its turn began; None: it is idle
    longest_s: float = 0.0  # that one of its turns took
    update: int | None = None  # the update its last gradient was accepted for, if it was
    notice: messages.FateNotice | None = None  # the fate of its last gradient, until it is sent
    optimizer: int | None = None  # that its last gradient was for; None: it hasn't reported one
    is_parked: bool = False  # its process is stopped, and it has left the run for now
    is_silent: bool = False  # it was parked while idle, so it has nothing to report
    ahead: tuple[int, ...] = ()  # batches of each stream that it wants to hold
    wanted: list[int] = field(default_factory=list)  # those of them that it gets with its next turn
    holds_leases: bool = True  # False: it lost them, but doesn't know yet

    def measured(
        self, report: Report, now: float, sq_norm: float | None = None, uses: tuple[Use, ...] = ()
    ) -> Measured:
        """Return what the trace records about its turn; it can't have computed for longer."""
        assert self.asked_at is not None
        compute_s = min(report.compute_s, now - self.asked_at)
        moved = self.end.take_moved()
        return Measured(self.asked_at, compute_s, *moved, sq_norm, uses, report.cpu_s)


class Roster:
    """All workers in the run, including parked ones."""

    def __init__(self, settings: Settings, spec: StateSpec, shares: int = 1) -> None:
        """`shares`: into how many parts the workers divide an epoch."""
        self._settings = settings
        self._spec = spec
        self._shares = shares
        self._members: dict[int, Peer] = {}
        self._by_end: dict[PeerEnd, Peer] = {}
        self._known: set[int] = set()
        self._given_up: set[int] = set()
        self._broken: list[tuple[PeerEnd, str, str]] = []

    # --------------------------------------------------------------------------------- reading

    def __getitem__(self, worker: int) -> Peer:
        return self._members[worker]

    def get(self, worker: int) -> Peer | None:
        """Return the member with this number, if there is one."""
        return self._members.get(worker)

    def find(self, end: PeerEnd) -> Peer | None:
        """Return the member at this connection; None if it hasn't joined."""
        return self._by_end.get(end)

    def member(self, end: PeerEnd) -> Peer:
        """Return the member at this connection; raises ProtocolError if it hasn't joined."""
        peer = self._by_end.get(end)
        if peer is None:
            raise ProtocolError("a worker must join before anything else")
        return peer

    @property
    def members(self) -> list[Peer]:
        """All members, including parked ones."""
        return list(self._members.values())

    @property
    def active(self) -> list[Peer]:
        """The members that aren't parked."""
        return [peer for peer in self._members.values() if not peer.is_parked]

    @property
    def computing(self) -> dict[int, float]:
        """The members whose turn isn't over, and how long their longest one took."""
        return {peer.worker: peer.longest_s for peer in self.active if peer.asked_at is not None}

    @property
    def known_count(self) -> int:
        """How many workers have joined at some time, or are known to never join."""
        return len(self._known)

    def is_known(self, worker: int) -> bool:
        """Return whether the worker has joined at some time, or is known to never join."""
        return worker in self._known

    def is_given_up(self, worker: int) -> bool:
        """Return whether nobody will start this worker again."""
        return worker in self._given_up

    # ------------------------------------------------------------------------ coming and going

    def admit(self, end: PeerEnd, join: messages.Join, saves: bool, position: bytes) -> Peer:
        """Make the connection a member; raises ProtocolError if it can't be one."""
        self._check(end, join)
        settings = self._settings
        welcome = messages.Welcome(
            workers=settings.spec.workers,
            latency=settings.latency,
            seed=settings.spec.seed,
            requeue=settings.requeue,
            averages=settings.ema is not None,
            saves=saves,
            position=position,
            shares=self._shares,
            wire=settings.wire,
            wire_parameters=settings.wire_parameters,
            worker=join.worker,
        )
        try:
            end.open_slot(welcome)
        except SpecError as error:  # no memory for another slot; the run goes on without it
            raise ProtocolError(str(error)) from None
        ahead = tuple([min(count, LEASES_MAX) for count in join.ahead])
        peer = Peer(join.worker, end, join.session, join.seat, ahead=ahead, wanted=list(ahead))
        self._members[join.worker] = self._by_end[end] = peer
        self._known.add(join.worker)
        self._given_up.discard(join.worker)
        return peer

    @staticmethod
    def is_same_process(peer: Peer, join: messages.Join) -> bool:
        """Return whether a member is this very process, which has connected again."""
        return bool(join.session) and peer.session == join.session

    def _check(self, end: PeerEnd, join: messages.Join) -> None:
        if end in self._by_end:
            raise ProtocolError(f"worker {self._by_end[end].worker} has joined already")
        if join.worker in self._members:
            raise ProtocolError(
                f"there is already a worker {join.worker}; give this one another number"
            )
        if join.release != RELEASE:
            raise ProtocolError(f"expected Paceline {RELEASE} in a worker, got {join.release}")
        mismatch = difference(join.spec, self._spec)
        if mismatch:
            raise ProtocolError(f"the worker's script differs from the server's: {mismatch}")

    def remove(self, peer: Peer) -> None:
        """Forget a member whose connection is gone."""
        del self._members[peer.worker]
        del self._by_end[peer.end]

    def give_up(self, worker: int) -> None:
        """Note that nobody will start this worker again; if it never joined, it counts as known."""
        self._known.add(worker)
        self._given_up.add(worker)

    def park(self, peer: Peer) -> None:
        """Note that the member's process was stopped."""
        peer.is_parked, peer.is_silent = True, peer.asked_at is None
        peer.holds_leases, peer.wanted = False, list(peer.ahead)

    def unpark(self, peer: Peer) -> None:
        """Note that the member's process is running again; its gradient is void."""
        peer.is_parked, peer.optimizer = False, None

    # ----------------------------------------------------------------------------------- turns

    def begin_turn(self, peer: Peer, now: float, options_known: int) -> None:
        """Note that the member got an assignment, with all option changes up to `options_known`."""
        peer.asked_at, peer.options_known, peer.notice = now, options_known, None

    def end_turn(self, peer: Peer, now: float, optimizer: int | None = None) -> float | None:
        """Note that the member is idle; return when its turn began, None if it had none.

        `optimizer`: that it has reported a gradient for, if it has.
        """
        asked_at, peer.asked_at, peer.optimizer = peer.asked_at, None, optimizer
        if asked_at is not None and now - asked_at > peer.longest_s:
            peer.longest_s = now - asked_at
        return asked_at

    def reopen_turn(self, peer: Peer, asked_at: float) -> None:
        """Undo `end_turn` for a report that was refused."""
        peer.asked_at = asked_at

    def set_fate(self, peer: Peer, notice: messages.FateNotice, update: int | None) -> None:
        """Note the fate of the member's gradient, and the update it was accepted for, if any."""
        peer.notice, peer.update = notice, update

    def count_contributors(self, worker: int, update: int, count: int) -> None:
        """Add the number of contributors to a worker's notice, if it is still for this update."""
        peer = self._members.get(worker)
        if peer is not None and peer.notice is not None and peer.update == update:
            notice = peer.notice
            peer.notice = messages.FateNotice(
                Fate.ACCEPTED, notice.version, notice.staleness, count
            )

    def clear_notice(self, peer: Peer) -> None:
        """Note that the fate of the member's last gradient was sent to it."""
        peer.notice = None

    # ---------------------------------------------------------------------------------- leases

    def want_more(self, peer: Peer, pulled: Sequence[int]) -> None:
        """Note how many leases of each stream the member has used up."""
        for stream, count in enumerate(pulled[: len(peer.wanted)]):
            peer.wanted[stream] = min(peer.wanted[stream] + count, LEASES_MAX)

    def give_leases(self, peer: Peer) -> bool:
        """Note that the member gets what it wants; return whether it must forget older leases."""
        forgets, peer.holds_leases = not peer.holds_leases, True
        peer.wanted = [0] * len(peer.ahead)
        return forgets

    # --------------------------------------------------------------------------------- sending

    def send(self, peer: Peer, message: object) -> None:
        """Send a message; if that fails, mark the peer as broken."""
        try:
            peer.end.send(message)
        except PeerLost as error:
            self._broken.append((peer.end, str(error), ""))

    def attempt(self, peer: Peer, call: Callable[[], None]) -> None:
        """Call a method of the peer's end; if that fails, mark the peer as broken."""
        try:
            call()
        except PeerLost as error:
            self._broken.append((peer.end, str(error), ""))

    def publish(
        self,
        peer: Peer,
        message: messages.Assignment | messages.RunEnded,
        buffer: ParameterBuffer,
    ) -> None:
        """Send a message and the version it names; if that fails, mark the peer as broken."""
        try:
            peer.end.publish(message, buffer)
        except PeerLost as error:
            self._broken.append((peer.end, str(error), ""))

    def lose(self, end: PeerEnd, reason: str) -> None:
        """Mark the connection of a member as broken."""
        self._broken.append((end, reason, ""))

    def refuse(self, peer: Peer, reason: str) -> None:
        """Mark a peer as broken because it broke the protocol; the reason is sent to it."""
        self._broken.append((peer.end, f"broke the protocol: {reason}", reason))

    def take_broken(self) -> Iterable[tuple[PeerEnd, str, str]]:
        """Remove and return broken connections, why they broke, and what to tell their workers."""
        broken, self._broken = self._broken, []
        return broken
