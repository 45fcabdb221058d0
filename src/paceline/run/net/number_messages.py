# SPDX-License-Identifier: BSD-3-Clause
"""The messages about workers on other hosts: which numbers they get, and that they will leave.

Theory of operation
    launcher of workers                   server
    ReserveNumber(seat)             ->                                 after the same handshake as
                                    <-    NumberReserved(seat, number) a worker's

    A seat is a place for one worker at a launcher, across all restarts of the worker. The number of
    a seat stays reserved while the connection is open. The worker joins with its number and seat. A
    launcher that connects again, also to a restarted server, asks for the same numbers again.

    another process of the run            server
    AskRunSize                      ->                                 for a script that asks before
                                    <-    RunSize(workers)             it joins

    worker or its launcher                server
    LeaveRun(worker)                ->                                 over a connection of its own
                                    <-    StateReply                   the worker has left the run

    A worker that is told that its host will go can't use its own connection: it may be in the
    middle of a message, or of a long computation.
"""

from typing import Annotated

import msgspec

from paceline.run.net.connection_messages import Message, Session
from paceline.run.tensors.state_spec import Count, Name

__all__ = [
    "AboutHosts",
    "AskRunSize",
    "LeaveRun",
    "NumberReserved",
    "ReserveNumber",
    "RunSize",
    "Seat",
    "ToHosts",
    "WorkerNumber",
]

WorkerNumber = Annotated[int, msgspec.Meta(ge=0, le=999_999)]

Seat = Session
"""A random name for a seat; empty: the worker has none."""


class ReserveNumber(Message, tag=60, frozen=True):
    """Ask for a number for a worker that will join from this host."""

    seat: Seat
    release: Name  # of Paceline
    wanted: WorkerNumber | None = None  # which it had before, or should have; None: any
    is_fixed: bool = False  # refuse it rather than give it another number than `wanted`


class NumberReserved(Message, tag=61, frozen=True):
    """Reserve a number, for as long as the connection is open."""

    seat: Seat
    number: WorkerNumber
    workers: Count  # that the run was started with
    seed: Count  # of the run
    grace_s: Annotated[float, msgspec.Meta(ge=0)] = 60.0  # for workers, after the last update


class LeaveRun(Message, tag=62, frozen=True):
    """Take a worker out of the run, because its host is about to go; answered by a StateReply."""

    worker: WorkerNumber
    session: Session = b""  # of its process; or
    seat: Seat = b""  # at its launcher


class AskRunSize(Message, tag=63, frozen=True):
    """Ask how many workers the run was started with."""


class RunSize(Message, tag=64, frozen=True):
    """Answer an AskRunSize."""

    workers: Count


AboutHosts = ReserveNumber | LeaveRun | AskRunSize
ToHosts = NumberReserved | RunSize
