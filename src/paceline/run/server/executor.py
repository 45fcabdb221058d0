# SPDX-License-Identifier: BSD-3-Clause
"""Does what was decided: tensors by the shard, everything else by a message.

Nothing is decided here, and nothing is heard.
"""

from collections.abc import Callable
from math import inf
from traceback import print_exc
from typing import Any

from paceline.core.decider import Decider
from paceline.core.events import (
    Accept,
    Action,
    ApplyUpdate,
    Cancel,
    Drop,
    Fate,
    Finish,
    Pause,
    Resume,
    SendParams,
    StartTimer,
)
from paceline.run.net import messages
from paceline.run.server.checkpoint import Saved
from paceline.run.server.checkpointer import Checkpointer
from paceline.run.server.goal import Goal
from paceline.run.server.progress import Progress
from paceline.run.server.roster import Roster
from paceline.run.server.scalars import Scalars
from paceline.run.server.timers import Timers
from paceline.run.settings import Settings
from paceline.run.tensors.shard import Shard
from paceline.run.tensors.sums import SlotGradient
from paceline.trace.records import Made
from paceline.trace.schema import FINISHED, Ended

__all__ = ["Executor"]


class Executor:
    """Performs actions, in their order."""

    def __init__(
        self, settings: Settings, decider: Decider, shard: Shard, checkpointer: Checkpointer
    ) -> None:
        self.roster = Roster(settings, shard)
        self.goal = Goal(settings.samples, settings.spec.steps)
        self.progress = Progress(settings)
        self.timers = Timers()
        self.end: Ended | None = None
        self.began: float | None = None  # when the first update was begun; None: none was
        self.updated: float | None = None  # when the last update was made; None: none was
        self._settings = settings
        self._decider = decider
        self._shard = shard
        self._checkpointer = checkpointer
        self._scalars = Scalars()
        self._first = shard.version  # there is no need to save it; -1: there is, for it was changed
        self._is_spoilt = False  # an update has failed half-way
        self._handlers: dict[type[Action], Callable[[Any, float], None]] = {
            ApplyUpdate: self._apply,
            Cancel: self._cancel,
            StartTimer: lambda action, _: self.timers.start(action.timer, action.at),
            Pause: lambda action, _: self.progress.say(f"paused: {action.reason}"),
            Resume: self._resume,
            Finish: self._finish,
        }

    def perform(
        self,
        actions: list[Action],
        time: float,
        version: int,
        gradient: messages.GradientReport | None,
    ) -> dict[int, Made]:
        """Do everything but sending parameters; return what the updates were like.

        `version`: before the event. `gradient`: what it told of, if it did.
        """
        made: dict[int, Made] = {}
        self._made = made
        for action in actions:
            if isinstance(action, Accept) and gradient is not None:
                self._accept(action, gradient)
            elif isinstance(action, Drop):
                self._drop(action, version)
            elif not isinstance(action, SendParams):
                self._handlers[type(action)](action, time)
        return made

    def _accept(self, action: Accept, gradient: messages.GradientReport) -> None:
        peer = self.roster.members[action.worker]
        assert peer.slot is not None
        staleness = action.update - 1 - action.version
        peer.seen = messages.FateNotice(Fate.ACCEPTED, action.version, staleness, 0)
        peer.given_to = action.update
        self._scalars.give(action.update, gradient.samples, gradient.scalars)
        piece = SlotGradient(
            action.worker,
            gradient.optimizer,
            gradient.samples,
            self._decider.policy.scale(staleness),
            frozenset(gradient.unused),
            peer.slot,
        )
        self._shard.give(action.update, piece)

    def _drop(self, action: Drop, version: int) -> None:
        peer = self.roster.members[action.worker]
        peer.seen = messages.FateNotice(action.fate, action.version, version - action.version, 0)
        peer.given_to = None
        if action.fate is Fate.NON_FINITE:
            self.goal.refused(len(self.roster.active))
            self.progress.refused(action.worker)

    def _resume(self, action: Resume, time: float) -> None:
        del action
        self.began = time if self.began is None else self.began
        self.progress.begin()

    def _apply(self, action: ApplyUpdate, time: float) -> None:
        self.updated = time
        self.goal.updated(sum(c.samples for c in action.contributions))
        try:
            applied = self._shard.apply(action.update)
        except Exception as error:  # of an optimizer or a scheduler, say, which are the script's
            print_exc()
            self._is_spoilt = True
            self.goal.fail(f"update {action.update} could not be made: {error!r}")
            return
        for contribution in action.contributions:
            peer = self.roster.members.get(contribution.worker)
            if peer is not None and peer.seen is not None and peer.given_to == action.update:
                count = len(action.contributions)
                peer.seen = messages.FateNotice(
                    Fate.ACCEPTED, peer.seen.version, peer.seen.staleness, count
                )
        scalars = self._scalars.take(action.update)
        sq_norm = applied.sq_norm if applied.is_sound else None
        self._made[action.update] = Made(sq_norm, applied.apply_s, scalars)
        if not applied.is_sound:
            self.progress.say(f"update {action.update} was not finite: nothing was stepped")
        repeats = self._decider.policy.repeats
        self.progress.updated(action, inf if repeats else len(self.roster.active), scalars)
        if self._checkpointer.is_due(action.update, time):
            self._save(time)

    def load_state(self, index: int, state: Any) -> None:
        """Load the state of an optimizer, which nobody will give again; raises ProtocolError."""
        self._shard.load_state(index, state)
        if self.end is None:
            self._first = -1
            self._checkpointer.hasten()

    def save_overdue(self, time: float) -> None:
        """Save what was given to us, unless there are gradients that are of no version yet."""
        tallies = self._decider.ledger.tallies.values()
        if self._checkpointer.is_overdue and not any(tally.contributions for tally in tallies):
            self._save(time)

    def send_params(self, action: SendParams, time: float, clock: float) -> None:
        """Let a worker compute; `clock`: the same time by the clock of this machine."""
        self._shard.free_slot(action.worker)
        self.roster.members[action.worker].asked_at = time
        place_wanted = self._checkpointer.wants_place(action.worker)
        self.roster.send_work(action, clock, place_wanted)

    def _cancel(self, action: Cancel, time: float) -> None:
        del time
        peer = self.roster.members[action.worker]
        if self._settings.spec.late == "cancel" and peer.asked_at is not None:
            self.roster.send(peer, messages.CancelTurn(action.turn))

    def _finish(self, action: Finish, time: float) -> None:
        unused = tuple(c.worker for c in action.unused)
        self.end = Ended(time, action.version, unused, self.goal.reason(action.version))
        took_s = 0.0 if self.began is None or self.updated is None else self.updated - self.began
        self.progress.end(action.version, self.goal.samples, took_s)
        if action.version > self._first and not self._is_spoilt:
            here = [worker for worker, peer in self.roster.members.items() if not peer.is_parked]
            self._checkpointer.save_last(self._saved(), here, time)
        elif self.end.reason == FINISHED:  # a server before us may have been killed at this place
            self._checkpointer.export()
        for worker, peer in self.roster.members.items():  # the stopped ones too: it waits for them
            self.roster.send_over(peer, self._checkpointer.wants_place(worker))

    def _save(self, time: float) -> None:
        """Save this version; what a worker computes now is lost with what comes after it."""
        if self._is_spoilt or self._decider.ledger.finished:  # the last one is saved in another way
            return
        here = {worker: peer for worker, peer in self.roster.members.items() if not peer.is_parked}
        busy = [worker for worker, peer in here.items() if peer.asked_at is not None]
        if self._checkpointer.save(self._saved(), set(here) - set(busy), busy, time):
            for worker in busy:
                self.roster.send(
                    here[worker], messages.PositionRequest(self._checkpointer.checkpoint)
                )

    def _saved(self) -> Saved:
        return Saved(
            version=self._shard.version,
            samples=self.goal.samples,
            options=self.roster.options.saved(),
            memory=self._decider.policy.plain_memory(self._decider.ledger.memory),
            shard=self._shard.saved(),
            places={},
        )

    def restore(self, saved: Saved) -> None:
        """Go on from there; the shard is there already."""
        self.goal.samples = saved.samples
        self.roster.options.restore(saved.options)
        self.progress.restored(saved.version)
