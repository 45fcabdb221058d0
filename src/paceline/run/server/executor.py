# SPDX-License-Identifier: BSD-3-Clause
"""Perform what the core decided: the shard works on tensors, everything else is a message.

The executor performs actions in order and returns their results. It decides nothing and receives
nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
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
from paceline.leases import Use
from paceline.run.net import messages
from paceline.run.server.checkpoint import Saved
from paceline.run.server.checkpointer import Checkpointer
from paceline.run.server.other_servers import PartFailed
from paceline.run.server.progress import Progress
from paceline.run.server.roster import Peer, Roster
from paceline.run.server.run_failure import RunFailure
from paceline.run.server.same_gradients import SameGradients
from paceline.run.server.scalar_averages import ScalarAverages
from paceline.run.server.script_settings import ScriptSettings
from paceline.run.server.timers import RunClock, Timers
from paceline.run.server.version_maker import VersionMaker
from paceline.run.settings import Settings
from paceline.run.tensors.finite_check import first_spoiled
from paceline.run.tensors.shard import Shard
from paceline.run.tensors.sums import SlotGradient
from paceline.trace.event_records import Made
from paceline.trace.schema import FINISHED, STOPPED, Ended

__all__ = ["Executor", "Performed", "RunParts"]


@dataclass(frozen=True)
class RunParts:
    """What the server and its executor both work with."""

    settings: Settings
    decider: Decider
    shard: Shard
    checkpointer: Checkpointer
    roster: Roster
    failures: RunFailure
    progress: Progress
    timers: Timers
    clock: RunClock


@dataclass(slots=True)
class Performed:
    """One event whose actions are performed, and their results."""

    time: float
    version: int  # before the event
    report: messages.GradientReport | None  # that caused the event, if one did
    actions: list[Action]
    leases: dict[int, list[Use]] | None = None  # for workers that get a turn; None: not dealt yet
    made: dict[int, Made] = field(default_factory=dict)  # by update
    end: Ended | None = None  # not None iff the run has ended


class Executor:
    """Performs actions, in their order."""

    def __init__(self, parts: RunParts, began: float | None, updated: float | None) -> None:
        """`began`, `updated`: when the first update was begun, and the last one made, if ever."""
        self._settings = parts.settings
        self._decider = parts.decider
        self._shard = parts.shard
        self._checkpointer = parts.checkpointer
        self._roster = parts.roster
        self._failures = parts.failures
        self._progress = parts.progress
        self._timers = parts.timers
        self._clock = parts.clock
        self._book = parts.decider.leases
        self.script_settings = ScriptSettings(
            parts.shard, parts.decider.ledger, parts.progress, parts.failures
        )
        self._versions = VersionMaker(
            parts.shard, parts.roster, parts.failures, parts.progress, parts.settings.clip_norm
        )
        self._began = began
        self._updated = updated
        self._samples = 0  # in the updates made so far
        self._scalars = ScalarAverages()
        self._same_gradients = SameGradients(parts.settings.spec.workers)
        self._first = parts.shard.version  # needs no saving; -1: its state was changed since
        self._has_failed = False  # an update was made in part only, or the last one isn't finite
        self._is_over = False
        self.is_complete = False  # a script has ended the run: it is finished, whatever its goal
        self._handlers: dict[type[Action], Callable[[Any, Performed], None]] = {
            Accept: self._accept,
            Drop: self._drop,
            ApplyUpdate: self._apply_update,
            SendParams: self._send_params,
            Cancel: self._cancel,
            StartTimer: lambda action, _: self._timers.start(action.timer, action.at),
            Pause: lambda action, _: self._progress.say(f"paused: {action.reason}"),
            Resume: self._resume,
            Finish: self._finish,
        }

    def perform(
        self,
        actions: list[Action],
        time: float,
        version: int,
        report: messages.GradientReport | None = None,
    ) -> Performed:
        """Perform the actions on an event; return their results.

        `version`: before the event. `report`: the report that caused the event, if any.
        """
        performed = Performed(time, version, report, actions)
        for action in actions:
            self._handlers[type(action)](action, performed)
        return performed

    # -------------------------------------------------------------------------- gradients' fates

    def _accept(self, action: Accept, performed: Performed) -> None:
        report, peer = performed.report, self._roster[action.worker]
        assert report is not None
        staleness = action.update - 1 - action.version
        notice = messages.FateNotice(Fate.ACCEPTED, action.version, staleness, 0)
        self._roster.set_fate(peer, notice, action.update)
        self._scalars.give(action.update, action.samples, report.scalars)
        gradient = SlotGradient(
            action.worker,
            report.optimizer,
            action.samples,
            action.scale,
            frozenset(report.unused),
            *peer.end.delivered(report),
        )
        self._shard.add(action.update, gradient)
        if self._same_gradients.is_watching:
            needed = self._decider.policy.needed(self._decider.ledger)
            if warning := self._same_gradients.note(action.worker, report, needed):
                self._progress.say(warning)
        self._book.accept(action.worker, report.uses, action.update)

    def _drop(self, action: Drop, performed: Performed) -> None:
        staleness = performed.version - action.version
        notice = messages.FateNotice(action.fate, action.version, staleness, 0)
        self._roster.set_fate(self._roster[action.worker], notice, None)
        if action.fate is Fate.NON_FINITE:
            self._failures.count_refusal(len(self._roster.active))
            self._progress.refused(action.worker)

    # ----------------------------------------------------------------------------------- updates

    def _apply_update(self, action: ApplyUpdate, performed: Performed) -> None:
        self._updated = performed.time
        self._samples += action.new_samples
        self._book.apply(action.update)
        began = self._clock.now()
        try:
            sq_norm = self._versions.make(action)
        except PartFailed as error:
            self._shard.skip(action.update)
            self.fail(str(error))
            return
        except Exception as error:  # raised by the script's own optimizer or scheduler, say
            print_exc()
            self._shard.skip(action.update)
            self.fail(f"update {action.update} failed: {error!r}")
            return
        apply_s = self._clock.now() - began
        for contribution in action.contributions:
            count = len(action.contributions)
            self._roster.count_contributors(contribution.worker, action.update, count)
        scalars = self._scalars.take(action.update)
        performed.made[action.update] = Made(sq_norm, apply_s, scalars, skipped=sq_norm is None)
        givers = inf if self._decider.policy.repeats else len(self._roster.active)
        self._progress.updated(action, givers, scalars)
        self._fail_if_spoiled()
        if self._checkpointer.is_due(action.update, performed.time):
            self._save(performed.time)

    def sum_early(self) -> None:
        """Add arrived gradients to the sum of the next update, while the server is idle."""
        ledger = self._decider.ledger
        limit: float = inf
        if self._decider.policy.needed(ledger) >= len(ledger.members):
            # The update takes every worker, so add in worker order: runs repeat bit for bit.
            limit = min((w for w, m in ledger.members.items() if m.work), default=inf)
        self._shard.sum_early(self._shard.version + 1, limit)

    # ----------------------------------------------------------------------------------- workers

    def _send_params(self, action: SendParams, performed: Performed) -> None:
        peer = self._roster[action.worker]
        self._shard.release_slot(action.worker)
        optimizer = self._shard.loads_only(peer.optimizer)
        buffer = self._shard.add_reader(action.worker, action.version, optimizer)
        assignment = messages.Assignment(
            turn=action.turn,
            version=action.version,
            buffer=buffer.number,
            scheduler_steps=self._shard.schedules.steps,
            asked_at=self._clock.monotonic_at(performed.time),
            optimizer=optimizer,
            options=self.script_settings.options_since(peer.options_known),
            notice=peer.notice,
            position_wanted=self._checkpointer.wants_position(action.worker),
            epochs=self._shard.schedules.epochs,
            stream_samples=self._book.done,
            leases=tuple(self._deal(performed)[action.worker]),
            forget_leases=self._roster.give_leases(peer),
        )
        self._roster.begin_turn(peer, performed.time, self.script_settings.edition)
        self._roster.publish(peer, assignment, buffer)

    def _deal(self, performed: Performed) -> dict[int, list[Use]]:
        """Return the batches that go to each worker with its turn; deal them first."""
        if performed.leases is None:
            wanted = {}
            for action in performed.actions:
                if type(action) is SendParams:
                    peer = self._roster[action.worker]
                    wanted[peer.worker] = peer.wanted
                    if not peer.holds_leases:
                        self._book.release(peer.worker)
            performed.leases = self._book.deal(wanted)
        return performed.leases

    def _cancel(self, action: Cancel, performed: Performed) -> None:
        del performed
        peer = self._roster[action.worker]
        if self._settings.spec.late == "cancel" and peer.asked_at is not None:
            self._roster.attempt(peer, partial(peer.end.cancel, action.turn))

    def send_end(self, peer: Peer) -> None:
        """Tell a worker that the run has ended, and give it the last version."""
        buffer = self._shard.newest
        message = messages.RunEnded(
            version=self._shard.version,
            buffer=buffer.number,
            scheduler_steps=self._shard.schedules.steps,
            notice=peer.notice,
            position_wanted=self._checkpointer.wants_position(peer.worker),
            epochs=self._shard.schedules.epochs,
            stream_samples=self._book.done,
        )
        self._roster.clear_notice(peer)
        self._roster.publish(peer, message, buffer)

    # --------------------------------------------------------------------------- begin, save, end

    def _resume(self, action: Resume, performed: Performed) -> None:
        del action
        self._began = performed.time if self._began is None else self._began
        self._progress.begin()

    def _finish(self, action: Finish, performed: Performed) -> None:
        unused = tuple(c.worker for c in action.unused)
        self._has_failed = self._has_failed or self._is_last_spoiled(action.version)
        self._versions.check_end(action.version)
        reason, data = self._reason_of_end(action.version), self._book.plain()
        self._is_over = True
        performed.end = Ended(performed.time, action.version, unused, reason, data)
        took_s = 0.0
        if self._began is not None and self._updated is not None:
            took_s = self._updated - self._began
        self._progress.end(action.version, self._samples, took_s)

    def end_run(self, end: Ended) -> None:
        """Save the last version, then tell the workers; call it when the trace has the event."""
        if not self._has_failed and end.version > self._first:
            here = [peer.worker for peer in self._roster.active]
            self._checkpointer.save_last(self._saved(), here, end.t)
        elif not self._has_failed and end.version:  # it was saved before, but perhaps not exported
            self._checkpointer.export()
        for peer in self._roster.members:  # parked ones too: the run waits for them
            self.send_end(peer)

    def _is_last_spoiled(self, version: int) -> bool:
        """Return whether the last version can't be used; if so, the run fails.

        It may contain NaN or infinity, or another server has failed to make it.
        """
        try:
            what = first_spoiled(self._shard.state_dict())
        except PartFailed as error:
            self.fail(str(error))
            return True
        if not what:
            return False
        reason = self._checkpointer.describe(version, what)
        if self._failures.failure:  # for another reason, but the user should know this
            self._progress.say(reason)
        self._failures.fail(reason)
        return True

    def fail(self, reason: str) -> None:
        """End the run as a failure, and don't save what only a part of the servers has made."""
        self._has_failed = True
        self._failures.fail(reason)

    def _fail_if_spoiled(self) -> None:
        """Fail the run if a version that was to be saved contains NaN or infinity."""
        if self._checkpointer.spoiled:
            self._failures.fail(self._checkpointer.spoiled)

    def _reason_of_end(self, version: int) -> str:
        """Return the reason to record for an end at this version."""
        if self._failures.failure:
            return self._failures.failure
        spec = self._settings.spec
        has_steps = spec.steps is not None and version >= spec.steps
        has_samples = spec.samples is not None and self._samples >= spec.samples
        return FINISHED if has_steps or has_samples or self.is_complete else STOPPED

    def load_optimizer_state(self, index: int, state: Any) -> None:
        """Load the state of an optimizer, and save it soon; raises ProtocolError."""
        self._shard.load_optimizer_state(index, state)
        if not self._is_over:
            self._first = -1
            self._checkpointer.hasten()

    def save_if_overdue(self, time: float) -> None:
        """Save the current version if that is due, although no update is made."""
        self._fail_if_spoiled()
        version = self._shard.version
        if version > self._first and self._checkpointer.is_overdue(version, time):
            self._save(time)

    def _save(self, time: float) -> None:
        """Save this version; a run that continues from it computes the current turns again.

        That includes turns whose gradients were accepted for an update that isn't made yet. Their
        workers wait, and still know where these turns began.
        """
        if self._has_failed or self._decider.ledger.finished:  # `end_run` saves the last version
            return
        try:
            saved = self._saved()
        except PartFailed as error:
            self.fail(str(error))
            return
        to_ask = {p.worker: p for p in self._roster.active if self._computes_again(p)}
        idle = [peer.worker for peer in self._roster.active if peer.worker not in to_ask]
        if self._checkpointer.save(saved, idle, to_ask.keys(), time):
            for peer in to_ask.values():
                self._roster.send(peer, messages.PositionRequest(self._checkpointer.checkpoint))

    def _computes_again(self, peer: Peer) -> bool:
        """Return whether the worker's last turn isn't part of this version."""
        is_pending = peer.update is not None and peer.update > self._shard.version
        return peer.asked_at is not None or is_pending

    def _saved(self) -> Saved:
        return Saved(
            version=self._shard.version,
            samples=self._samples,
            data=self._book.plain(),
            options=self.script_settings.saved(),
            memory=self._decider.policy.plain_memory(self._decider.ledger.memory),
            shard=self._shard.state_dict(),
            positions={},
            skipped=self._versions.skipped,
        )

    def restore(self, saved: Saved) -> None:
        """Continue from a checkpoint; the shard has loaded it already."""
        self._samples = saved.samples
        self._versions.skipped = saved.skipped
        self._book.restore(saved.data)
        self.script_settings.restore(saved.options)
        self._progress.restored(saved.version, saved.samples)
