# SPDX-License-Identifier: BSD-3-Clause
"""The exceptions of Paceline. The type says whose fault it is.

PacelineError
├── SpecError       the caller described an impossible run
├── TraceError      a trace file cannot be read: which line, and why
├── ProtocolError   a peer broke the rules: which worker, which event
├── PeerLost        a worker or the network went away: expected, and handled
└── InternalError   our own bug: please report it, with the story that it tells

A message is one sentence: what was expected, what was got, and what to do.
"""

__all__ = ["InternalError", "PacelineError", "PeerLost", "ProtocolError", "SpecError", "TraceError"]


class PacelineError(Exception):
    """The root of all errors that Paceline raises on purpose."""


class SpecError(PacelineError, ValueError):
    """The caller described an impossible run."""


class TraceError(PacelineError, ValueError):
    """A trace file cannot be read."""


class ProtocolError(PacelineError):
    """A peer broke the rules; the state is as it was before."""


class PeerLost(PacelineError):
    """A worker, the server or the network between them went away."""


class InternalError(PacelineError):
    """Something that can never happen has happened: please report it."""
