# SPDX-License-Identifier: BSD-3-Clause
"""The exceptions of Paceline. The type says whose fault it is.

PacelineError
├── SpecError       the caller described an impossible run
├── TraceError      a trace file cannot be read: which line, and why
├── CheckpointError a checkpoint cannot be read: which file, and why
├── ProtocolError   a peer broke the rules: which worker, which event
├── PeerLost        a worker or the network went away: expected, and handled
└── InternalError   our own bug: please report it, with the story that it tells

A message is one sentence: what was expected, what was got, and what to do.
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
    """The root of all errors that Paceline raises on purpose."""

    exit_code = 1
    """What a process ends with that this has ended; each kind has its own."""


class SpecError(PacelineError, ValueError):
    """The caller described an impossible run."""

    exit_code = 2


class TraceError(PacelineError, ValueError):
    """A trace file cannot be read."""

    exit_code = 3


class ProtocolError(PacelineError):
    """A peer broke the rules; the state is as it was before."""

    exit_code = 4


class PeerLost(PacelineError):
    """A worker, the server or the network between them went away."""

    exit_code = 5


class CheckpointError(PacelineError):
    """A checkpoint cannot be read."""

    exit_code = 6


class InternalError(PacelineError):
    """Something that can never happen has happened: please report it."""

    exit_code = 70
