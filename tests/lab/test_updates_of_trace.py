# SPDX-License-Identifier: BSD-3-Clause
"""The training schedule of a trace."""

from collections import Counter
from random import Random

import msgspec
import pytest
from msgspec.structs import replace

import fakes
from paceline.core.policies import Sync
from paceline.errors import TraceError
from paceline.lab.problem import Draw
from paceline.lab.updates_of_trace import schedule
from paceline.leases import Use
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import Gradient, Header, Restored, Trace

LATENCY = "10ms + exp:10ms"


def simulated(policy, *, workers=5, steps=40, late="cancel"):
    spec = RunSpec(workers=workers, steps=steps, seed=1, late=late)
    return simulate(policy, Cluster.parse(LATENCY, batch=8), spec)


def test_steps_are_the_updates_of_the_trace():
    trace = simulated("backup:2")
    steps = schedule(trace)
    assert [(s.update, s.time) for s in steps] == [(u.update, u.t) for u in trace.updates()]
    contributors = [tuple(part.draw.worker for part in s.parts) for s in steps]
    assert contributors == [u.contributors for u in trace.updates()]
    assert {s.samples for s in steps} == {3 * 8}


@pytest.mark.parametrize("policy", ["sync", "backup:2", "async", "softsync:3", "delayed:2"])
def test_mini_batches_of_dropped_gradients_are_used_again(policy):
    numbers = Counter()
    for step in schedule(simulated(policy)):
        for part in sorted(step.parts, key=lambda part: part.draw):
            assert part.draw == Draw(part.draw.worker, numbers[part.draw.worker])
            numbers[part.draw.worker] += 1


def test_without_requeue_every_turn_has_its_own_mini_batch():
    trace = simulated("backup:2", late="finish")
    turns = {(g.worker, g.turn - 1) for g in trace.gradients() if g.fate == "accepted"}
    draws = [part.draw for s in schedule(trace, requeue=False) for part in s.parts]
    assert set(draws) == turns
    assert max(draw.number for draw in draws) > len(draws) // 5


def with_uses(trace, numbers):
    """Return the trace with these numbers of batches, one tuple for each gradient."""
    left = iter(numbers)
    records = [
        replace(record, uses=(Use(0, next(left)),)) if isinstance(record, Gradient) else record
        for record in trace.records
    ]
    return Trace(trace.header, records)


def test_mini_batches_have_their_numbers_in_the_shared_order():
    trace = simulated("backup:2")
    count = len(list(trace.gradients()))
    leased = with_uses(trace, [(3 * number,) for number in range(count)])
    accepted = [g for g in leased.gradients() if g.fate == "accepted"]
    expected = sorted(Draw(g.worker, g.uses[0].numbers[0]) for g in accepted)
    assert sorted(part.draw for s in schedule(leased) for part in s.parts) == expected


def test_gradient_on_several_mini_batches_is_refused():
    trace = simulated("sync", workers=1, steps=2)
    with pytest.raises(TraceError, match="worker 0 computed a gradient on 2 mini-batches"):
        schedule(with_uses(trace, [(0,), (1, 2)]))


def uneven_run(policy):
    """Return a run with faults whose mini-batches have different sizes."""
    cluster = fakes.Cluster.of(policy, steps=10)
    for _ in fakes.random_steps(cluster, Random(4), 600):
        pass
    assert cluster.updates
    return cluster


@pytest.mark.parametrize("policy", fakes.POLICY_TABLE)
def test_law_5_parts_have_the_weights_that_the_policy_decided(policy):
    cluster = uneven_run(policy)
    steps = schedule(fakes.trace_of(cluster))
    assert [s.update for s in steps] == [u.update for u in cluster.updates]
    for step, decided in zip(steps, cluster.updates, strict=True):
        assert tuple(part.weight for part in step.parts) == decided.weights
        assert tuple(part.scale for part in step.parts) == decided.scales
        given = [(c.worker, c.version, c.samples) for c in decided.contributions]
        assert [(p.draw.worker, p.version, p.samples) for p in step.parts] == given


def test_trace_without_weights_is_refused():
    trace = simulated("sync", steps=3)
    old = Trace(msgspec.structs.replace(trace.header, format=1), trace.records)
    with pytest.raises(TraceError, match="doesn't hold the weights of updates"):
        schedule(old)


def test_part_has_its_version_and_scale():
    for step in schedule(simulated("async:lr=inverse")):
        (part,) = step.parts
        staleness = step.update - 1 - part.version
        assert part.scale == 1 / max(1, staleness)
    assert {p.version for p in schedule(simulated("sync"))[7].parts} == {7}


def test_restored_run_is_refused():
    trace = simulated("sync", steps=3)
    header = Header.of("run", Sync(), trace.header.spec(), {})
    torn = Trace(trace.header, [*trace.records[:-1], Restored(9.0, 2, header)])
    with pytest.raises(TraceError, match="was restored at update 2"):
        schedule(torn)
