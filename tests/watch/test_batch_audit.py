# SPDX-License-Identifier: BSD-3-Clause
"""The proof that every batch was used once, and what it refuses."""

import pytest

from paceline.core.events import Fate
from paceline.errors import TraceError
from paceline.leases import Use
from paceline.trace.schema import Ended, Gradient, Header, Restored, Skipped
from paceline.watch.batch_audit import BatchAudit

HEADER = Header(source="run", policy="sync", workers=2)


def gradient(worker, *numbers, fate=Fate.ACCEPTED, new_samples=None):
    uses = (Use(0, numbers),)
    return Gradient(1.0, worker, 1, 0, fate, 0, 0.0, 0.0, uses=uses, new_samples=new_samples)


def skipped(worker, *numbers):
    return Skipped(1.0, worker, Use(0, numbers))


def restored(next_number, *undone):
    return Restored(1.0, 0, HEADER, data=[[0, next_number, list(undone)]])


def ended(next_number, *undone, unused=()):
    return Ended(1.0, 1, unused, data=[[0, next_number, list(undone)]])


def check(*records):
    batches = BatchAudit()
    for line, record in enumerate(records):
        batches.check(record, f"line {line}")


@pytest.mark.parametrize(
    "records",
    [
        [gradient(0, 0), gradient(1, 1), ended(2)],
        [gradient(0, 0), ended(3, 1, 2)],
        [gradient(0, 0), skipped(1, 1), ended(2)],
        [gradient(0, 0, fate=Fate.LATE), gradient(1, 0), ended(1)],
        # Another optimizer's gradient on the same batch.
        [gradient(0, 0, new_samples=4), gradient(0, 0, new_samples=0), ended(1)],
        # What was accepted since the checkpoint is used again.
        [gradient(0, 0), gradient(1, 1), restored(2, 1), gradient(0, 1), ended(2)],
        [skipped(0, 0), restored(1, 0), gradient(1, 0), ended(1)],
        # Accepted, but the run ended before its update.
        [gradient(0, 0), ended(1, 0, unused=(0,))],
        [ended(0)],
        [Ended(1.0, 1)],
    ],
)
def test_sound_traces_pass(records):
    check(*records)


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([gradient(0, 0), gradient(1, 0)], "line 1: batch 0 of stream 0 was already used"),
        ([gradient(0, 0), skipped(1, 0)], "line 1: batch 0 of stream 0 was already used"),
        ([skipped(0, 0), gradient(0, 0)], "line 1: batch 0 of stream 0 was already used"),
        ([gradient(0, 0), restored(1), gradient(0, 0)], "line 2: batch 0 .* was already used"),
        ([gradient(0, 0), gradient(0, 0, new_samples=4)], "line 1: counts 4 samples that were"),
        ([gradient(0, 0), ended(2)], "line 1: batch 1 of stream 0 was never used"),
        ([gradient(0, 0), restored(2)], "line 1: batch 1 of stream 0 was never used"),
        ([gradient(0, 0), ended(1, 0)], "line 1: batch 0 of stream 0 was used but isn't done"),
    ],
)
def test_batch_that_is_used_twice_or_missing_is_refused(records, reason):
    with pytest.raises(TraceError, match=reason):
        check(*records)
