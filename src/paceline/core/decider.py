# SPDX-License-Identifier: BSD-3-Clause
"""Applies one policy to one run: events go in, actions come out.

Theory of operation
    The decider owns the ledger. It validates each event, records it in the ledger, and then
    *settles*: it makes every update that is due, cancels work that became useless, and assigns work
    to idle workers. This is the same for every rule; where rules differ, it asks the policy.

    A run starts paused. It begins when as many workers have joined as an update needs, even if some
    of them have left again; a worker that is known to be missing counts as joined. From then on the
    run never waits for a worker that is gone: an update takes those that are left. While the run is
    paused no worker gets work, but an update that has all its contributions is still made.

Rules for this module
    No clock, no random numbers, no tensors, no sockets, no logging: time comes with the events. An
    event is validated completely before the first change, so an illegal one changes nothing. A
    worker has at most one turn at a time. It gets the next one only after it has reported the last,
    and then always at the newest version that its rule allows.
"""

from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from typing import Any

from paceline.core.events import (
    Accept,
    Action,
    ApplyUpdate,
    Cancel,
    Contribution,
    Drop,
    Event,
    Fate,
    Finish,
    GradientArrived,
    Pause,
    Resume,
    SendParams,
    StartTimer,
    StopRequested,
    TimerFired,
    UpdateApplied,
    WorkAbandoned,
    WorkerJoined,
    WorkerLeft,
    WorkerMissing,
)
from paceline.core.invariants import invariants
from paceline.core.ledger import Ledger, Member, Origin, Tally, Work
from paceline.core.policy import Policy
from paceline.core.verdicts import can_update, judge
from paceline.errors import InternalError, ProtocolError
from paceline.leases import LeaseBook
from paceline.spec import RunSpec

__all__ = ["NOTHING", "Decider", "replay"]

NOTHING = Origin()


class Decider:
    """Applies one policy to one run: `handle(event)` returns the actions to perform."""

    HISTORY_LENGTH = 20  # events that an InternalError lists

    def __init__(self, policy: Policy, spec: RunSpec, origin: Origin = NOTHING) -> None:
        policy.validate(spec)
        self.policy = policy
        self.leases = LeaseBook(())  # a shell whose runs have data replaces it
        self.ledger = Ledger(
            spec=spec,
            memory=policy.recall(spec, origin.memory),
            version=origin.version,
            samples=origin.samples,
            oldest=origin.version,
            turns=dict(origin.turns),
            last=None if spec.steps is None else max(spec.steps, origin.version),
        )
        if self.ledger.has_enough_samples:
            self.ledger.last = origin.version
        # Shells report applied updates only to rules that learn from them.
        self.learns_from_updates = type(policy).observe_update is not Policy.observe_update
        self._history: deque[Event] = deque(maxlen=self.HISTORY_LENGTH)
        self._handlers: dict[type[Event], Callable[[Any], list[Action]]] = {
            WorkerJoined: self._on_worker_joined,
            WorkerLeft: self._on_worker_left,
            WorkerMissing: self._on_worker_missing,
            GradientArrived: self._on_gradient_arrived,
            WorkAbandoned: self._on_work_abandoned,
            TimerFired: self._on_timer_fired,
            UpdateApplied: self._on_update_applied,
            StopRequested: self._on_stop_requested,
        }

    def handle(self, event: Event) -> list[Action]:
        """Record the event and decide. Raise `ProtocolError`, and change nothing, if illegal."""
        handler = self._handlers.get(type(event))
        if handler is None:
            raise ProtocolError(f"expected an event, got {event!r}")
        if not self.ledger.now <= event.time < inf:  # also refuses NaN
            raise ProtocolError(
                f"time must be finite and not before {self.ledger.now}, got {event!r}"
            )
        actions = handler(event)
        self.ledger.now = event.time
        self._history.append(event)
        self._settle(actions)
        return actions

    def would_accept(self, worker: int) -> bool:
        """Return whether the gradient that this worker computes would count if it arrived now."""
        member = self.ledger.members.get(worker)
        if member is None or member.work is None:
            return False
        return judge(self.policy, self.ledger, member.work) is Fate.ACCEPTED

    # --------------------------------------------------------------------- recording an event

    def _on_worker_joined(self, event: WorkerJoined) -> list[Action]:
        ledger, worker = self.ledger, event.worker
        if worker in ledger.members:
            raise ProtocolError(f"worker {worker} has already joined: {event!r}")
        ledger.members[worker] = Member(turn=ledger.turns.get(worker, 0))
        ledger.idle[worker] = None
        if not ledger.begun:
            ledger.joined.add(worker)
        # It may have contributed to an update that isn't made yet, died, and come back.
        for tally in ledger.tallies.values():
            if any(c.worker == worker for c in tally.contributions):
                tally.done.add(worker)
        self.policy.welcome(ledger, worker)
        return []

    def _on_worker_left(self, event: WorkerLeft) -> list[Action]:
        self._member(event.worker, event)
        ledger = self.ledger
        del ledger.members[event.worker]
        ledger.idle.pop(event.worker, None)
        for tally in ledger.tallies.values():
            tally.done.discard(event.worker)
            tally.excused.discard(event.worker)
        return []

    def _on_worker_missing(self, event: WorkerMissing) -> list[Action]:
        if event.worker in self.ledger.members:
            raise ProtocolError(f"worker {event.worker} has joined: {event!r}")
        if not self.ledger.begun:
            self.ledger.joined.add(event.worker)
        return []

    def _on_gradient_arrived(self, event: GradientArrived) -> list[Action]:
        member, work = self._reported(event)
        if event.samples < 1:
            raise ProtocolError(f"samples must be >= 1: {event!r}")
        if event.new_samples is not None and not 0 <= event.new_samples <= event.samples:
            raise ProtocolError(f"new_samples must be between 0 and samples: {event!r}")
        if event.sq_norm is not None:
            _check_norm(event)
        if work is not None and event.version != work.version:
            raise ProtocolError(f"the worker was asked for version {work.version}: {event!r}")
        if work is None:
            return [Drop(event.worker, event.version, Fate.DUPLICATE)]
        ledger, worker = self.ledger, event.worker
        self._release(worker, member, event, whole=True)
        fate = judge(self.policy, ledger, work)
        if fate is Fate.ACCEPTED:
            update = ledger.destination(work)
            tally = ledger.tally(update)
            if event.finite:
                scale = self.policy.scale(update - 1 - event.version)
                given = Contribution(
                    worker, event.version, event.samples, scale, event.sq_norm, event.new_samples
                )
                tally.add(given)
                return [Accept(worker, event.version, update, event.samples, scale)]
            if worker not in tally.done:  # under a rule that repeats it may have contributed
                tally.excused.add(worker)
        return [Drop(worker, event.version, fate if event.finite else Fate.NON_FINITE)]

    def _on_work_abandoned(self, event: WorkAbandoned) -> list[Action]:
        member, work = self._reported(event)
        if work is None:
            raise ProtocolError(f"the worker has already reported this turn: {event!r}")
        self._release(event.worker, member, event, whole=False)
        return [Drop(event.worker, work.version, Fate.CANCELLED)]

    def _on_timer_fired(self, event: TimerFired) -> list[Action]:
        ledger = self.ledger
        if event.timer > ledger.timer:
            raise ProtocolError(f"no timer with this number was started: {event!r}")
        if ledger.awaits_timer(event.timer):
            ledger.overdue = True
        return []

    def _on_update_applied(self, event: UpdateApplied) -> list[Action]:
        if not self.learns_from_updates:
            return []
        applying = self.ledger.applying
        expected = next(iter(applying), None)
        if event.update != expected:
            raise ProtocolError(f"the next update to be reported is {expected}: {event!r}")
        if event.sq_norm is not None:
            _check_norm(event)
        self.policy.observe_update(self.ledger, applying.pop(event.update), event.sq_norm)
        return []

    def _on_stop_requested(self, event: StopRequested) -> list[Action]:
        self._stop(event.at_once)
        return []

    def _stop(self, at_once: bool = False) -> None:
        """End the run with the last update that has a contribution already, or the newest."""
        ledger = self.ledger
        pending = [update for update, tally in ledger.tallies.items() if tally.contributions]
        last = ledger.version if at_once else max(pending, default=ledger.version)
        ledger.last = last if ledger.last is None else min(last, ledger.last)
        ledger.stopping = True

    def _member(self, worker: int, event: Event) -> Member:
        member = self.ledger.members.get(worker)
        if member is None:
            raise ProtocolError(f"worker {worker} has not joined: {event!r}")
        return member

    def _reported(self, event: GradientArrived | WorkAbandoned) -> tuple[Member, Work | None]:
        """Return the worker that reports, and its work; None: this turn was reported before."""
        member = self._member(event.worker, event)
        if not 1 <= event.turn <= member.turn:
            raise ProtocolError(f"the worker has had {member.turn} turns: {event!r}")
        return member, member.work if event.turn == member.turn else None

    def _release(
        self, worker: int, member: Member, event: GradientArrived | WorkAbandoned, whole: bool
    ) -> None:
        """Mark the worker as idle after its report."""
        member.work = None
        member.cancelled = False
        self.ledger.idle[worker] = None
        self.policy.observe(self.ledger, worker, event.time - member.asked_at, whole)

    # ---------------------------------------------------------------------------------- settling

    def _settle(self, actions: list[Action]) -> None:
        """Do everything that the last event made possible."""
        ledger, policy = self.ledger, self.policy
        if ledger.finished:
            return
        if ledger.paused == (len(ledger.members) >= ledger.spec.min_workers):
            self._pause_or_resume(actions)
        before = ledger.version
        while can_update(policy, ledger):
            actions.append(self._make_update())
        if ledger.version == ledger.last or (ledger.stopping and ledger.paused):
            self._finish(actions)
            return
        if ledger.stopping or (ledger.version > before and not policy.keeps_all):
            self._cancel_useless(actions)
        if ledger.paused:
            return
        if not ledger.timer_runs:
            at = policy.deadline(ledger)
            if at is not None:
                ledger.timer += 1
                ledger.timer_runs = True
                actions.append(StartTimer(ledger.timer, max(at, ledger.now)))
        for worker in self._askable(actions, before):
            work = policy.assign(ledger, worker)
            if work is not None and (ledger.last is None or work.update <= ledger.last):
                actions.append(self._ask(worker, work))

    def _askable(self, actions: list[Action], before: int) -> Iterable[int]:
        """Return the idle workers whose `assign` may have changed; asking all is too slow."""
        first = actions[0] if actions else None
        if isinstance(first, Accept) and self.ledger.version == before:
            return (first.worker,)
        return list(self.ledger.idle)

    def _pause_or_resume(self, actions: list[Action]) -> None:
        ledger = self.ledger
        alive = len(ledger.members)
        enough = alive >= ledger.spec.min_workers
        if not ledger.begun:
            to_begin = max(
                ledger.spec.min_workers, min(self.policy.needed(ledger), ledger.spec.workers)
            )
            enough = enough and len(ledger.joined) >= to_begin
        if ledger.paused and enough:
            ledger.begun, ledger.paused = True, False
            ledger.joined.clear()
            # Time spent in a pause doesn't count towards a deadline.
            ledger.restart_wait()
            actions.append(Resume())
        elif not ledger.paused and not enough:
            ledger.paused = True
            if ledger.stopping:
                return
            missing = ledger.spec.min_workers - alive
            actions.append(
                Pause(f"{alive} of at least {ledger.spec.min_workers} workers; waits for {missing}")
            )

    def _make_update(self) -> ApplyUpdate:
        ledger = self.ledger
        wanted = self.policy.needed(ledger)
        contributions = tuple(ledger.advance().contributions)
        update = ledger.version
        samples = sum(c.samples for c in contributions)
        made = ApplyUpdate(
            update=update,
            contributions=contributions,
            weights=tuple([c.samples / samples for c in contributions]),
            scales=tuple([c.scale for c in contributions]),
            wanted=wanted,
        )
        ledger.samples += made.new_samples
        if ledger.has_enough_samples:
            self._stop()
        if self.learns_from_updates:
            ledger.applying[update] = made
        return made

    def _cancel_useless(self, actions: list[Action]) -> None:
        """Cancel, once each, all work whose gradient would be dropped in any case."""
        for worker, member in self.ledger.members.items():
            if member.work is None or member.cancelled:
                continue
            if judge(self.policy, self.ledger, member.work) is not Fate.ACCEPTED:
                member.cancelled = True
                actions.append(Cancel(worker, member.turn))

    def _ask(self, worker: int, work: Work) -> SendParams:
        ledger = self.ledger
        member = ledger.members[worker]
        member.work = work
        member.turn = ledger.turns[worker] = member.turn + 1
        member.asked_at = ledger.now
        del ledger.idle[worker]
        return SendParams(worker, member.turn, work.version)

    def _finish(self, actions: list[Action]) -> None:
        ledger = self.ledger
        ledger.finished = True
        ledger.last = ledger.version
        unused = [c for u in sorted(ledger.tallies) for c in ledger.tallies[u].contributions]
        ledger.tallies = {ledger.version + 1: Tally()}
        self._cancel_useless(actions)
        actions.append(Finish(ledger.version, tuple(unused)))

    # ---------------------------------------------------------------------------------- checking

    def check(self) -> None:
        """Raise `InternalError`, with the latest events, if an invariant doesn't hold."""
        checked = invariants(self.policy, self.ledger, self.would_accept)
        broken = [what for what, holds in checked if not holds]
        if broken:
            history = "\n  ".join(map(repr, self._history))
            raise InternalError(
                f"{self.policy}: broken: {'; '.join(broken)}; "
                f"please report this with the latest events:\n  {history}"
            )


def _check_norm(event: GradientArrived | UpdateApplied) -> None:
    if not 0 <= (event.sq_norm or 0.0) < inf:  # also refuses NaN
        raise ProtocolError(f"sq_norm must be >= 0 and finite, or None: {event!r}")


def replay(policy: Policy, spec: RunSpec, events: Iterable[Event]) -> list[list[Action]]:
    """Return the actions that the policy decides on each of these events."""
    decider = Decider(policy, spec)
    return [decider.handle(event) for event in events]
