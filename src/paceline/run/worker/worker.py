# SPDX-License-Identifier: BSD-3-Clause
"""A worker's side of a run: join, push, wait, load.

A push is one short message, for the gradient lies in the slot already; the answer says what became
of it and where the next version lies. Between the two the worker waits. While it computes, the
server may say that what it computes is of no use any more, or that the run is over: it looks for
that during `backward`, during an injected delay, and before it pushes.

If the server is lost, the worker waits for the next one and returns to its saved data position.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from time import monotonic
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from paceline.core.events import Fate
from paceline.errors import PeerLost, ProtocolError
from paceline.latency import parse_latency
from paceline.run.launch.environment import Identity
from paceline.run.net import messages
from paceline.run.tensors.group_options import KnownOptions, set_option
from paceline.run.tensors.layout import TrainingState
from paceline.run.tensors.state import pack, unpack
from paceline.run.tensors.state_spec import OptionChange
from paceline.run.worker.connection import ServerConnection
from paceline.run.worker.data import Batches
from paceline.run.worker.logged_scalars import LoggedScalars
from paceline.run.worker.position import PositionTracker
from paceline.run.worker.replica import Replica
from paceline.run.worker.schedule import advance

__all__ = ["Last", "Worker"]

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
        self,
        who: Identity,
        common: TrainingState,
        schedulers: Sequence[LRScheduler],
        replica: Replica,
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
        self._link = ServerConnection(who, common.contents, replica)
        self.welcome = self._link.join()
        self._channel = self._link.channel
        self._joined_at = monotonic()
        self._is_lost = False  # the server is
        self._is_void = False  # our work is, for it is of a server that was lost
        self._work: messages.Assignment | None = (
            None  # None: we wait, or were told of the end while we did
        )
        self._next: messages.Assignment | None = None  # came while we waited for something else
        self._work_began = self._joined_at
        self._is_cancelled = False  # the server said that this work is of no use
        self._may_cut = False  # we are in `backward`
        self._was_cut = False  # it ended early
        self._glanced_at = 0.0
        self._place_wanted = 0  # for this checkpoint, when the present wait is over; 0: for none
        slow, seed = self.welcome.slow, self.welcome.seed
        self._times = parse_latency(slow).stream(self.number, seed) if slow else None
        self._due_at = 0.0  # before this, the gradient must not arrive
        self._scalars = LoggedScalars()
        self.position = PositionTracker()
        self.position.go_to(self.welcome.place)

    def begin(self) -> None:
        """Wait for the run to begin, and load."""
        self._replica.on_gradients(self._on_gradient)
        self.position.note()
        self._get_work()
        self._note_place()

    # ----------------------------------------------------------------------------------- pushing

    def push(self, optimizer: int) -> None:
        """Give what was computed to the server, wait as the rule says, load what it answers."""
        if self._work is None:
            return
        work = self._work
        self.batches.hand_in(optimizer)
        try:
            if not (self._is_lost or self._is_void):
                self._report(work, optimizer)
        except PeerLost:
            self._is_lost = True
        self._work = None
        waits_from = monotonic()
        seen = self._get_work()
        if seen is None:  # it was void, or the end came before an answer
            seen = messages.FateNotice(
                Fate.LATE, work.version, max(0, self.version - work.version), 0
            )
        waited_s = monotonic() - waits_from
        self.last = Last(seen.fate, seen.version, seen.staleness, seen.contributors, waited_s)
        self.batches.settle(optimizer, seen.fate)
        self._scalars.settle(seen.fate)
        # Who is stopped in the middle of its work was last where that began.
        self._note_place(is_new=not self.is_over or seen.fate is Fate.ACCEPTED)

    def _report(self, work: messages.Assignment, optimizer: int) -> None:
        """Say what has come of the work; raises PeerLost."""
        options = tuple(self._options.changed())
        report: messages.GradientReport | messages.AbandonReport | None = self._gradient(
            work, optimizer, options
        )
        if report is None or not self._wait_until_due():
            report = self._of_no_use(work, optimizer, options)
        self._hand_over(report)

    def _gradient(
        self, work: messages.Assignment, optimizer: int, options: tuple[OptionChange, ...]
    ) -> messages.GradientReport | None:
        """See that the gradient is in the slot, and announce it; None if it is of no use."""
        if self._was_cut or self._is_useless():
            return None
        with torch.no_grad():
            unused, sq_norm = self._replica.collect(optimizer)
        return messages.GradientReport(
            work.turn,
            work.version,
            optimizer,
            self.batches.samples(optimizer),
            max(monotonic(), self._due_at) - self._work_began,
            sq_norm if isfinite(sq_norm) else None,
            unused,
            options,
            self._scalars.hand_in(),
        )

    def _wait_until_due(self) -> bool:
        """Let the gradient take as long as it is to take; whether it is of use after that."""
        while self._channel.wait_readable(max(0.0, self._due_at - monotonic())):
            self._read_news()
            if self._is_cancelled:
                return False
        return True

    def _of_no_use(
        self, work: messages.Assignment, optimizer: int, options: tuple[OptionChange, ...]
    ) -> messages.GradientReport | messages.AbandonReport:
        """Report on work that is of no use any more, and whether it was brought to its end."""
        now = monotonic()
        compute_s = now - self._work_began
        if self._was_cut or now < self._due_at:
            return messages.AbandonReport(work.turn, compute_s, work.version, options)
        known = (work.turn, work.version, optimizer, self.batches.samples(optimizer), compute_s)
        return messages.GradientReport(*known, None, options=options, cancelled=True)

    def _hand_over(self, report: messages.GradientReport | messages.AbandonReport) -> None:
        """Send the report; that nobody is there to take it is no matter once the run is over."""
        try:
            self._link.send(report)
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
            self._scalars.log(name, float(value.item() if isinstance(value, Tensor) else value))

    # ----------------------------------------------------------------------------------- hearing

    def _is_useless(self) -> bool:
        """Whether the server has cancelled this turn; looks now and then only."""
        now = monotonic()
        if now - self._glanced_at > GLANCE_S:
            self._glanced_at = now
            try:
                while not self._is_lost and self._channel.wait_readable(0.0):
                    self._read_news()
            except PeerLost:
                self._is_lost = self._is_cancelled = True
        return self._is_cancelled

    def _read_news(self) -> None:
        """Something came while we have work: it can only be that this is of no use."""
        message = self._link.receive()
        if not self._is_news(message):
            raise ProtocolError(f"expected no answer before a report, got {message!r}")

    def _is_news(self, message: messages.FromServer) -> bool:
        """Whether this is what the server may say at any moment; if so, take note of it."""
        if isinstance(message, messages.CancelTurn):
            # One that came too late, for work that was reported on, is harmless.
            self._is_cancelled |= self._work is not None and message.turn == self._work.turn
            return True
        if isinstance(message, messages.PositionRequest):
            self._tell_place(message.checkpoint)
            return True
        if isinstance(message, messages.RunEnded):
            self._is_cancelled = self.is_over = True
            self._load(message)
            self._replica.part()
            if message.place_wanted and self._work is not None:
                self._tell_place(message.place_wanted)  # what we compute comes to nothing
            else:
                self._place_wanted = message.place_wanted
            return True
        return False

    def _get_work(self) -> messages.FateNotice | None:
        """Wait for work or the end, from this server or from the next one, and load.

        Returns what became of the last gradient, None if nobody knows.
        """
        while not self.is_over:
            if self._is_lost:
                self._join_again()
            with suppress(PeerLost):
                return self._wait_for_work()
            self._is_lost = True
        return None

    def _join_again(self) -> None:
        """Find the next server, and be where it begins; raises PeerLost if there is none."""
        self.welcome = self._link.join()
        self._channel = self._link.channel
        self._is_lost = False
        self._next = None  # what there may be is from the server that was lost
        self.position.go_to(self.welcome.place)

    def _wait_for_work(self) -> messages.FateNotice | None:
        while not isinstance(message := self._next or self._link.receive(), messages.Assignment):
            if not self._is_news(message):
                raise ProtocolError(f"expected work, got {message!r}")
            if isinstance(message, messages.RunEnded):
                return message.seen
        self._next = None
        self._load(message)
        self._work = message
        self._place_wanted = message.place_wanted
        self._is_cancelled = self._was_cut = self._is_void = False
        self._work_began = monotonic()
        if self._times is not None:
            if self._channel.is_local:  # so both have one clock: our own delays are part of it
                self._work_began = max(message.asked_at, self._joined_at)
            self._due_at = self._work_began + self._times.take(self._work_began - self._joined_at)
        return message.seen

    def _load(self, message: messages.Assignment | messages.RunEnded) -> None:
        """Have the version that lies in this place, and be where the server's settings are."""
        self._take_place(message)
        self._replica.load(message.place)
        self.version = message.version
        options = message.options if isinstance(message, messages.Assignment) else ()
        moved = bool(options)
        for i, steps in enumerate(message.steps):
            if steps > self._steps[i]:
                for scheduler in self._schedulers[i]:
                    advance(scheduler, steps - self._steps[i])
                    moved = True
                self._steps[i] = steps  # a server that was restored may be behind: wait for it
        for option in options:
            set_option(self._optimizers, option)
        if moved:
            self._options.read()

    def _take_place(self, message: messages.Assignment | messages.RunEnded) -> None:
        """Map the memory that came along, if any did."""
        if message.place_is_new:
            region = self._link.map(self._replica.place_bytes, writable=False)
            self._replica.take_place(message.place, region)

    def _note_place(self, is_new: bool = True) -> None:
        """Our work begins here, for whoever asks later, or has asked."""
        if self.welcome.saves and is_new:
            self.position.note(thorough=bool(self._place_wanted))
        if self._place_wanted:
            self._tell_place(self._place_wanted)
            self._place_wanted = 0

    def _tell_place(self, checkpoint: int) -> None:
        with suppress(PeerLost):  # which is seen when it matters
            self._link.send(messages.PositionReport(checkpoint, self.position.tell()))

    # ------------------------------------------------------------------------------------- state

    def optimizer_state(self, optimizer: int) -> dict[str, Any]:
        """The state of the optimizer on the server."""
        state: dict[str, Any] = self._ask_for(messages.StateRequest("optimizer", optimizer))
        return state

    def load_optimizer_state(self, optimizer: int, state: dict[str, Any]) -> None:
        """Load a state into the optimizer on the server."""
        tree, fd = pack(state, "state of the optimizer")
        try:
            self._ask_for(messages.StateUpload(optimizer, tree, self.last is not None), fd)
        finally:
            os.close(fd)
        groups = self._optimizers[optimizer].param_groups
        for group, given in zip(groups, state["param_groups"], strict=True):
            group.update({name: value for name, value in given.items() if name != "params"})
        self._options.read()

    def averages(self) -> list[list[Tensor]]:
        """The moving average of the parameters, by optimizer."""
        averages: list[list[Tensor]] = self._ask_for(messages.StateRequest("average"))
        return averages

    def _ask_for(self, what: messages.StateRequest | messages.StateUpload, *fds: int) -> Any:
        """Ask this server, or the next one."""
        while True:
            try:
                return self._ask(what, *fds)
            except PeerLost:
                if self.is_over:
                    raise
                self._join_again()
                self._is_cancelled = self._is_void = True

    def _ask(self, what: messages.StateRequest | messages.StateUpload, *fds: int) -> Any:
        self._link.send(what, *fds)
        while not isinstance(message := self._link.receive(), messages.StateReply):
            if isinstance(message, messages.Assignment):
                self._take_place(message)
                self._next = msgspec.structs.replace(message, place_is_new=False)
            elif not self._is_news(message):
                raise ProtocolError(f"expected a state, got {message!r}")
        if not message.tree_bytes:  # ours was taken
            return None
        tree_fd = self._channel.take_fd()
        with open(tree_fd, "rb") as tree:
            body = tree.read(message.tree_bytes)
        fd = self._channel.take_fd()
        try:
            return unpack(body, fd)
        finally:
            os.close(fd)
