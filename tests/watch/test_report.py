# SPDX-License-Identifier: BSD-3-Clause
"""The report of a run in words, on traces small enough to check by hand."""

import pytest

from paceline.core.events import Fate
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import (
    Awaited,
    Ended,
    Gradient,
    Header,
    Left,
    Restored,
    Update,
)
from paceline.watch.report import report
from small_traces import SYNC, THREE, begin, reported

ACCEPTED, LATE, CANCELLED, NON_FINITE = Fate.ACCEPTED, Fate.LATE, Fate.CANCELLED, Fate.NON_FINITE


def simulated(policy: str, latency: str, workers: int = 8, steps: int = 600) -> list[str]:
    cluster = Cluster.parse(latency)
    return report(simulate(policy, cluster, RunSpec(workers=workers, steps=steps)))


def test_complete_report() -> None:
    assert reported(*THREE, Ended(3.0, 3)) == [
        "sync with 2 workers: 3 updates in 3 s (1/s), 192 samples; finished.",
        "Last logged: loss 0.3333.",
        "",
        "worker  accepted  median  waited for",
        "0              3  500 ms           -",
        "1              3     1 s       1.5 s",
        "",
        "Too few gradients to tell which workers were slow.",
        "1.5 s (50 % of the time) was spent waiting: 1.5 s (50 %) for worker 1.",
    ]


# ---- the table ----


def test_table_has_a_column_for_every_fate_that_occurred() -> None:
    extra = [
        Gradient(3.5, 0, 4, 2, LATE, 1, 3.0, 0.5, 32),
        Gradient(3.6, 1, 4, 3, NON_FINITE, 0, 3.0, 0.6, 32),
        Gradient(3.7, 1, 5, 3, CANCELLED, 0, 3.6, 0.1, 0),
    ]
    lines = reported(*THREE, *extra)
    table = lines[lines.index("") + 1 :][:3]
    assert table == [
        "worker  accepted  late  cancelled  non-finite  median  waited for",
        "0              3     1          0           0  500 ms           -",
        "1              3     0          1           1     1 s       1.5 s",
    ]


def test_lost_gradients_have_a_separate_column() -> None:
    lines = reported(*THREE, Restored(3.0, 1, SYNC))
    assert lines[lines.index("") + 1 :][:2] == [
        "worker  accepted  lost  median  waited for",
        "0              1     2  500 ms           -",
    ]


def test_table_of_many_workers_shows_the_worst_and_adds_up_the_rest() -> None:
    lines = simulated("backup:2", "45ms + exp:5ms; worker 33 x2", workers=64, steps=60)
    table = lines[lines.index("") + 1 : lines.index("", lines.index("") + 1)]
    assert len(table) == 1 + 16 + 1
    assert any(line.startswith("33 ") for line in table)
    assert table[-1].startswith("48 others")


# ---- who was slow ----


def paced(*times: list[float], policy: str = "async") -> list[str]:
    """Return the report of workers whose gradients took these times, after a warm-up."""
    records = begin(workers=len(times))
    for worker, own in enumerate(times):
        records += [
            Gradient(100.0 + i, worker, 1 + i, 0, ACCEPTED, 0, 0.0, took_s)
            for i, took_s in enumerate([100.0, *own])
        ]
    header = Header(source="run", policy=policy, workers=len(times))
    return reported(*records, Update(200.0, 1, (0,), 1), header=header)


EVEN = [1.0] * 10


def test_no_worker_is_slow() -> None:
    assert "No worker was slow." in paced(EVEN, EVEN)


def test_no_worker_is_visibly_slow_if_gradients_were_cancelled() -> None:
    lines = simulated("backup:1", "45ms + exp:1ms", workers=4, steps=50)
    [line] = [line for line in lines if "slow" in line]
    assert line.startswith("No worker was visibly slow, but ")
    assert line.endswith(" gradients were cancelled, so their full times are unknown.")


def test_worker_that_is_always_slow() -> None:
    line = (
        "Worker 2 is always slow: its gradients take 1.8 s, 1.8 times as long as the others' (1 s)."
    )
    assert line in paced(EVEN, EVEN, [1.8] * 10)


def test_worker_that_is_sometimes_slow() -> None:
    assert (
        "Worker 1 is sometimes slow: 3 of its 13 gradients took 4 s (median) instead of 1 s, "
        "and up to 9 s." in paced(EVEN, [*EVEN, 3.0, 4.0, 9.0])
    )


def test_worker_that_was_slow_once() -> None:
    line = "Worker 1 was slow once: 60 s instead of 1 s, at 111 s."
    assert line in paced(EVEN, [*EVEN, 60.0])


def test_slowness_of_most_workers_takes_one_line() -> None:
    uneven = [*EVEN, 3.0, 5.0]
    assert (
        "All 3 workers are sometimes slow: 17 % of their gradients (6 of 36) took 3 s "
        "(median), and up to 5 s." in paced(uneven, uneven, uneven)
    )


def test_worker_that_is_slow_far_more_often_is_named() -> None:
    few, many = [1.0] * 40 + [9.0] * 2, [1.0] * 40 + [9.0] * 12
    [line] = [line for line in paced(few, few, few, many) if "sometimes" in line]
    assert line.endswith("; most often worker 3 (12 of 52).")


@pytest.mark.parametrize("policy", ["sync", "deadline", "async"])
def test_slow_worker_of_a_simulated_run_is_named(policy: str) -> None:
    lines = simulated(policy, "45ms + exp:5ms; worker 7 x2")
    assert [line[:24] for line in lines if "always" in line] == ["Worker 7 is always slow:"]


@pytest.mark.parametrize("policy", ["backup:1", "batchsync:8"])
def test_worker_that_is_mostly_cancelled_is_too_late_and_not_slow(policy: str) -> None:
    lines = simulated(policy, "45ms + exp:5ms; worker 7 x2")
    [line] = [line for line in lines if "too late" in line]
    assert line.startswith("Worker 7 is usually too late: ")
    assert line.endswith(" ms, the others' 48.4 ms.")
    assert not any("slow" in line for line in lines)


def test_hiccups_of_a_simulated_run_are_reported_for_all_workers() -> None:
    lines = simulated("sync", "45ms + exp:5ms + 5% exp:500ms")
    assert [line[:34] for line in lines if "slow" in line] == ["All 8 workers are sometimes slow: "]


# ---- who was waited for ----


def test_policy_that_never_waits_says_so() -> None:
    lines = simulated("softsync:2", "45ms + exp:5ms", steps=50)
    assert "Workers never wait under softsync:2." in lines


def test_equal_arrivals_mean_no_waiting() -> None:
    assert "Almost no time was spent waiting." in simulated("sync", "50ms", steps=50)


def test_worker_that_was_waited_for_most_is_named() -> None:
    lines = simulated("sync", "45ms + exp:5ms; worker 7 x2")
    [line] = [line for line in lines if "was spent waiting" in line]
    assert ") for worker 7, " in line
    assert line.endswith(") for 7 others.")


def test_evenly_spread_waiting_names_no_worker() -> None:
    lines = simulated("sync", "45ms + exp:5ms")
    [line] = [line for line in lines if "was spent waiting" in line]
    assert line.endswith(") for 8 workers.")


def test_waiting_until_a_deadline_is_reported() -> None:
    lines = simulated("deadline:after=60ms", "45ms + exp:5ms + 20% 500ms")
    [line] = [line for line in lines if "was spent waiting" in line]
    assert " until a deadline passed" in line


# ---- who contributed ----


def test_worker_that_contributes_little_is_named() -> None:
    lines = simulated("backup:1", "45ms + exp:5ms + 3% 500ms; worker 7 x2")
    [line] = [line for line in lines if "contributed" in line]
    assert line.startswith("Worker 7 contributed ")
    assert line.endswith(" of the samples; an even share is 12 %.")


def test_worker_that_contributes_nothing_is_named() -> None:
    lines = simulated("backup:1", "50ms; worker 3 x2", workers=4, steps=50)
    assert "Worker 3 contributed no samples." in lines
    assert not any("even share" in line for line in lines)


def test_even_shares_are_not_mentioned() -> None:
    assert not any("contributed" in line for line in simulated("sync", "45ms + exp:5ms"))


def test_lines_are_plain_text() -> None:
    lines = simulated("backup:1", "45ms + exp:5ms + 5% exp:500ms; worker 7 x1.8")
    assert all(line.isascii() and line.isprintable() and "[" not in line for line in lines)


def test_worker_that_hung_is_named() -> None:
    hung = (
        Gradient(3.5, 0, 4, 3, ACCEPTED, 0, 3.0, 0.5, 32),
        Awaited(8.0, 1, 3.0),
        Left(20.0, 1, "the connection was closed", 3.0),
    )
    lines = reported(*THREE, *hung, Ended(20.0, 3, (0,), "stopped"))
    assert (
        "Worker 1 hung: it was asked for a gradient at 3 s and still had not sent it 17 s later."
    ) in lines
    assert "No worker was slow." not in lines


def test_worker_that_hung_before_the_first_update_is_named() -> None:
    lines = reported(*begin(), Awaited(30.0, 1, 0.0))
    assert lines[-1].startswith("Worker 1 hung: it was asked for a gradient at ")
