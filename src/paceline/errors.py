# SPDX-License-Identifier: BSD-3-Clause
"""The exceptions that Paceline raises. The type says whose fault it is.

PacelineError
├── SpecError       the caller described an impossible run
├── TraceError      a trace file cannot be read: which line, and why
├── CheckpointError a checkpoint cannot be read: which file, and why
├── ProtocolError   a peer broke the rules: which worker, which event
├── PeerLost        a worker or the network went away: expected, and handled
└── InternalError   a bug in Paceline: please report it, with the events that it lists

A message is one sentence: what was expected, what was found, and what to do.
"""

__all__ = [
    "CheckpointError",
    "InternalError",
    "PacelineError",
    "PeerLost",
    "ProtocolError",
    "SpecError",
    "TraceError",
]


class PacelineError(Exception):
    """Base class of all errors that Paceline raises on purpose."""

    exit_code = 1
    """Exit code of a process that ends with this kind of error."""


class SpecError(PacelineError, ValueError):
    """The caller described an impossible run."""

    exit_code = 2


class TraceError(PacelineError, ValueError):
    """A trace file cannot be read."""

    exit_code = 3


class ProtocolError(PacelineError):
    """A peer broke the protocol; the state is unchanged."""

    exit_code = 4


class PeerLost(PacelineError):
    """A worker, the server or the network between them is gone."""

    exit_code = 5


class CheckpointError(PacelineError):
    """A checkpoint cannot be read."""

    exit_code = 6


class InternalError(PacelineError):
    """An invariant of Paceline is broken: please report it."""

    exit_code = 70
