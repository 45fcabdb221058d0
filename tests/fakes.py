# SPDX-License-Identifier: BSD-3-Clause
"""The simplest possible shell, and the table of policies that every law is tested with.

`Cluster` drives a `Decider` by hand: from the actions alone it tracks what each worker was asked
for, and it asserts at each step what any shell may rely on. It computes nothing and knows no rule,
so what it asserts also holds for the simulator and the runtime.
"""

import copy
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from random import Random
from typing import Any

from paceline.core.decider import Decider
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
)
from paceline.core.ledger import Ledger
from paceline.core.policies import parse_policy
from paceline.core.policy import Policy
from paceline.spec import RunSpec
from paceline.trace.event_records import Measured, record_event
from paceline.trace.schema import Ended, Header, Record, Trace


class NoTrace:
    """The trace of a run that records nothing, for its checkpointer."""

    mark = (0, 0)

    def flush(self) -> None:
        """Do nothing."""

    def sync(self) -> None:
        """Do nothing."""


__all__ = [
    "POLICY_TABLE",
    "Cluster",
    "make_decider",
    "random_steps",
    "state_of",
    "trace_of",
    "view_of",
]

POLICY_TABLE = [
    "sync",
    "backup:0",
    "backup:1",
    "backup:2",
    "batchsync:1",
    "batchsync:2",
    "batchsync:5",
    "deadline",
    "deadline:0.5",
    "deadline:q=0.6,n_min=2",
    "deadline:after=2s",
    "deadline:n_min=2,after=0",
    "async",
    "async:lr=inverse",
    "async:bound=1",
    "softsync:1",
    "softsync:2",
    "softsync:4",
    "softsync:2,lr=constant,bound=1",
    "ssp:0",
    "ssp:1",
    "ssp:3",
    "delayed:0",
    "delayed:1",
    "delayed:2",
]
"""Every policy, with several settings, for 3 workers. A new rule must add its rows here."""


def make_decider(policy: str | Policy, workers: int = 3, **spec: Any) -> Decider:
    """Return a decider for a policy or its string."""
    return Decider(parse_policy(policy), RunSpec(workers=workers, **spec))


def view_of(decider: Decider) -> tuple[Ledger, list[int], list[int]]:
    """Return everything that a decision may depend on, including the order of dictionaries."""
    return decider.ledger, list(decider.ledger.idle), list(decider.ledger.members)


def state_of(decider: Decider) -> tuple[Ledger, list[int], list[int]]:
    """Return a copy of that state, to compare with a later view."""
    return copy.deepcopy(view_of(decider))


def copy_of(ledger: Ledger) -> Ledger:
    """Do what `copy.deepcopy` does, but many times faster, for the exhaustive tests."""
    twin = replace(
        ledger,
        memory=copy.copy(ledger.memory),
        members={worker: replace(member) for worker, member in ledger.members.items()},
        idle=dict(ledger.idle),
        tallies={},
        applying=dict(ledger.applying),
        joined=set(ledger.joined),
        turns=dict(ledger.turns),
    )
    twin.tallies = {  # not above, because a new ledger starts with a tally for update 1
        update: replace(
            tally,
            contributions=list(tally.contributions),
            done=set(tally.done),
            excused=set(tally.excused),
        )
        for update, tally in ledger.tallies.items()
    }
    return twin


class Cluster:
    """Workers that are driven by hand, a manual clock, and a strict shell."""

    def __init__(self, decider: Decider) -> None:
        self.decider = decider
        self.origin = decider.ledger.version
        """The version that it starts from."""
        self.now = 0.0
        self.log: list[tuple[Event, list[Action]]] = []
        self.asked: dict[int, SendParams | None] = {}
        """By member; None: it waits for parameters."""
        self.turns = {worker: [0] * had for worker, had in decider.ledger.turns.items()}
        """The version of each turn of each worker, including those before a death; 0 for turns from
        before the origin, whose version isn't known."""
        self.cancelled: set[int] = set()
        self.timers: dict[int, float] = {}
        """When each timer that hasn't fired yet should fire, by its number."""
        self.timers_started = 0
        self.timer: int | None = None
        """The timer of the next update; None: none was started since the version was opened or the
        run resumed. All other timers are outdated: a shell needn't remove them."""
        self.pending: dict[int, list[Contribution]] = {}
        """What was accepted for updates that aren't made yet."""
        self.updates: list[ApplyUpdate] = []
        self.unreported: list[int] = []
        """Updates that were made but not yet reported to the decider."""
        self.fates: Counter[Fate] = Counter()
        self.paused = True
        self.finish: Finish | None = None

    @classmethod
    def of(
        cls, policy: str | Policy, workers: int = 3, joined: bool = True, **spec: Any
    ) -> "Cluster":
        """Return a new cluster, whose workers have joined unless `joined` is False."""
        cluster = cls(make_decider(policy, workers, **spec))
        for worker in range(workers) if joined else ():
            cluster.join(worker, after=0.0)
        return cluster

    # --------------------------------------------------------------------- queries

    @property
    def version(self) -> int:
        """How many updates were made."""
        return self.origin + len(self.updates)

    @property
    def working(self) -> list[int]:
        """The busy workers, in the order in which they were asked."""
        return [worker for worker, asked in self.asked.items() if asked is not None]

    @property
    def repeatable(self) -> list[int]:
        """The members that have reported at least one turn."""
        return [w for w in self.asked if self._last_reported(w) > 0]

    @property
    def due(self) -> list[int]:
        """The timer of the next update, if there is one and it has not fired yet."""
        return [timer for timer in self.timers if timer == self.timer]

    @property
    def outdated(self) -> list[int]:
        """The other timers that have not fired yet."""
        return [timer for timer in self.timers if timer != self.timer]

    @property
    def events(self) -> list[Event]:
        """All events so far."""
        return [event for event, _ in self.log]

    @property
    def actions(self) -> list[list[Action]]:
        """The actions that were decided on each event."""
        return [actions for _, actions in self.log]

    # -------------------------------------------------------------------- events

    def join(self, worker: int, after: float = 1.0) -> list[Action]:
        """A worker joins, or joins again."""
        return self.handle(WorkerJoined(self.now + after, worker))

    def leave(self, worker: int, after: float = 1.0) -> list[Action]:
        """A worker dies."""
        return self.handle(WorkerLeft(self.now + after, worker, "killed"))

    def arrive(
        self, worker: int, samples: int = 1, finite: bool = True, after: float = 1.0
    ) -> list[Action]:
        """A worker finishes its gradient."""
        asked = self.asked[worker]
        assert asked is not None, f"worker {worker} was asked for nothing"
        return self.handle(
            GradientArrived(self.now + after, worker, asked.turn, asked.version, samples, finite)
        )

    def abandon(self, worker: int, after: float = 1.0) -> list[Action]:
        """A worker abandons its gradient."""
        asked = self.asked[worker]
        assert asked is not None, f"worker {worker} was asked for nothing"
        return self.handle(WorkAbandoned(self.now + after, worker, asked.turn))

    def duplicate(self, worker: int, after: float = 1.0) -> list[Action]:
        """A worker's newest report arrives again."""
        turn = self._last_reported(worker)
        version = self.turns[worker][turn - 1]
        return self.handle(GradientArrived(self.now + after, worker, turn, version))

    def fire(self, timer: int, after: float = 0.0) -> list[Action]:
        """A timer fires, at its time or now, whichever is later."""
        at = max(self.now + after, self.timers.pop(timer))
        return self.handle(TimerFired(at, timer))

    def report_update(self, sq_norm: float | None = None, after: float = 0.0) -> list[Action]:
        """Report the oldest unreported update as applied."""
        return self.handle(UpdateApplied(self.now + after, self.unreported.pop(0), sq_norm))

    def stop(self, after: float = 1.0) -> list[Action]:
        """The run is asked to stop."""
        return self.handle(StopRequested(self.now + after))

    def run_until(self, version: int, silent: Collection[int] = (), limit: int = 500) -> None:
        """Let all workers but the silent ones report in turn; timers fire if none can."""
        for _ in range(limit):
            if self.version >= version or self.finish:
                return
            able = [w for w in self.working if w not in silent]
            due = self.due
            assert able or due, f"stuck at version {self.version}: {self.decider.ledger}"
            if able:
                self.arrive(able[0])
            else:
                self.fire(due[0])
        raise AssertionError(f"version {version} not reached in {limit} events")

    def fork(self) -> "Cluster":
        """Return an independent copy."""
        twin = Cluster(Decider(self.decider.policy, self.decider.ledger.spec))
        twin.decider.ledger = copy_of(self.decider.ledger)
        twin.origin = self.origin
        twin.now, twin.paused, twin.finish = self.now, self.paused, self.finish
        twin.log, twin.updates = list(self.log), list(self.updates)
        twin.unreported = list(self.unreported)
        twin.asked, twin.turns = dict(self.asked), {w: list(t) for w, t in self.turns.items()}
        twin.cancelled, twin.fates = set(self.cancelled), Counter(self.fates)
        twin.timers, twin.timer = dict(self.timers), self.timer
        twin.timers_started = self.timers_started
        twin.pending = {update: list(given) for update, given in self.pending.items()}
        return twin

    # ------------------------------------------------------------------------- the shell's laws

    def handle(self, event: Event) -> list[Action]:
        """Decide on an event, perform the actions, and check the laws."""
        actions = self.decider.handle(event)
        self.decider.check()
        self.now = event.time
        self.log.append((event, actions))
        self._check_one_fate(event, actions)
        self._check_that_outdated_timers_have_no_effect(event, actions)
        self._record(event)
        for action in actions:
            self._perform(event, action)
        return actions

    def _check_one_fate(self, event: Event, actions: list[Action]) -> None:
        """Check that each report gets one fate as its first action, and no other event gets one."""
        fates = [a for a in actions if isinstance(a, Accept | Drop)]
        if not isinstance(event, GradientArrived | WorkAbandoned):
            assert fates == []
            return
        assert fates == actions[:1]
        fate = fates[0]
        got = fate.fate if isinstance(fate, Drop) else Fate.ACCEPTED
        assert got in self._possible_fates(event)
        version = self.turns[event.worker][event.turn - 1]
        assert (fate.worker, fate.version) == (event.worker, version)
        self.fates[got] += 1

    def _check_that_outdated_timers_have_no_effect(
        self, event: Event, actions: list[Action]
    ) -> None:
        if isinstance(event, TimerFired) and event.timer != self.timer:
            assert actions == [], "an outdated timer has no effect"

    def _possible_fates(self, event: GradientArrived | WorkAbandoned) -> set[Fate]:
        """Return the fates that a gradient may get, given what the shell knows."""
        if isinstance(event, WorkAbandoned):
            return {Fate.CANCELLED}
        if not self._is_new_report(event):
            return {Fate.DUPLICATE}
        if not event.finite:
            return {Fate.NON_FINITE}
        return {Fate.LATE, Fate.STALE} if event.worker in self.cancelled else {Fate.ACCEPTED}

    def _record(self, event: Event) -> None:
        """Record the event in the shell's own state."""
        if isinstance(event, WorkerJoined):
            self.asked[event.worker] = None
            self.turns.setdefault(event.worker, [])
        elif isinstance(event, WorkerLeft):
            del self.asked[event.worker]
            self.cancelled.discard(event.worker)
        elif self._is_new_report(event):
            self.asked[event.worker] = None
            self.cancelled.discard(event.worker)

    def _perform(self, event: Event, action: Action) -> None:
        match action:
            case Accept(update=update, samples=samples, scale=scale):
                assert isinstance(event, GradientArrived)
                assert update > self.version
                assert samples == event.samples
                given = (event.worker, event.version, samples, scale)
                measured = (event.sq_norm, event.new_samples)
                self.pending.setdefault(update, []).append(Contribution(*given, *measured))
            case ApplyUpdate():
                self._apply(action)
            case SendParams(worker, turn, version):
                assert not self.finish
                assert not self.paused
                assert self.asked.pop(worker) is None, "only idle workers get work"
                assert turn == len(self.turns[worker]) + 1, "a turn must not be used twice"
                assert self.origin <= version <= self.version
                self.asked[worker] = action  # last, because `working` uses this order
                self.turns[worker].append(version)
            case Cancel(worker, turn):
                asked = self.asked[worker]
                assert asked is not None
                assert asked.turn == turn
                assert worker not in self.cancelled, "cancelled twice"
                self.cancelled.add(worker)
            case StartTimer(timer, at):
                assert not self.finish
                assert not self.paused
                assert at >= event.time
                assert self.timer is None, "one timer per update, and a new one after a pause"
                assert timer == self.timers_started + 1, "timers are numbered consecutively"
                self.timers_started = self.timer = timer
                self.timers[timer] = at
            case Pause(reason):
                assert not self.paused
                assert reason
                self.paused = True
            case Resume():
                assert self.paused
                self.paused = False
                self.timer = None
            case Finish(version, unused):
                assert not self.finish
                assert version == self.version
                left = [c for update in sorted(self.pending) for c in self.pending[update]]
                assert list(unused) == left
                self.pending.clear()
                self.finish = action
            case _:
                assert isinstance(action, Drop), f"unknown action {action}"

    def _apply(self, action: ApplyUpdate) -> None:
        """Check that updates come in order, each with exactly what was accepted for it."""
        assert not self.finish
        assert not self.paused or len(action.contributions) >= action.wanted
        assert action.update == self.version + 1
        assert action.contributions
        assert list(action.contributions) == self.pending.pop(action.update)
        assert len(action.weights) == len(action.contributions)
        assert action.scales == tuple(c.scale for c in action.contributions)
        self.updates.append(action)
        self.unreported.append(action.update)
        self.timer = None

    def _is_new_report(self, event: Event) -> bool:
        """Return whether this is the first report of a turn."""
        if not isinstance(event, GradientArrived | WorkAbandoned):
            return False
        return event.turn > self._last_reported(event.worker)

    def _last_reported(self, worker: int) -> int:
        """Return the newest turn that this worker has reported, or lost by dying; 0: none."""
        return len(self.turns[worker]) - (self.asked[worker] is not None)


def trace_of(cluster: Cluster) -> Trace:
    """Return the trace that a shell would have written so far."""
    records: list[Record] = []
    version = cluster.origin
    asked_at: dict[int, float] = {}
    for event, actions in cluster.log:
        measured = None
        if isinstance(event, GradientArrived | WorkAbandoned):
            measured = Measured(asked_at[event.worker])
        records += record_event(event, actions, version, measured)
        for action in actions:
            if isinstance(action, SendParams):
                asked_at[action.worker] = event.time
            elif isinstance(action, ApplyUpdate):
                version = action.update
            elif isinstance(action, Finish):
                unused = tuple(c.worker for c in action.unused)
                end = Ended(event.time, action.version, unused)
    if cluster.finish:
        records.append(end)
    spec = cluster.decider.ledger.spec
    return Trace(Header.of("run", cluster.decider.policy, spec, {}), records)


def random_steps(
    cluster: Cluster, rng: Random, count: int, faults: bool = True, spare: int = 2
) -> Iterator[tuple[Event, list[Action]]]:
    """Let `count` random events happen to a cluster; yield each event with its actions.

    `spare` workers more than the run was started for may join and leave. Without faults, workers
    only report and timers fire.
    """
    roster = cluster.decider.ledger.spec.workers + spare
    for _ in range(count):
        working, after = cluster.working, rng.choice([0.0, 0.25, 1.0, 4.0])
        absent = [w for w in range(roster) if w not in cluster.asked]
        choices: list[tuple[int, str, list[int]]] = [
            (40, "arrive", working),
            (20, "abandon", [w for w in working if w in cluster.cancelled]),
            (12, "fire", cluster.due),
            (6, "fire", cluster.outdated),
        ]
        if faults or not working:
            choices.append((8, "join", absent))
        if faults:
            choices += [
                (3, "abandon", working),
                (3, "leave", sorted(cluster.asked)),
                (3, "non-finite", working),
                (2, "duplicate", cluster.repeatable),
            ]
        if cluster.unreported:
            choices.append((10, "report_update", [0]))
        possible = [(weight, what, options) for weight, what, options in choices if options]
        if not possible:
            return
        [(_, what, options)] = rng.choices(possible, weights=[weight for weight, _, _ in possible])
        chosen = rng.choice(options)
        if what == "arrive":
            cluster.arrive(chosen, samples=rng.choice([1, 1, 7, 32, 10**12]), after=after)
        elif what == "non-finite":
            cluster.arrive(chosen, finite=False, after=after)
        elif what == "report_update":
            cluster.report_update(rng.choice([None, 0.0, 2.5]), after=after)
        else:
            getattr(cluster, what)(chosen, after=after)
        yield cluster.log[-1]
