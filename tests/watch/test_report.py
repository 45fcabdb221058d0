# SPDX-License-Identifier: BSD-3-Clause
"""A run in plain words: every statement on a trace small enough to be told by hand."""

import pytest
from msgspec import structs

from paceline.core.events import Fate
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import (
    Ended,
    Gradient,
    Header,
    Joined,
    Left,
    Paused,
    Record,
    Restored,
    Resumed,
    Stopped,
    Trace,
    Update,
)
from paceline.watch.report import report

ACCEPTED, LATE, CANCELLED, NON_FINITE = Fate.ACCEPTED, Fate.LATE, Fate.CANCELLED, Fate.NON_FINITE

SYNC = Header(source="run", policy="sync", workers=2, steps=3)


def begin(t: float = 0.0, workers: int = 2) -> list[Record]:
    return [*(Joined(t, worker) for worker in range(workers)), Resumed(t)]


def sync_round(update: int, asked_at: float, *, slow_s: float = 1.0) -> list[Record]:
    """Worker 0 takes half a second, worker 1 as long as it is told."""
    t, version = asked_at + slow_s, update - 1
    return [
        Gradient(asked_at + 0.5, 0, update, version, ACCEPTED, 0, asked_at, 0.5, 32),
        Gradient(t, 1, update, version, ACCEPTED, 0, asked_at, slow_s, 32),
        Update(t, update, (0, 1), 2, scalars={"loss": 1 / update}),
    ]


THREE = [*begin(), *sync_round(1, 0.0), *sync_round(2, 1.0), *sync_round(3, 2.0)]


def told(*records: Record, header: Header = SYNC) -> list[str]:
    return report(Trace(header, list(records)))


def simulated(policy: str, latency: str, workers: int = 8, steps: int = 600) -> list[str]:
    cluster = Cluster.parse(latency)
    return report(simulate(policy, cluster, RunSpec(workers=workers, steps=steps)))


def test_a_whole_report_reads_like_this() -> None:
    assert told(*THREE, Ended(3.0, 3)) == [
        "sync with 2 workers: 3 updates in 3 s, 1 a second, 192 samples; finished.",
        "Logged last: loss 0.3333.",
        "",
        "worker  accepted  median  waited for",
        "0              3  500 ms           -",
        "1              3     1 s       1.5 s",
        "",
        "Too few gradients to tell who was slow.",
        "1.5 s (50 % of the time) went into waiting: for worker 1 1.5 s (50 %).",
    ]


# ---- how it went ----


def test_a_run_that_made_no_update_says_why() -> None:
    records = [*begin(workers=1), Ended(9.0, 0, reason="stalled: nobody came")]
    assert told(*records) == [
        "The run made no update; it ended: stalled: nobody came.",
        "Worker 1 never joined.",
    ]


def test_a_run_that_ended_early_says_how_far_it_came() -> None:
    header = Header(source="run", policy="sync", workers=2, steps=1000)
    first = told(*THREE, Ended(3.0, 3, reason="stopped"), header=header)[0]
    assert first == (
        "sync with 2 workers: 3 updates in 3 s, 1 a second, 192 samples; "
        "stopped at update 3 of 1,000."
    )
    first = told(*THREE, Ended(3.0, 3, reason="no hope: none"), header=header)[0]
    assert first.endswith("; failed at update 3 of 1,000: no hope: none.")


def test_a_run_that_ends_by_something_else_than_updates_says_only_where_it_was_stopped() -> None:
    header = Header(source="run", policy="sync", workers=2)
    first = told(*THREE, Ended(3.0, 3, reason="stopped"), header=header)[0]
    assert first.endswith("; stopped at update 3.")


def test_a_run_that_was_stopped_because_nobody_was_left_says_so() -> None:
    header = Header(source="run", policy="sync", workers=2, steps=1000)
    end = [Stopped(5.0), Ended(5.0, 3, reason="stopped")]
    first = told(*THREE, Left(4.0, 0), Left(4.5, 1), *end, header=header)[0]
    assert first.endswith("; stopped at update 3 of 1,000: all workers had left.")
    first = told(*THREE, Left(4.0, 0), Left(4.5, 1), Joined(4.6, 1), *end, header=header)[0]
    assert first.endswith("; stopped at update 3 of 1,000.")


def test_a_trace_that_breaks_off_says_so() -> None:
    assert told(*THREE)[0].endswith("; the trace breaks off at update 3 of 3.")


def test_a_run_that_goes_on_says_so() -> None:
    header = Header(source="run", policy="sync", workers=2, steps=1000)
    first = report(Trace(header, THREE, is_growing=True))[0]
    assert first.endswith("; still running at update 3 of 1,000.")
    [first] = report(Trace(SYNC, begin(), is_growing=True))
    assert first == "The run has made no update yet; still running."


def test_gradients_that_are_hardly_old_are_not_called_so() -> None:
    """One in 100 is one update old: on average that is 0.0."""
    rounds = [record for n in range(1, 51) for record in sync_round(n, float(n))]
    old = structs.replace(rounds[0], staleness=1)
    assert not any("old on average" in line for line in told(*begin(), old, *rounds[1:]))
    assert any("0.5 updates old on average" in line for line in told(*begin(), old, *rounds[1:3]))


def test_what_was_logged_that_is_not_finite_is_called_so() -> None:
    update = Update(4.0, 4, (0,), 2, scalars={"loss": None, "accuracy": 0.5})
    assert told(*THREE, update)[1] == "Logged last: loss not finite, accuracy 0.5."


def test_lost_updates_are_told_by_their_numbers() -> None:
    again = [*begin(4.0), *sync_round(2, 4.0), *sync_round(3, 5.0), Ended(6.0, 3)]
    lines = told(*THREE, Restored(3.0, 1, SYNC, 2.5), *again)
    assert (
        "The server was restored once, 2.5 s without one: 2 updates (2 to 3) were lost and made "
        "again." in lines
    )
    assert "40 % of the computing came to nothing: dropped, cut short or lost." in lines
    assert lines[0].startswith("sync with 2 workers: 3 updates in 6 s, 0.5 a second, 192 samples;")


def test_lost_updates_that_were_not_made_again_are_only_lost() -> None:
    lines = told(*THREE, Restored(3.0, 2, SYNC), Restored(3.0, 2, SYNC))
    assert "The server was restored twice: 1 update (3) was lost." in lines


def test_a_restoration_that_lost_nothing_says_so() -> None:
    lines = told(*THREE, Restored(3.0, 3, SYNC, 60.0))
    assert "The server was restored once, 60 s without one; no update was lost." in lines


def test_a_run_that_was_resumed_is_not_one_whose_server_was_killed() -> None:
    stopped = [*THREE, Ended(3.0, 3, reason="stopped")]
    lines = told(*stopped, Restored(3.0, 3, SYNC, 60.0, resumed=True))
    assert "The run was resumed once, after 60 s; no update was lost." in lines
    assert not any("server" in line for line in lines)


def test_what_was_resumed_and_what_was_restored_are_told_apart() -> None:
    lines = told(
        *THREE,
        Restored(3.0, 3, SYNC, 60.0, resumed=True),
        Restored(3.0, 2, SYNC, 1.5),
        Restored(3.0, 1, SYNC, 30.0, resumed=True),
    )
    assert lines[lines.index("") - 2 : lines.index("")] == [
        "The run was resumed twice, after 90 s in all: 1 update (2) was lost.",
        "The server was restored once, 1.5 s without one: 1 update (3) was lost.",
    ]


def test_another_policy_before_is_told() -> None:
    header = Header(source="run", policy="backup:1", workers=2, steps=9)
    lines = told(*THREE, Restored(3.0, 3, header))
    assert lines[0].startswith("backup:1 with 2 workers: 3 updates in 3 s")
    assert "Until update 3 the policy was sync." in lines


def test_a_pause_is_told_with_its_reason() -> None:
    pause = [Paused(3.0, "1 of at least 2 workers; waits for 1"), Resumed(5.0)]
    lines = told(*THREE, *pause)
    assert "Paused once for 2 s: 1 of at least 2 workers; waits for 1." in lines


def test_several_pauses_are_added_up() -> None:
    pauses = [Paused(3.0, "a"), Resumed(5.0), Paused(6.0, "b"), Resumed(16.0)]
    lines = told(*THREE, *pauses)
    assert "Paused twice for 12 s in all, the longest for 10 s: b." in lines


def test_a_pause_without_an_end_is_told() -> None:
    assert "Paused once, and did not go on: a." in told(*THREE, Paused(3.0, "a"))


def test_a_worker_that_left_and_came_back_is_told() -> None:
    once = [Left(3.0, 1, "the connection was closed"), Joined(4.0, 1)]
    lines = told(*THREE, *once)
    assert "Worker 1 left at 3 s (the connection was closed), and came back." in lines


def test_times_are_counted_from_the_beginning_of_the_run() -> None:
    """Its server began 100 s before, and waited for workers."""
    late = [structs.replace(r, t=r.t + 100.0) for r in THREE]
    lines = told(*late, Left(103.5, 1, "killed"))
    assert "3 updates in 3 s" in lines[0]
    assert "Worker 1 left at 3.5 s (killed), and did not come back." in lines
    lines = told(Joined(98.0, 1), Left(99.0, 1, "killed"), *late)
    assert "Worker 1 left before the run began (killed), and came back." in lines


def test_a_worker_that_left_often_is_told_once() -> None:
    goings = [Left(3.0, 1, "killed"), Joined(4.0, 1), Left(5.0, 1, "lost")]
    lines = told(*THREE, *goings)
    assert "Worker 1 left twice (killed and lost), and came back once." in lines


def test_to_leave_after_the_end_is_no_news() -> None:
    assert not any("left" in line for line in told(*THREE, Left(3.5, 1, "x"), Ended(3.0, 3)))


def test_many_that_left_are_counted() -> None:
    header = Header(source="run", policy="backup:1", workers=9)
    left = [Left(3.0, worker, "killed") for worker in range(2, 9)]
    lines = told(
        *(Joined(0.0, w) for w in range(2, 9)), *THREE, *left, Joined(4.0, 2), header=header
    )
    assert "7 workers left, 7 times in all, and came back 1 times, mostly: killed." in lines


# ---- the table ----


def test_the_table_has_a_column_for_every_fate_that_occurred() -> None:
    extra = [
        Gradient(3.5, 0, 4, 2, LATE, 1, 3.0, 0.5, 32),
        Gradient(3.6, 1, 4, 3, NON_FINITE, 0, 3.0, 0.6, 32),
        Gradient(3.7, 1, 5, 3, CANCELLED, 0, 3.6, 0.1, 0),
    ]
    lines = told(*THREE, *extra)
    table = lines[lines.index("") + 1 :][:3]
    assert table == [
        "worker  accepted  late  cancelled  non-finite  median  waited for",
        "0              3     1          0           0  500 ms           -",
        "1              3     0          1           1     1 s       1.5 s",
    ]


def test_what_was_lost_with_the_server_has_a_column_of_its_own() -> None:
    lines = told(*THREE, Restored(3.0, 1, SYNC))
    assert lines[lines.index("") + 1 :][:2] == [
        "worker  accepted  lost  median  waited for",
        "0              1     2  500 ms           -",
    ]


def test_of_many_workers_the_worst_are_shown_and_the_others_added_up() -> None:
    lines = simulated("backup:2", "45ms + exp:5ms; worker 33 x2", workers=64, steps=60)
    table = lines[lines.index("") + 1 : lines.index("", lines.index("") + 1)]
    assert len(table) == 1 + 16 + 1
    assert any(line.startswith("33 ") for line in table)
    assert table[-1].startswith("48 others")


# ---- who was slow ----


def paced(*times: list[float], policy: str = "async") -> list[str]:
    """The report of workers that took so long for their gradients, after one to warm up."""
    records = begin(workers=len(times))
    for worker, own in enumerate(times):
        records += [
            Gradient(100.0 + i, worker, 1 + i, 0, ACCEPTED, 0, 0.0, took_s)
            for i, took_s in enumerate([100.0, *own])
        ]
    header = Header(source="run", policy=policy, workers=len(times))
    return told(*records, Update(200.0, 1, (0,), 1), header=header)


EVEN = [1.0] * 10


def test_nobody_was_slow() -> None:
    assert "Nobody was slow." in paced(EVEN, EVEN)


def test_nobody_was_slow_as_far_as_can_be_seen() -> None:
    lines = simulated("backup:1", "45ms + exp:1ms", workers=4, steps=50)
    [line] = [line for line in lines if "slow" in line]
    assert line.startswith("Nobody was slow, as far as can be seen; ")
    assert line.endswith(" gradients could not show, being cut short.")


def test_always_slow() -> None:
    line = (
        "Worker 2 is always slow: a gradient takes it 1.8 s, 1.8 times as long as the others (1 s)."
    )
    assert line in paced(EVEN, EVEN, [1.8] * 10)


def test_sometimes_slow() -> None:
    assert (
        "Worker 1 is sometimes slow: 3 of its 13 gradients took 4 s in the median instead of 1 s, "
        "9 s at worst." in paced(EVEN, [*EVEN, 3.0, 4.0, 9.0])
    )


def test_once_slow() -> None:
    line = "Worker 1 was slow once: 60 s instead of 1 s, at 111 s."
    assert line in paced(EVEN, [*EVEN, 60.0])


def test_what_most_share_is_told_in_one_line() -> None:
    uneven = [*EVEN, 3.0, 5.0]
    assert (
        "All 3 workers are sometimes slow: 17 % of their gradients (6 of 36) took 3 s in the "
        "median, 5 s at worst." in paced(uneven, uneven, uneven)
    )


def test_who_has_far_more_of_it_than_the_others_is_named() -> None:
    few, many = [1.0] * 40 + [9.0] * 2, [1.0] * 40 + [9.0] * 12
    [line] = [line for line in paced(few, few, few, many) if "sometimes" in line]
    assert line.endswith("; most often worker 3, 12 of 52.")


@pytest.mark.parametrize("policy", ["sync", "deadline", "async"])
def test_a_slow_worker_of_a_simulated_run_is_named(policy: str) -> None:
    lines = simulated(policy, "45ms + exp:5ms; worker 7 x2")
    assert [line[:24] for line in lines if "always" in line] == ["Worker 7 is always slow:"]


@pytest.mark.parametrize("policy", ["backup:1", "batchsync:8"])
def test_one_that_is_mostly_cut_short_is_named_and_not_called_slow(policy: str) -> None:
    lines = simulated(policy, "45ms + exp:5ms; worker 7 x2")
    [line] = [line for line in lines if "too late" in line]
    assert line.startswith("Worker 7 is mostly too late: ")
    assert line.endswith(" ms, those of the others 48.4 ms.")
    assert not any("slow" in line for line in lines)


def test_hiccups_of_a_simulated_run_are_told_of_all() -> None:
    lines = simulated("sync", "45ms + exp:5ms + 5% exp:500ms")
    assert [line[:34] for line in lines if "slow" in line] == ["All 8 workers are sometimes slow: "]


# ---- who was waited for ----


def test_a_rule_that_never_waits_says_so() -> None:
    lines = simulated("softsync:2", "45ms + exp:5ms", steps=50)
    assert "Nobody waits under softsync:2: who has reported goes on at once." in lines


def test_where_all_come_at_once_there_is_no_waiting() -> None:
    assert "Hardly any time went into waiting." in simulated("sync", "50ms", steps=50)


def test_who_stands_out_is_named_and_the_others_are_added_up() -> None:
    lines = simulated("sync", "45ms + exp:5ms; worker 7 x2")
    [line] = [line for line in lines if "went into waiting" in line]
    assert ": for worker 7 " in line
    assert ", for 7 others " in line


def test_where_nobody_stands_out_nobody_is_named() -> None:
    lines = simulated("sync", "45ms + exp:5ms")
    [line] = [line for line in lines if "went into waiting" in line]
    assert ": for 8 workers " in line


def test_waiting_in_vain_is_told() -> None:
    lines = simulated("deadline:after=60ms", "45ms + exp:5ms + 20% 500ms")
    [line] = [line for line in lines if "went into waiting" in line]
    assert "in vain, until the time was up, " in line


# ---- what was learnt ----


def test_a_worker_whose_data_is_hardly_learnt_is_named() -> None:
    lines = simulated("backup:1", "45ms + exp:5ms + 3% 500ms; worker 7 x2")
    [line] = [line for line in lines if "learnt" in line]
    assert line.startswith("Worker 7 gave ")
    assert line.endswith(" of what was learnt; an even share is 12 %.")


def test_a_worker_of_whom_nothing_is_learnt_is_named() -> None:
    lines = simulated("backup:1", "50ms; worker 3 x2", workers=4, steps=50)
    assert "Nothing of worker 3 was learnt." in lines
    assert not any("gave" in line for line in lines)


def test_even_shares_are_not_worth_a_word() -> None:
    assert not any("learnt" in line for line in simulated("sync", "45ms + exp:5ms"))


def test_the_lines_are_plain_text() -> None:
    lines = simulated("backup:1", "45ms + exp:5ms + 5% exp:500ms; worker 7 x1.8")
    assert all(line.isascii() and line.isprintable() and "[" not in line for line in lines)
