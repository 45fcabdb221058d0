# SPDX-License-Identifier: BSD-3-Clause
"""How long turns take, with and without an injected delay, on a clock that the test moves."""

import pytest

from paceline.run.system import System
from paceline.run.worker.turn_clock import TurnClock


@pytest.fixture
def now():
    """The time: a list of one number, which the test may change."""
    return [100.0]


def clock_of(now, latency):
    """Return the clock of a turn with this latency."""
    return TurnClock(latency, worker=0, seed=0, system=System(monotonic=lambda: now[0]))


def test_without_a_delay_a_gradient_is_due_immediately(now):
    clock = clock_of(now, "")
    now[0] = 103.0
    clock.begin(asked_at=101.0)
    now[0] = 105.0
    assert clock.remaining_s == 0.0
    assert clock.elapsed_s == clock.compute_s == 2.0


def test_injected_delay_counts_from_the_servers_request(now):
    """The worker's own overhead is part of the latency that the user asked for."""
    clock = clock_of(now, "10s")
    now[0] = 103.0
    clock.begin(asked_at=101.0)
    now[0] = 105.0
    assert clock.remaining_s == 6.0
    assert clock.elapsed_s == 4.0
    assert clock.compute_s == 10.0
    now[0] = 113.0
    assert clock.remaining_s == 0.0
    assert clock.compute_s == 12.0


def test_injected_delay_counts_from_the_answer_if_the_clocks_differ(now):
    clock = clock_of(now, "10s")
    now[0] = 103.0
    clock.begin(asked_at=None)
    assert clock.remaining_s == 10.0


def test_request_from_before_the_worker_joined_counts_from_the_join(now):
    """The server may have asked a worker that was lost."""
    clock = clock_of(now, "10s")
    now[0] = 101.0
    clock.begin(asked_at=20.0)
    assert clock.remaining_s == 9.0


def test_processor_time_counts_from_the_last_report():
    used = [7.0]
    clock = TurnClock("10s", worker=0, seed=0, system=System(cpu_time=lambda: used[0]))
    clock.begin(asked_at=None)
    used[0] = 8.0
    assert clock.read_cpu_s() == 1.0
    used[0] = 8.5
    assert clock.read_cpu_s() == 1.5  # the delay was cut short, so the report is written again
    used[0] = 8.75
    clock.begin(asked_at=None)
    used[0] = 9.0
    assert clock.read_cpu_s() == 0.5


def test_delay_depends_on_the_worker_and_the_seed_only(now):
    def delays(worker, seed):
        clock = TurnClock("exp:1s", worker, seed, System(monotonic=lambda: now[0]))
        found = []
        for _ in range(4):
            clock.begin(asked_at=None)
            found.append(clock.remaining_s)
        return found

    assert delays(1, 2) == delays(1, 2)
    assert len({tuple(delays(worker, seed)) for worker in (0, 1) for seed in (0, 1)}) == 4
