# SPDX-License-Identifier: BSD-3-Clause
"""A hostile world, made up by hypothesis: anything may happen, in any order, under any policy.

`Cluster` holds the shell's laws and every invariant at each step; the machine holds that garbage is
refused without a trace and, at the end, that the events alone tell the whole run.
"""

from math import inf, nan

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from fakes import POLICY_TABLE, Cluster, state_of, view_of
from paceline.core.decider import replay
from paceline.core.events import (
    Accept,
    Drop,
    GradientArrived,
    StopRequested,
    TimerFired,
    UpdateApplied,
    WorkAbandoned,
    WorkerJoined,
    WorkerLeft,
)
from paceline.errors import ProtocolError

CREW = range(5)  # two more than the run is started for
seconds = st.sampled_from([0.0, 0.125, 1.0, 10.0])
workers = st.sampled_from(CREW)
numbers = st.integers(-2, 12)


class HostileWorld(RuleBasedStateMachine):
    """Workers that come, go, fail, repeat themselves and talk nonsense."""

    @initialize(
        policy=st.sampled_from(POLICY_TABLE),
        steps=st.none() | st.integers(1, 5),
        min_workers=st.integers(1, 3),
        joined=st.booleans(),
    )
    def begin(self, policy, steps, min_workers, joined):
        self.cluster = Cluster.of(policy, joined=joined, steps=steps, min_workers=min_workers)

    @precondition(lambda self: len(self.cluster.asked) < len(CREW))
    @rule(data=st.data(), after=seconds)
    def join(self, data, after):
        absent = [worker for worker in CREW if worker not in self.cluster.asked]
        self.cluster.join(data.draw(st.sampled_from(absent)), after=after)

    @precondition(lambda self: self.cluster.asked)
    @rule(data=st.data(), after=seconds)
    def leave(self, data, after):
        self.cluster.leave(data.draw(st.sampled_from(sorted(self.cluster.asked))), after=after)

    @precondition(lambda self: self.cluster.working)
    @rule(data=st.data(), samples=st.integers(1, 2**40), after=seconds)
    def arrive(self, data, samples, after):
        worker = data.draw(st.sampled_from(self.cluster.working))
        self.cluster.arrive(worker, samples=samples, after=after)

    @precondition(lambda self: self.cluster.working)
    @rule(after=seconds)
    def arrive_in_turn(self, after):
        """The one who has worked longest; so that updates are made however the dice fall."""
        self.cluster.arrive(self.cluster.working[0], after=after)

    @precondition(lambda self: self.cluster.working)
    @rule(data=st.data(), after=seconds)
    def arrive_non_finite(self, data, after):
        worker = data.draw(st.sampled_from(self.cluster.working))
        self.cluster.arrive(worker, finite=False, after=after)

    @precondition(lambda self: self.cluster.working)
    @rule(data=st.data(), after=seconds)
    def abandon(self, data, after):
        self.cluster.abandon(data.draw(st.sampled_from(self.cluster.working)), after=after)

    @precondition(lambda self: self.cluster.repeatable)
    @rule(data=st.data(), after=seconds)
    def duplicate(self, data, after):
        self.cluster.duplicate(data.draw(st.sampled_from(self.cluster.repeatable)), after=after)

    @precondition(lambda self: self.cluster.timers)
    @rule(data=st.data(), after=seconds)
    def fire(self, data, after):
        self.cluster.fire(data.draw(st.sampled_from(sorted(self.cluster.timers))), after=after)

    @precondition(lambda self: self.cluster.due)
    @rule(after=seconds)
    def fire_the_newest(self, after):
        """The only one that counts; the rule above chooses it rarely after many updates."""
        self.cluster.fire(self.cluster.due[0], after=after)

    @precondition(lambda self: self.cluster.unreported)
    @rule(sq_norm=st.none() | st.floats(0, 1e300), after=seconds)
    def report_update(self, sq_norm, after):
        self.cluster.report_update(sq_norm, after=after)

    @precondition(lambda self: len(self.cluster.log) > 15)
    @rule(after=seconds)
    def stop(self, after):
        self.cluster.stop(after=after)

    @rule(worker=workers, turn=numbers, version=numbers, samples=st.integers(-1, 1))
    def talk_nonsense(self, worker, turn, version, samples):
        now = self.cluster.now
        asked = self.cluster.asked.get(worker)
        if samples < 1 or not self.may_report(worker, turn, version):
            self.refuse(GradientArrived(now, worker, turn, version, samples))
        if asked is None or asked.turn != turn:
            self.refuse(WorkAbandoned(now, worker, turn))
        is_here = worker in self.cluster.asked
        self.refuse(WorkerJoined(now, worker) if is_here else WorkerLeft(now, worker))

    @rule(kind=st.sampled_from([StopRequested, WorkerJoined, WorkerLeft, TimerFired]))
    def turn_back_time(self, kind):
        numbers_of_it = () if kind is StopRequested else (99 if kind is WorkerJoined else 0,)
        self.refuse(kind(self.cluster.now - 0.5, *numbers_of_it))
        self.refuse(kind(nan, *numbers_of_it))

    @rule(beyond=st.integers(1, 9))
    def fire_what_was_never_started(self, beyond):
        self.refuse(TimerFired(self.cluster.now, self.cluster.decider.ledger.timer + beyond))

    @rule(update=numbers, sq_norm=st.sampled_from([None, 1.0, -1.0, nan, inf]))
    def report_an_update_that_is_not_the_next(self, update, sq_norm):
        is_next = self.cluster.unreported[:1] == [update]
        if not is_next or not (sq_norm is None or sq_norm == 1.0):
            self.refuse(UpdateApplied(self.cluster.now, update, sq_norm))

    def may_report(self, worker, turn, version):
        """Whether this would be what the worker was asked for, or a repetition."""
        if worker not in self.cluster.asked or not 1 <= turn <= len(self.cluster.turns[worker]):
            return False
        asked = self.cluster.asked[worker]
        return asked is None or turn != asked.turn or version == asked.version

    def refuse(self, event):
        before = state_of(self.cluster.decider)
        with pytest.raises(ProtocolError):
            self.cluster.decider.handle(event)
        assert view_of(self.cluster.decider) == before

    @invariant()
    def all_is_sound(self):
        self.cluster.decider.check()

    def teardown(self):
        if not hasattr(self, "cluster"):  # the very first step failed
            return
        cluster = self.cluster
        spec = cluster.decider.ledger.spec
        assert replay(cluster.decider.policy, spec, cluster.events) == cluster.actions
        reports = [e for e in cluster.events if isinstance(e, GradientArrived | WorkAbandoned)]
        told = [a for actions in cluster.actions for a in actions if isinstance(a, Accept | Drop)]
        assert [e.worker for e in reports] == [action.worker for action in told]
        accepted = sum(isinstance(action, Accept) for action in told)
        used = sum(len(update.contributions) for update in cluster.updates)
        unused = len(cluster.finish.unused) if cluster.finish else 0
        assert accepted == used + unused + sum(map(len, cluster.pending.values()))


TestHostileWorld = HostileWorld.TestCase
TestHostileWorld.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
