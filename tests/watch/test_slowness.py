# SPDX-License-Identifier: BSD-3-Clause
"""Which workers are slow; cancelled gradients only give lower bounds."""

import pytest

from paceline.core.events import Fate
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import Gradient, Header, Joined, Trace
from paceline.watch.slowness import Slowness, find_slow, measure_paces

ACCEPTED, CANCELLED = Fate.ACCEPTED, Fate.CANCELLED


def traced(times: dict[int, list[float]], cancelled: tuple[int, ...] = ()) -> Trace:
    """Return a trace of workers whose gradients took these times, after a warm-up."""
    records: list[Joined | Gradient] = []
    for worker, own in times.items():
        fate = CANCELLED if worker in cancelled else ACCEPTED
        records += [Joined(0.0, worker), Gradient(100.0, worker, 1, 0, ACCEPTED, 0, 0.0, 100.0)]
        records += [
            Gradient(100.0 + i, worker, 1 + i, 0, fate, 0, 0.0, took_s)
            for i, took_s in enumerate(own, start=1)
        ]
    return Trace(Header(source="run", policy="backup:1", workers=len(times)), records)


def slow(times: dict[int, list[float]], cancelled: tuple[int, ...] = ()) -> Slowness:
    return find_slow(measure_paces(traced(times, cancelled)))


def names(found: Slowness) -> tuple[list[int], list[int], list[int]]:
    """Return which workers are slow always, sometimes, once."""
    return (
        [pace.worker for pace, _ in found.always],
        [pace.worker for pace, _ in found.sometimes],
        [pace.worker for pace, _ in found.once],
    )


def late(found: Slowness) -> list[int]:
    """Return which workers are usually too late."""
    return [pace.worker for pace, _ in found.too_late]


EVEN = [1.0] * 10


def test_equal_workers_are_not_slow() -> None:
    assert names(slow({0: EVEN, 1: EVEN, 2: [1.2] * 10})) == ([], [], [])


def test_worker_with_a_much_larger_median_is_always_slow() -> None:
    found = slow({0: EVEN, 1: EVEN, 2: [1.5] * 10, 3: [2.0] * 10})
    assert names(found) == ([3, 2], [], [])
    assert [others_s for _, others_s in found.always] == [1.0, 1.0]


def test_single_worker_is_not_slow() -> None:
    assert names(slow({0: EVEN})) == ([], [], [])


def test_worker_with_some_long_gradients_is_sometimes_slow() -> None:
    found = slow({0: EVEN, 1: [1.0, 5.0, 1.0, 1.0, 3.0, 1.0, 1.0]})
    assert names(found) == ([], [1], [])
    [(_, timings)] = found.sometimes
    assert [t.took_s for t in timings] == [5.0, 3.0]


def test_negligible_slowness_is_ignored() -> None:
    assert names(slow({0: EVEN, 1: [1.0] * 998 + [2.0, 2.0]})) == ([], [], [])


def test_single_very_long_gradient_is_reported_as_once() -> None:
    found = slow({0: EVEN, 1: [*EVEN, 12.0], 2: [*EVEN, 5.0]})
    assert names(found) == ([], [], [1])
    [(_, timing)] = found.once
    assert (timing.t, timing.took_s) == (111.0, 12.0)


def test_warm_up_is_ignored() -> None:
    """The first gradient takes 100 s in all these traces."""
    assert measure_paces(traced({0: EVEN}))[0].timings[0].took_s == 1.0


def test_too_few_gradients_are_not_judged() -> None:
    found = slow({0: EVEN, 1: [9.0] * 4})
    assert (found.judged, names(found)) == (1, ([], [], []))


def test_cancelled_gradients_give_a_lower_bound() -> None:
    pace = measure_paces(traced({0: [3.0] * 10}, cancelled=(0,)))[0]
    assert (pace.typical_s, pace.is_bound, pace.cancelled) == (3.0, True, 10)


def test_median_is_estimated_beyond_cancelled_gradients() -> None:
    """Three in four are cancelled at 1 s; the others take 2 s, so half take at most 2 s."""
    trace = traced({0: [1.0] * 30}, cancelled=(0,))
    finished = [Gradient(200.0, 0, 99, 0, ACCEPTED, 0, 0.0, 2.0)] * 10
    pace = measure_paces(Trace(trace.header, [*trace.records, *finished]))[0]
    assert (pace.typical_s, pace.is_bound) == (2.0, False)


def test_single_finished_gradient_gives_no_median() -> None:
    trace = traced({0: [1.0] * 30}, cancelled=(0,))
    finished = Gradient(200.0, 0, 99, 0, ACCEPTED, 0, 0.0, 50.0)
    pace = measure_paces(Trace(trace.header, [*trace.records, finished]))[0]
    assert (pace.typical_s, pace.is_bound) == (1.0, True)


@pytest.mark.parametrize("bound_s", [0.5, 1.05, 9.0])
def test_worker_that_is_always_cancelled_is_too_late_and_not_slow(bound_s: float) -> None:
    """It is unknown how long its gradients take."""
    found = slow({0: EVEN, 1: EVEN, 2: [bound_s] * 10}, cancelled=(2,))
    assert (names(found), late(found)) == (([], [], []), [2])
    assert [others_s for _, others_s in found.too_late] == [1.0]


def test_no_worker_is_compared_with_a_lower_bound() -> None:
    """Worker 1 is cancelled at 1 s: it may take as long as worker 0, or longer."""
    assert names(slow({0: [2.0] * 10, 1: EVEN}, cancelled=(1,))) == ([], [], [])
    assert names(slow({0: [2.0] * 10, 1: EVEN})) == ([0], [], [])


def test_gradients_above_a_lower_bound_are_not_sometimes_slow() -> None:
    """Seven are cancelled at 1 s and three finish: these may be typical."""
    trace = traced({0: EVEN, 1: [1.0] * 7}, cancelled=(1,))
    whole = [Gradient(200.0, 1, 99, 0, ACCEPTED, 0, 0.0, took_s) for took_s in (9.0, 9.0, 9.5)]
    paces = measure_paces(Trace(trace.header, [*trace.records, *whole]))
    assert paces[1].is_bound
    assert names(find_slow(paces)) == ([], [], [])


def test_always_slow_worker_is_not_sometimes_slow_too() -> None:
    uneven = [2.0, 2.0, 2.0, 2.0, 2.0, 5.0, 6.0]
    assert names(slow({0: EVEN, 1: uneven})) == ([1], [], [])
    assert names(slow({0: [2.0] * 10, 1: uneven})) == ([], [1], [])


def test_worker_between_two_others_is_not_slow() -> None:
    assert names(slow({0: EVEN, 1: [1.3] * 10, 2: [2.0] * 10})) == ([2], [], [])


@pytest.mark.parametrize("policy", ["sync", "deadline", "async", "ssp:2", "backup:1", "backup:3"])
def test_worker_that_is_slow_by_design_is_found(policy: str) -> None:
    spec = RunSpec(workers=8, steps=400)
    trace = simulate(policy, Cluster.parse("45ms + exp:5ms; worker 6 x2"), spec)
    found = find_slow(measure_paces(trace))
    never_lets_it_finish = policy.startswith("backup")
    assert (late(found) if never_lets_it_finish else names(found)[0]) == [6]
    assert (names(found)[0] if never_lets_it_finish else late(found)) == []


@pytest.mark.parametrize("policy", ["sync", "async", "delayed:1"])
def test_hiccups_by_design_are_found_in_all_workers(policy: str) -> None:
    spec = RunSpec(workers=4, steps=800)
    trace = simulate(policy, Cluster.parse("45ms + exp:5ms + 5% exp:500ms"), spec)
    always, sometimes, _ = names(find_slow(measure_paces(trace)))
    assert (always, sorted(sometimes)) == ([], [0, 1, 2, 3])


def test_equal_workers_are_not_slow_however_many_gradients_are_dropped() -> None:
    spec = RunSpec(workers=8, steps=300)
    trace = simulate("backup:5", Cluster.parse("45ms + exp:5ms"), spec)
    found = find_slow(measure_paces(trace))
    assert (names(found), late(found)) == (([], [], []), [])
