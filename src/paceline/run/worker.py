# SPDX-License-Identifier: BSD-3-Clause
"""A worker's side of a run: join, push, wait, load.

A push is one short message, for the gradient lies in the slot already; the answer says what became
of it and where the next version lies. Between the two the worker waits. While it computes, the
server may say that what it computes is of no use any more, or that the run is over: it looks for
that during `backward`, during an injected delay, and before it pushes.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from time import monotonic, sleep
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from paceline.core.events import Fate
from paceline.errors import PeerLost, ProtocolError
from paceline.latency import parse_latency
from paceline.release import RELEASE
from paceline.run import wire
from paceline.run.bulk import Region
from paceline.run.channel import Channel, connect
from paceline.run.data import Batches
from paceline.run.environment import Identity
from paceline.run.layout import Common
from paceline.run.options import KnownOptions, set_option
from paceline.run.replica import Replica
from paceline.run.schedule import advance
from paceline.run.state import pack, unpack

__all__ = ["Last", "Worker"]

CONNECT_PATIENCE_S = 600.0  # for a server whose script loads a large data set first
SILENCE_S = 5.0  # after that we say what we wait for
GLANCE_S = 1e-3  # how often a backward pass looks whether it is still wanted


@dataclass(frozen=True)
class Last:
    """What became of a worker's last gradient."""

    fate: Fate
    version: int  # of the parameters that it was computed at
    staleness: int  # how many updates later it was applied, or came too late
    contributors: int  # gradients in the update that it went into; 0: none, or not made yet
    waited_s: float  # in `optimizer.step()`


class _Cut(Exception):
    """Ends a backward pass that is of no use any more."""


class Worker:
    """The link between a script and its run."""

    def __init__(
        self, who: Identity, common: Common, schedulers: Sequence[LRScheduler], replica: Replica
    ) -> None:
        """Join the run; raises ProtocolError if it will not have us."""
        assert who.worker is not None
        self.number = who.worker
        self.version = 0
        self.is_over = False
        self.last: Last | None = None
        self.batches = Batches(len(common.optimizers), replica.models)
        self._optimizers = common.optimizers
        self._schedulers: list[list[LRScheduler]] = [[] for _ in common.optimizers]
        for scheduler in schedulers:
            self._schedulers[common.optimizers.index(scheduler.optimizer)].append(scheduler)
        self._steps = [0] * len(common.optimizers)
        self._options = KnownOptions(common.optimizers)
        self._replica = replica
        self._channel = _connect(who)
        # The processes of a loader must not hold it open: its end tells the server of our death.
        os.register_at_fork(after_in_child=self._channel.close)
        self.welcome = self._join(common.contents)
        self._joined_at = monotonic()
        self._work: wire.Work | None = None  # None: we wait, or were told of the end while we did
        self._work_began = self._joined_at
        self._is_cancelled = False  # the server said that this work is of no use
        self._may_cut = False  # we are in `backward`
        self._was_cut = False  # it ended early
        self._glanced_at = 0.0
        slow, seed = self.welcome.slow, self.welcome.seed
        self._times = parse_latency(slow).stream(self.number, seed) if slow else None
        self._due_at = 0.0  # before this, the gradient must not arrive
        self._logged: dict[str, tuple[float, int]] = {}  # sum and count

    def _join(self, contents: wire.Contents) -> wire.Welcome:
        self._send(wire.Join(self.number, RELEASE, contents))
        welcome = self._receive()
        if not isinstance(welcome, wire.Welcome):
            raise ProtocolError(f"expected to be welcomed, got {welcome!r}")
        self._replica.take_slot(self._map(self._replica.place_bytes, writable=True))
        self._replica.take_constants(self._map(self._replica.constants_bytes, writable=False))
        return welcome

    def begin(self) -> None:
        """Wait for the run to begin, and load."""
        self._replica.on_gradients(self._on_gradient)
        self._wait_for_work()

    # ----------------------------------------------------------------------------------- pushing

    def push(self, optimizer: int) -> None:
        """Give what was computed to the server, wait as the rule says, load what it answers."""
        if self._work is None:
            return
        work = self._work
        self.batches.hand_in(optimizer)
        options = tuple(self._options.changed())
        report: wire.Gradient | wire.Abandoned | None = self._gradient(work, optimizer, options)
        if report is None or not self._wait_until_due():
            report = self._of_no_use(work, optimizer, options)
        self._work = None
        self._logged.clear()
        waits_from = monotonic()
        self._hand_over(report)
        seen = None if self.is_over else self._wait_for_work()
        if seen is None:  # it was void, or the end came before an answer
            seen = wire.Seen(Fate.LATE, work.version, max(0, self.version - work.version), 0)
        waited_s = monotonic() - waits_from
        self.last = Last(seen.fate, seen.version, seen.staleness, seen.contributors, waited_s)
        self.batches.settle(optimizer, seen.fate)

    def _gradient(
        self, work: wire.Work, optimizer: int, options: tuple[wire.Option, ...]
    ) -> wire.Gradient | None:
        """See that the gradient is in the slot, and announce it; None if it is of no use."""
        if self._was_cut or self._is_useless():
            return None
        with torch.no_grad():
            unused, sq_norm = self._replica.collect(optimizer)
        return wire.Gradient(
            work.turn,
            work.version,
            optimizer,
            self.batches.samples(optimizer),
            max(monotonic(), self._due_at) - self._work_began,
            sq_norm if isfinite(sq_norm) else None,
            unused,
            options,
            {name: total / count for name, (total, count) in self._logged.items()},
        )

    def _wait_until_due(self) -> bool:
        """Let the gradient take as long as it is to take; whether it is of use after that."""
        while self._channel.wait_readable(max(0.0, self._due_at - monotonic())):
            self._read_news()
            if self._is_cancelled:
                return False
        return True

    def _of_no_use(
        self, work: wire.Work, optimizer: int, options: tuple[wire.Option, ...]
    ) -> wire.Gradient | wire.Abandoned:
        """Report on work that is of no use any more, and whether it was brought to its end."""
        now = monotonic()
        compute_s = now - self._work_began
        if self._was_cut or now < self._due_at:
            return wire.Abandoned(work.turn, compute_s, work.version, options)
        known = (work.turn, work.version, optimizer, self.batches.samples(optimizer), compute_s)
        return wire.Gradient(*known, None, options=options, cancelled=True)

    def _hand_over(self, report: wire.Gradient | wire.Abandoned) -> None:
        """Send the report; that nobody is there to take it is no matter once the run is over."""
        try:
            self._send(report)
        except PeerLost:
            while self._channel.wait_readable(0.0) and not self.is_over:
                self._read_news()
            if not self.is_over:
                raise

    def discard(self, optimizer: int) -> None:
        """What was computed for this optimizer is thrown away."""
        self.batches.discard(optimizer)

    def backward(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        """`loss.backward()`, which ends early when the gradient is of no use any more."""
        if self._work is None or self._is_useless():
            self._was_cut = True
            self.batches.touch_all()
        else:
            self._may_cut = True
            try:
                # torch has no types for this, so:
                loss.backward(*arguments, **options)  # type: ignore[no-untyped-call]
            except _Cut:
                self._was_cut = True
            finally:
                self._may_cut = False
        if self._was_cut:
            self._replica.fill_gaps()

    def _on_gradient(self, optimizer: int) -> None:
        """The gradient of a parameter is there."""
        self.batches.touch(optimizer)
        if self._may_cut and self._is_useless():
            raise _Cut

    def log(self, scalars: dict[str, float | Tensor]) -> None:
        """Numbers to go with the next gradient; several of a name are averaged."""
        for name, value in scalars.items():
            number = float(value.item() if isinstance(value, Tensor) else value)
            total, count = self._logged.get(name, (0.0, 0))
            self._logged[name] = (total + number, count + 1)

    # ----------------------------------------------------------------------------------- hearing

    def _is_useless(self) -> bool:
        """Whether the server has cancelled this turn; looks now and then only."""
        now = monotonic()
        if now - self._glanced_at > GLANCE_S:
            self._glanced_at = now
            while self._channel.wait_readable(0.0):
                self._read_news()
        return self._is_cancelled

    def _read_news(self) -> None:
        """Something came while we have work: it can only be that this is of no use."""
        message = self._receive()
        if not self._is_news(message):
            raise ProtocolError(f"expected no answer before a report, got {message!r}")

    def _is_news(self, message: wire.FromServer) -> bool:
        """Whether this is what the server may say at any moment; if so, take note of it."""
        if isinstance(message, wire.Cancel):
            # One that came too late, for work that was reported on, is harmless.
            self._is_cancelled |= self._work is not None and message.turn == self._work.turn
            return True
        if isinstance(message, wire.Over):
            self._is_cancelled = self.is_over = True
            self._load(message)
            self._replica.part()
            return True
        return False

    def _wait_for_work(self) -> wire.Seen | None:
        """Wait for work or the end, and load; return what became of the last gradient."""
        while not isinstance(message := self._receive(), wire.Work):
            if not self._is_news(message):
                raise ProtocolError(f"expected work, got {message!r}")
            if isinstance(message, wire.Over):
                return message.seen
        self._load(message)
        self._work = message
        self._is_cancelled = self._was_cut = False
        self._work_began = monotonic()
        if self._times is not None:
            if self._channel.is_local:  # so both have one clock: our own delays are part of it
                self._work_began = max(message.asked_at, self._joined_at)
            self._due_at = self._work_began + self._times.take(self._work_began - self._joined_at)
        return message.seen

    def _load(self, message: wire.Work | wire.Over) -> None:
        """Have the version that lies in this place, and be where the server's settings are."""
        if message.place_is_new:
            region = self._map(self._replica.place_bytes, writable=False)
            self._replica.take_place(message.place, region)
        self._replica.load(message.place)
        self.version = message.version
        options = message.options if isinstance(message, wire.Work) else ()
        moved = bool(options)
        for i, steps in enumerate(message.steps):
            if steps > self._steps[i]:
                for scheduler in self._schedulers[i]:
                    advance(scheduler, steps - self._steps[i])
                    moved = True
            self._steps[i] = steps
        for option in options:
            set_option(self._optimizers, option)
        if moved:
            self._options.read()

    def _map(self, size: int, writable: bool) -> Region:
        """Map the memory that came along with a message."""
        fd = self._channel.take_fd()
        try:
            return Region(fd, size, writable=writable)
        finally:
            os.close(fd)

    def _receive(self) -> wire.FromServer:
        try:
            message = self._channel.receive()
        except PeerLost as error:
            raise PeerLost(f"worker {self.number} has lost the server: {error}") from None
        if isinstance(message, wire.Refused):
            raise ProtocolError(f"the server refuses worker {self.number}: {message.reason}")
        return message

    def _send(self, message: object, *fds: int) -> None:
        try:
            self._channel.send(message, *fds)
        except PeerLost as error:
            raise PeerLost(f"worker {self.number} has lost the server: {error}") from None

    # ------------------------------------------------------------------------------------- state

    def optimizer_state(self, optimizer: int) -> dict[str, Any]:
        """The state of the optimizer on the server."""
        state: dict[str, Any] = self._ask_for(wire.StateWanted("optimizer", optimizer))
        return state

    def load_optimizer_state(self, optimizer: int, state: dict[str, Any]) -> None:
        """Load a state into the optimizer on the server."""
        tree, fd = pack(state, "state of the optimizer")
        try:
            self._send(wire.StateGiven(optimizer, tree), fd)
        finally:
            os.close(fd)
        groups = self._optimizers[optimizer].param_groups
        for group, given in zip(groups, state["param_groups"], strict=True):
            group.update({name: value for name, value in given.items() if name != "params"})
        self._options.read()

    def averages(self) -> list[list[Tensor]]:
        """The moving average of the parameters, by optimizer."""
        averages: list[list[Tensor]] = self._ask_for(wire.StateWanted("average"))
        return averages

    def _ask_for(self, wanted: wire.StateWanted) -> Any:
        self._send(wanted)
        while not isinstance(message := self._receive(), wire.State):
            if not self._is_news(message):
                raise ProtocolError(f"expected a state, got {message!r}")
        tree_fd = self._channel.take_fd()
        with open(tree_fd, "rb") as tree:
            body = tree.read(message.tree_bytes)
        fd = self._channel.take_fd()
        try:
            return unpack(body, fd)
        finally:
            os.close(fd)


def _connect(who: Identity) -> Channel[wire.FromServer]:
    """Reach the server, which may still be starting."""
    token, pause_s, began, is_said = who.token(), 0.01, monotonic(), False
    while True:
        try:
            return connect(who.address, token)
        except PeerLost:
            waited_s = monotonic() - began
            if waited_s > CONNECT_PATIENCE_S:
                raise
        if waited_s > SILENCE_S and not is_said:
            print(f"waiting for a server at {who.address}", file=sys.stderr, flush=True)
            is_said = True
        sleep(pause_s)
        pause_s = min(0.5, pause_s * 1.5)
