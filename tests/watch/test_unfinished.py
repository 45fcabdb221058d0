# SPDX-License-Identifier: BSD-3-Clause
"""Workers whose last turn was unusually long are found, although nobody waited for them."""

import pytest

from failures import troubled
from paceline.core.events import Fate
from paceline.trace.schema import (
    WITH_NOTICE,
    Ended,
    Gap,
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
from paceline.watch import unfinished as module
from paceline.watch.report import report
from paceline.watch.unfinished import Unfinished, unfinished

ACCEPTED, LATE = Fate.ACCEPTED, Fate.LATE


def turn(worker: int, asked_at: float, t: float, fate: Fate = ACCEPTED) -> Gradient:
    return Gradient(t, worker, 1, 0, fate, 0, asked_at, t - asked_at)


def traced(policy: str, *records: Record, end: float | None = 20.0) -> Trace:
    """Return a trace in which both workers have finished a turn of a second."""
    begin = [Joined(0.0, 0), Joined(0.0, 1), Resumed(0.0), turn(0, 0.0, 1.0), turn(1, 0.0, 1.0)]
    ended = [] if end is None else [Ended(end, 1)]
    return Trace(Header(source="run", policy=policy, workers=2), [*begin, *records, *ended])


@pytest.mark.parametrize("policy", ["async", "softsync:2", "batchsync:2"])
def test_turn_begins_with_the_last_report_if_workers_never_wait(policy: str) -> None:
    trace = traced(policy, turn(0, 1.0, 19.0))
    assert unfinished(trace) == [Unfinished(1, 1.0, 19.0, 1.0, has_left=False)]


@pytest.mark.parametrize("policy", ["sync", "backup:1", "deadline:after=4s", "delayed:2"])
def test_turn_begins_with_the_next_update_if_workers_wait_for_it(policy: str) -> None:
    update = Update(3.0, 1, (0, 1), 2)
    trace = traced(policy, update, turn(0, 3.0, 19.0))
    assert unfinished(trace) == [Unfinished(1, 3.0, 17.0, 1.0, has_left=False)]
    assert unfinished(traced(policy)) == [], "both wait for the update"


@pytest.mark.parametrize("policy", ["ssp:2", "mine:Rule"])
def test_worker_that_may_wait_is_found_only_if_it_left(policy: str) -> None:
    assert unfinished(traced(policy, Update(3.0, 1, (0, 1), 2))) == []
    trace = traced(policy, Left(12.0, 1, "killed", 2.0))
    assert unfinished(trace) == [Unfinished(1, 2.0, 10.0, 1.0, has_left=True)]


def test_worker_that_is_killed_after_the_end_was_busy_until_the_end() -> None:
    left = Left(80.0, 1, "killed", 1.0)
    [found] = unfinished(traced("async", turn(0, 1.0, 19.0), left))
    assert found == Unfinished(1, 1.0, 19.0, 1.0, has_left=False)
    late = (
        turn(0, 1.0, 19.0),
        turn(1, 1.0, 2.0),
        turn(1, 2.0, 19.5),
        Left(80.0, 1, "killed", 19.5),
    )
    assert unfinished(traced("async", *late)) == [], "it hung only after the end"


@pytest.mark.parametrize(
    "after",
    [
        (turn(1, 1.0, 15.0),),  # it was slow
        (turn(1, 1.0, 25.0, LATE),),  # it ended its turn after the end of the run
        (Left(12.0, 1),),
        (Left(12.0, 1, WITH_NOTICE, 2.0),),
        (Left(3.0, 1, "killed", 1.0),),  # less than LONG_S
        (turn(1, 1.0, 7.0), Left(24.0, 1, "killed", 7.0)),  # as long as its other turns
        (Paused(2.0, "too few workers"),),
        (Stopped(2.0),),
        (Gap(19.0, 1),),
        (Restored(19.0, 0, Header(source="run", policy="async", workers=2)),),
        (Left(2.0, 1), Joined(3.0, 1)),
    ],
)
def test_other_workers_are_not_listed(after: tuple[Record, ...]) -> None:
    assert [one for one in unfinished(traced("async", *after)) if one.worker == 1] == []


def test_worker_without_a_finished_turn_is_not_listed() -> None:
    """What is usual for it isn't known."""
    assert unfinished(traced("async", Joined(1.0, 2), Left(18.0, 2, "killed", 1.0), end=3.0)) == []


@pytest.mark.parametrize(
    ("record", "end", "what"),
    [
        (None, 20.0, "had not sent it when the run ended, 19 s later"),
        (None, None, "had not sent it when the trace broke off, 18 s later"),
        (Left(11.0, 1, "killed", 1.0), 20.0, "had not sent it when it left, 10 s later"),
    ],
)
def test_report_names_the_worker(record: Record | None, end: float | None, what: str) -> None:
    after = [turn(0, 1.0, 19.0), *([] if record is None else [record])]
    after.sort(key=lambda one: one.t)
    lines = report(traced("async", Update(1.0, 1, (0, 1), 2), *after, end=end))
    named = (
        f"Worker 1 was asked for a gradient at 1 s and {what}; its others took at most 1 s. It may "
        "have hung, or was busy with something else, such as evaluating."
    )
    assert named in lines
    assert "No worker was slow." not in lines


HANGING = """
def trouble(run):
    time.sleep(0.01)
    if run.worker == 1 and run.version >= 20:
        END
"""


@pytest.mark.parametrize("policy", ["async", "backup:1"])
@pytest.mark.parametrize("is_hung", [True, False])
def test_worker_that_hangs_while_others_finish_the_run(launch, monkeypatch, policy, is_hung):
    """The other one is busy until the end, and then ends its script."""
    end = "signal.pause()" if is_hung else "wait_until(lambda: in_the_trace(update=UPDATES))"
    steps = 300
    source = HANGING.replace("END", end.replace("UPDATES", str(steps)))
    ran = launch(troubled(source), workers=3, steps=steps, policy=policy, grace_s=2.0)
    monkeypatch.setattr(module, "LONG_S", 0.3)
    named = [line for line in report(ran.trace) if "It may have hung" in line]
    assert [line[:8] for line in named] == ["Worker 1"] * is_hung
