# SPDX-License-Identifier: BSD-3-Clause
"""With too few workers the run pauses, says what it waits for, and doesn't wait forever."""

import pytest

from failures import counts, troubled
from paceline.trace.schema import Ended, Missing, Paused, Resumed

DIES = """
def trouble(run):
    if run.worker == 1 and run.version == 3:
        strike()
"""


def test_run_with_too_few_workers_pauses_and_ends_with_a_checkpoint(launch):
    ran = launch(troubled(DIES), min_workers=2, patience_s=0.6, steps=10)
    assert ran.code == 1
    assert "paused: 1 of at least 2 workers; waits for 1" in ran.out
    assert "the run failed: only 1 of at least 2 workers were here for 0.6 s" in ran.err
    assert len(counts(ran.trace)) in (3, 4)  # the update during which it was killed may be made
    end = ran.trace.records[-1]
    assert isinstance(end, Ended)
    assert end.reason.startswith("only 1 of at least 2 workers")
    assert [path.stem for path in ran.folder.glob("checkpoints/*.ckpt")] == [f"{end.version:010}"]


def test_worker_that_returns_in_time_ends_the_pause(launch):
    comes_back = DIES.replace("run.version == 3", 'run.version == 3 and not was_told("struck-1")')
    ran = launch(troubled(comes_back), min_workers=2, patience_s=60, steps=10, restart=True)
    assert ran.code == 0
    assert len(counts(ran.trace)) == 10
    assert len([r for r in ran.trace.records if isinstance(r, Paused)]) == 1
    assert len([r for r in ran.trace.records if isinstance(r, Resumed)]) == 2


@pytest.mark.parametrize("policy", ["sync", "backup:1"])
def test_run_begins_without_a_worker_that_dies_early(launch, policy):
    dies_early = "if WORKER == 2: strike()\ndef trouble(run): pass\n"
    ran = launch(troubled(dies_early), workers=3, policy=policy, steps=5)
    assert len(counts(ran.trace)) == 5
    if policy == "sync":  # under the other rule the run may begin before that is known
        assert [r.worker for r in ran.trace.records if isinstance(r, Missing)] == [2]
        assert "not waiting for worker 2" in ran.out


def test_run_begins_without_a_worker_whose_script_ends_before_it_joins(launch):
    ends_early = "if WORKER == 1: sys.exit(0)\ndef trouble(run): pass\n"
    ran = launch(troubled(ends_early), steps=5)
    assert ran.code == 0
    assert counts(ran.trace) == [1] * 5


def test_run_that_cannot_begin_ends(launch):
    dies_early = "if WORKER == 1: strike()\ndef trouble(run): pass\n"
    ran = launch(troubled(dies_early), min_workers=2, patience_s=0.2, steps=5)
    assert ran.code == 1
    assert counts(ran.trace) == []
    assert "the run failed: only 1 of at least 2 workers were here for 0.2 s" in ran.err
