# SPDX-License-Identifier: BSD-3-Clause
"""The workers of a run, from the server's side: who is here, and telling them things.

Nothing here decides. A message that cannot be sent makes its peer a lost one, which the server
finds in `lost` when it has done what it was at.
"""

import os
from typing import Any

from paceline.core.events import SendParams
from paceline.errors import PeerLost, ProtocolError, SpecError
from paceline.release import RELEASE
from paceline.run.net import messages
from paceline.run.server.checkpointer import Checkpointer
from paceline.run.server.peers import Peer
from paceline.run.settings import Settings
from paceline.run.tensors.group_options import OptionBook, all_options, as_it_is
from paceline.run.tensors.layout import difference
from paceline.run.tensors.region import Region
from paceline.run.tensors.shard import ParameterBuffer, Shard
from paceline.run.tensors.state import pack, unpack

__all__ = ["Roster"]


class Roster:
    """All workers that take part, those that are parked among them."""

    def __init__(self, settings: Settings, shard: Shard) -> None:
        self.members: dict[int, Peer] = {}
        self.ever: set[int] = set()  # everybody that was ever a member
        self.lost: list[tuple[Peer, str]] = []  # who, and why
        self.options = OptionBook()
        self._settings = settings
        self._shard = shard

    @property
    def active(self) -> list[Peer]:
        """Those that are not parked."""
        return [peer for peer in self.members.values() if not peer.is_parked]

    def welcome(self, peer: Peer, message: messages.Join, checkpointer: Checkpointer) -> None:
        """Take a worker in, if it is one of this run; raises ProtocolError if it is not."""
        worker = message.worker
        if peer.worker is not None:
            raise ProtocolError(f"worker {peer.worker} has joined already")
        if worker in self.members:
            raise ProtocolError(f"there is a worker {worker} already; give this one another number")
        if message.release != RELEASE:
            raise ProtocolError(f"it has Paceline {message.release}, the run has {RELEASE}")
        unlike = difference(message.contents, self._shard.common.contents)
        if unlike:
            raise ProtocolError(f"its script is not that of the run: {unlike}")
        try:
            slot, fd = self._shard.new_slot()
        except SpecError as error:  # no memory for one more; those that are here go on
            raise ProtocolError(str(error)) from None
        settings = self._settings
        welcome = messages.Welcome(
            workers=settings.spec.workers,
            slow=settings.slow,
            seed=settings.spec.seed,
            requeue=settings.requeue,
            averages=settings.ema is not None,
            saves=checkpointer.is_on,
            place=checkpointer.place_of(worker),
        )
        try:
            peer.channel.send(welcome, fd, self._shard.constants_fd)
        finally:
            os.close(fd)
        peer.worker, peer.slot = worker, slot
        self.members[worker] = peer
        self.ever.add(worker)

    def send_work(self, action: SendParams, asked_at: float, place_wanted: int) -> None:
        """Let the worker compute at this version, and tell it what became of its last gradient."""
        peer = self.members[action.worker]
        place = self._shard.read(action.worker, action.version)
        optimizers = self._shard.common.optimizers
        if peer.options_known is None:  # it may come from another server, which was lost
            options = all_options(optimizers)
        else:
            changed = self.options.since(peer.options_known)
            options = tuple([as_it_is(optimizers, option) for option in changed])
        work = messages.Assignment(
            action.turn,
            action.version,
            place.number,
            place.number not in peer.places,
            self._shard.steps_at(action.version),
            asked_at,
            options,
            peer.seen,
            place_wanted,
        )
        peer.options_known, peer.seen = self.options.edition, None
        self._send_with_place(peer, work, place)

    def send_over(self, peer: Peer, place_wanted: int = 0) -> None:
        """Tell that the run has ended, and where its last version lies."""
        place = self._shard.newest
        over = messages.RunEnded(
            self._shard.version,
            place.number,
            place.number not in peer.places,
            tuple(self._shard.steps),
            peer.seen,
            place_wanted,
        )
        peer.seen = None
        self._send_with_place(peer, over, place)

    def _send_with_place(
        self, peer: Peer, message: messages.Assignment | messages.RunEnded, place: ParameterBuffer
    ) -> None:
        peer.places.add(place.number)
        self.send(peer, message, *([place.fd] if message.place_is_new else []))

    def send(self, peer: Peer, message: object, *fds: int) -> None:
        """Send a message; a peer that cannot be reached is lost."""
        try:
            peer.channel.send(message, *fds)
        except PeerLost as error:
            self.lost.append((peer, str(error)))

    def give_state(self, peer: Peer, message: messages.StateRequest) -> None:
        """Send a worker the state that it asks for."""
        try:
            tree, fd = pack(self._shard.state(message.what, message.optimizer), message.what)
            # Not in the message: it may be more than the socket takes at once, and we do not wait.
            _, tree_fd = Region.create(len(tree), message.what)
        except SpecError as error:
            raise ProtocolError(str(error)) from None
        try:
            os.pwrite(tree_fd, tree, 0)
            self.send(peer, messages.StateReply(len(tree)), tree_fd, fd)
        finally:
            os.close(fd)
            os.close(tree_fd)

    def take_state(self, peer: Peer, message: messages.StateUpload) -> Any:
        """The state that a worker sends."""
        fd = peer.channel.take_fd()
        try:
            return unpack(message.tree, fd)
        finally:
            os.close(fd)
