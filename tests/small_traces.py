# SPDX-License-Identifier: BSD-3-Clause
"""Traces of a few records, small enough to check by hand."""

from paceline.core.events import Fate
from paceline.trace.schema import Gradient, Header, Joined, Record, Resumed, Trace, Update
from paceline.watch.report import report

__all__ = ["SYNC", "THREE", "begin", "reported", "sync_round"]

ACCEPTED = Fate.ACCEPTED

SYNC = Header(source="run", policy="sync", workers=2, steps=3)


def begin(t: float = 0.0, workers: int = 2) -> list[Record]:
    return [*(Joined(t, worker) for worker in range(workers)), Resumed(t)]


def sync_round(update: int, asked_at: float, *, slow_s: float = 1.0) -> list[Record]:
    """Return a round in which worker 0 takes half a second and worker 1 takes `slow_s`."""
    t, version = asked_at + slow_s, update - 1
    return [
        Gradient(asked_at + 0.5, 0, update, version, ACCEPTED, 0, asked_at, 0.5, 32),
        Gradient(t, 1, update, version, ACCEPTED, 0, asked_at, slow_s, 32),
        Update(t, update, (0, 1), 2, scalars={"loss": 1 / update}),
    ]


THREE = [*begin(), *sync_round(1, 0.0), *sync_round(2, 1.0), *sync_round(3, 2.0)]


def reported(*records: Record, header: Header = SYNC) -> list[str]:
    return report(Trace(header, list(records)))
