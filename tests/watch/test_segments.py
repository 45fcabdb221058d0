# SPDX-License-Identifier: BSD-3-Clause
"""A trace in segments: when the run began, which updates were kept, and how long they took."""

from dataclasses import replace

import msgspec
import pytest

from gapped import with_gap
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import Gap, Header, Paused, Restored, Resumed, Trace, Update
from paceline.watch.segments import kept_updates, split, start_time, step_times, without_lost
from paceline.watch.summary import summarize
from small_traces import SYNC, THREE, begin, sync_round


def simulated() -> Trace:
    return simulate("sync", Cluster.parse("50ms"), RunSpec(workers=3, steps=40))


def test_each_server_and_each_gap_begins_a_segment() -> None:
    other = Header(source="run", policy="async", workers=2)
    restored = Restored(3.0, 2, other)
    again = [*begin(4.0), *sync_round(3, 4.0)]
    first, second, third = split(Trace(SYNC, [*THREE, restored, *again, Gap(9.0, 8)]))
    assert [one.header for one in (first, second, third)] == [SYNC, other, other]
    assert [one.end for one in (first, second, third)] == [3.0, 5.0, 9.0]
    assert first.kept == 2
    assert [update.t for update in kept_updates([first, second, third])] == [1.0, 2.0, 5.0]


def test_lost_updates_are_left_out_with_their_gradients() -> None:
    trace = Trace(SYNC, [*THREE, Restored(3.0, 2, SYNC)])
    kept = without_lost(trace)
    assert [update.update for update in kept.updates()] == [1, 2]
    assert {gradient.version for gradient in kept.gradients()} == {0, 1}


def test_update_after_a_gap_has_no_known_time() -> None:
    steps = step_times(with_gap(simulated(), 10, 25), 0.0)
    assert [step.lasted_s for step in steps] == pytest.approx([0.05] * 24)
    assert len(step_times(with_gap(simulated(), 10, 25))) == 23
    assert step_times(with_gap(simulated(), 0, 39), 0.0) == []


def test_lost_updates_beside_a_gap_do_not_make_the_rate_negative() -> None:
    """Only lost updates have known times here."""
    header = simulated().header
    lost = [Resumed(0.0), *(Update(float(n), n, (0,), 1) for n in range(1, 6))]
    trace = Trace(header, [*lost, Restored(6.0, 0, header), Gap(7.0, 0), Update(8.0, 1, (0,), 1)])
    summary = summarize(trace)
    assert (summary.updates, summary.updates_per_s, summary.lost_updates) == (1, None, 5)
    assert [step.is_kept for step in step_times(trace, 0.0)] == [False] * 5


def test_beginning_that_a_gap_hides_is_not_a_later_one() -> None:
    """The run resumed after a pause, too."""
    gap = with_gap(simulated(), 0, 39).records[0]
    assert isinstance(gap, Gap)
    late = [Paused(gap.t + 1.0, "too few workers"), Resumed(gap.t + 90.0)]
    assert start_time(Trace(simulated().header, [gap, *late])) == 0.0
    waiting = msgspec.structs.replace(gap, ledger=replace(gap.ledger, begun=False))
    assert start_time(Trace(simulated().header, [waiting, *late])) == gap.t + 90.0
