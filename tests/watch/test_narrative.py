# SPDX-License-Identifier: BSD-3-Clause
"""The first lines of the report: how a run went, and who left."""

from msgspec import structs

from paceline.core.events import Fate
from paceline.core.ledger import Ledger, Member
from paceline.spec import RunSpec
from paceline.trace.schema import (
    Ended,
    Gap,
    Header,
    Joined,
    Left,
    Paused,
    Restored,
    Resumed,
    Stopped,
    Trace,
    Update,
)
from paceline.watch.report import report
from small_traces import SYNC, THREE, begin, reported, sync_round

ACCEPTED, LATE, CANCELLED, NON_FINITE = Fate.ACCEPTED, Fate.LATE, Fate.CANCELLED, Fate.NON_FINITE


def test_run_without_updates_says_why() -> None:
    records = [*begin(workers=1), Ended(9.0, 0, reason="stalled: nobody came")]
    assert reported(*records) == [
        "The run made no updates (stalled: nobody came).",
        "Worker 1 never joined.",
    ]


def test_run_that_ended_early_says_how_far_it_came() -> None:
    header = Header(source="run", policy="sync", workers=2, steps=1000)
    first = reported(*THREE, Ended(3.0, 3, reason="stopped"), header=header)[0]
    assert first == (
        "sync with 2 workers: 3 updates in 3 s (1/s), 192 samples; stopped at update 3 of 1,000."
    )
    first = reported(*THREE, Ended(3.0, 3, reason="no hope: none"), header=header)[0]
    assert first.endswith("; failed at update 3 of 1,000: no hope: none.")


def test_updates_that_did_not_step_are_counted() -> None:
    def skipping(*updates: int) -> list[str]:
        records = [
            structs.replace(r, skipped=r.update in updates) if isinstance(r, Update) else r
            for r in THREE
        ]
        return reported(*records, Ended(3.0, 3))

    assert skipping(2)[1] == (
        "1 of 3 updates did not change the parameters: the averaged gradient was not finite."
    )
    assert skipping(2, 3)[1].startswith("2 of 3 updates did not change the parameters")
    assert skipping(1, 2, 3)[1] == (
        "No update changed the parameters: the averaged gradients were not finite."
    )
    assert not any("did not change" in line for line in skipping())


def test_run_without_a_number_of_steps_says_where_it_was_stopped() -> None:
    header = Header(source="run", policy="sync", workers=2)
    first = reported(*THREE, Ended(3.0, 3, reason="stopped"), header=header)[0]
    assert first.endswith("; stopped at update 3.")


def test_run_that_all_workers_left_says_so() -> None:
    header = Header(source="run", policy="sync", workers=2, steps=1000)
    end = [Stopped(5.0), Ended(5.0, 3, reason="stopped")]
    first = reported(*THREE, Left(4.0, 0), Left(4.5, 1), *end, header=header)[0]
    assert first.endswith("; stopped at update 3 of 1,000: all workers had left.")
    first = reported(*THREE, Left(4.0, 0), Left(4.5, 1), Joined(4.6, 1), *end, header=header)[0]
    assert first.endswith("; stopped at update 3 of 1,000.")


def test_run_that_ended_with_the_script_of_worker_0_says_so() -> None:
    header = Header(source="run", policy="sync", workers=2, steps=1000)
    end = [Stopped(5.0, at_once=True), Ended(5.0, 3, reason="stopped")]
    first = reported(*THREE, *end, header=header)[0]
    assert first.endswith("; stopped at update 3 of 1,000: the script of worker 0 had ended.")


def test_incomplete_trace_is_reported_as_such() -> None:
    assert reported(*THREE)[0].endswith("; the trace breaks off at update 3 of 3.")


def test_active_run_is_reported_as_still_running() -> None:
    header = Header(source="run", policy="sync", workers=2, steps=1000)
    first = report(Trace(header, THREE, is_growing=True))[0]
    assert first.endswith("; still running at update 3 of 1,000.")
    [first] = report(Trace(SYNC, begin(), is_growing=True))
    assert first == "The run is still running and has made no updates yet."


def test_negligible_staleness_is_not_mentioned() -> None:
    """One gradient in 100 is one update stale: on average that is 0.0."""
    rounds = [record for n in range(1, 51) for record in sync_round(n, float(n))]
    old = structs.replace(rounds[0], staleness=1)
    assert not any("stale on average" in line for line in reported(*begin(), old, *rounds[1:]))
    assert any(
        "0.5 updates stale on average" in line for line in reported(*begin(), old, *rounds[1:3])
    )


def test_logged_value_that_is_not_finite_is_reported_as_such() -> None:
    update = Update(4.0, 4, (0,), 2, scalars={"loss": None, "accuracy": 0.5})
    assert reported(*THREE, update)[1] == "Last logged: loss not finite, accuracy 0.5."


def test_lost_updates_are_listed() -> None:
    again = [*begin(4.0), *sync_round(2, 4.0), *sync_round(3, 5.0), Ended(6.0, 3)]
    lines = reported(*THREE, Restored(3.0, 1, SYNC, 2.5), *again)
    assert (
        "The server was restored once (2.5 s down): 2 updates (2 to 3) were lost and redone."
        in lines
    )
    assert "40 % of the computation was wasted: dropped, cancelled or lost." in lines
    assert lines[0].startswith("sync with 2 workers: 3 updates in 6 s (0.5/s), 192 samples;")


def test_lost_updates_that_were_not_redone() -> None:
    lines = reported(*THREE, Restored(3.0, 2, SYNC), Restored(3.0, 2, SYNC))
    assert "The server was restored twice: 1 update (3) was lost." in lines


def test_restoration_without_losses_says_so() -> None:
    lines = reported(*THREE, Restored(3.0, 3, SYNC, 60.0))
    assert "The server was restored once (60 s down); no update was lost." in lines


def test_resumed_run_is_not_reported_as_a_killed_server() -> None:
    stopped = [*THREE, Ended(3.0, 3, reason="stopped")]
    lines = reported(*stopped, Restored(3.0, 3, SYNC, 60.0, resumed=True))
    assert "The run was resumed once, after 60 s; no update was lost." in lines
    assert not any("server" in line for line in lines)


def test_resumes_and_restorations_are_reported_separately() -> None:
    lines = reported(
        *THREE,
        Restored(3.0, 3, SYNC, 60.0, resumed=True),
        Restored(3.0, 2, SYNC, 1.5),
        Restored(3.0, 1, SYNC, 30.0, resumed=True),
    )
    assert lines[lines.index("") - 2 : lines.index("")] == [
        "The run was resumed twice, after 90 s in total: 1 update (2) was lost.",
        "The server was restored once (1.5 s down): 1 update (3) was lost.",
    ]


def test_earlier_policy_is_mentioned() -> None:
    header = Header(source="run", policy="backup:1", workers=2, steps=9)
    lines = reported(*THREE, Restored(3.0, 3, header))
    assert lines[0].startswith("backup:1 with 2 workers: 3 updates in 3 s")
    assert "The rule was sync until update 3." in lines


def test_pause_is_reported_with_its_reason() -> None:
    pause = [Paused(3.0, "1 of at least 2 workers; waits for 1"), Resumed(5.0)]
    lines = reported(*THREE, *pause)
    assert "Paused once for 2 s: 1 of at least 2 workers; waits for 1." in lines


def test_several_pauses_are_added_up() -> None:
    pauses = [Paused(3.0, "a"), Resumed(5.0), Paused(6.0, "b"), Resumed(16.0)]
    lines = reported(*THREE, *pauses)
    assert "Paused twice for 12 s in total, at most 10 s at a time: b." in lines


def test_pause_without_an_end_is_reported() -> None:
    assert "Paused once and never resumed: a." in reported(*THREE, Paused(3.0, "a"))


def test_worker_that_left_and_came_back_is_reported() -> None:
    once = [Left(3.0, 1, "the connection was closed"), Joined(4.0, 1)]
    lines = reported(*THREE, *once)
    assert "Worker 1 left at 3 s (the connection was closed) and came back." in lines


def test_times_are_relative_to_the_beginning_of_the_run() -> None:
    """The server started 100 s earlier and waited for workers."""
    late = [structs.replace(r, t=r.t + 100.0) for r in THREE]
    lines = reported(*late, Left(103.5, 1, "killed"))
    assert "3 updates in 3 s" in lines[0]
    assert "Worker 1 left at 3.5 s (killed) and did not come back." in lines
    lines = reported(Joined(98.0, 1), Left(99.0, 1, "killed"), *late)
    assert "Worker 1 left before the run began (killed) and came back." in lines


def test_worker_that_left_often_gets_one_line() -> None:
    departures = [Left(3.0, 1, "killed"), Joined(4.0, 1), Left(5.0, 1, "lost")]
    lines = reported(*THREE, *departures)
    assert "Worker 1 left twice (killed and lost) and came back once." in lines


def test_leaving_after_the_end_is_not_mentioned() -> None:
    assert not any("left" in line for line in reported(*THREE, Left(3.5, 1, "x"), Ended(3.0, 3)))


def test_many_departures_are_counted() -> None:
    header = Header(source="run", policy="backup:1", workers=9)
    left = [Left(3.0, worker, "killed") for worker in range(2, 9)]
    lines = reported(
        *(Joined(0.0, w) for w in range(2, 9)), *THREE, *left, Joined(4.0, 2), header=header
    )
    assert (
        "7 workers left 7 times in total and came back once; most common reason: killed." in lines
    )


# ---- gaps ----


def gap(t: float, version: int, *, paused: bool = False, here: tuple[int, ...] = (0, 1)) -> Gap:
    """Return a gap after which these of two workers are in the run."""
    ledger = Ledger(RunSpec(workers=2), None, version=version, begun=True, paused=paused)
    ledger.members.update({worker: Member() for worker in here})
    ledger.turns.update({0: 5, 1: 5})
    return Gap(t, version, ledger=ledger)


def test_run_that_ended_in_a_gap_says_how_far_it_came() -> None:
    header = Header(source="run", policy="sync", workers=2, steps=1000)
    first = reported(*THREE, gap(90.0, 80), Ended(99.0, 80, reason="stopped"), header=header)[0]
    assert first == (
        "sync with 2 workers: 3 of 80 updates (the trace has gaps) in 3 s (1/s), 192 samples; "
        "stopped at update 80 of 1,000."
    )


def test_lost_updates_that_were_redone_in_a_gap_are_redone() -> None:
    lines = reported(*THREE, Restored(3.0, 1, SYNC), gap(9.0, 8), *sync_round(9, 9.0))
    assert "The server was restored once: 2 updates (2 to 3) were lost and redone." in lines


def test_pause_that_ended_in_a_gap_has_no_length() -> None:
    paused = Paused(3.0, "too few workers")
    again = [Paused(50.0, "too few workers"), Resumed(52.0)]
    lines = reported(*THREE, paused, gap(40.0, 30), *again)
    assert "Paused twice for 2 s: too few workers." in lines
    assert "Paused once: too few workers." in reported(*THREE, paused, gap(40.0, 30))
    still = reported(*THREE, paused, gap(40.0, 3, paused=True))
    assert "Paused once and never resumed: too few workers." in still
    lines = reported(*THREE, paused, gap(40.0, 3, paused=True), Resumed(43.0))
    assert "Paused once for 40 s: too few workers." in lines


def test_worker_that_came_back_in_a_gap_is_back() -> None:
    left = Left(3.0, 1, "killed")
    assert "Worker 1 left at 3 s (killed) and came back." in reported(*THREE, left, gap(9.0, 8))
    gone = reported(*THREE, left, gap(9.0, 8, here=(0,)))
    assert "Worker 1 left at 3 s (killed) and did not come back." in gone


def test_worker_that_joined_and_left_in_a_gap_has_joined() -> None:
    for hidden in (gap(9.0, 8, here=(0,)), Restored(9.0, 8, SYNC, turns={1: 5})):
        lines = reported(Joined(0.0, 0), Resumed(0.0), hidden, *sync_round(9, 9.0)[::2])
        assert not any("never joined" in line for line in lines)
