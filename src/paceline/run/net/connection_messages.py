# SPDX-License-Identifier: BSD-3-Clause
"""The messages of connections themselves: the handshake, and what transports use internally.

SlotShared and BufferShared belong to the shared-memory transport, which sends them just before the
message that needs the memory. SendPayload, StopPayload and DataAttached belong to the TCP
transport. All connections have the same handshake; the proof of a data connection contains the
session of its control connection. The module `messages` has all other messages.
"""

from typing import Annotated, Literal

import msgspec

from paceline.run.tensors.state_spec import Count, MessagePart

__all__ = [
    "BufferShared",
    "Challenge",
    "DataAttached",
    "Hello",
    "Kind",
    "Message",
    "Proof",
    "Refused",
    "SendPayload",
    "Session",
    "SlotShared",
    "StopPayload",
]

Nonce = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Session = Annotated[bytes, msgspec.Meta(max_length=32)]
Kind = Literal["control", "data", "host", "hosted"]
"""What a connection is for.

"control": a worker, another server or the launcher; "data": the payloads of a session; "host": the
agent of a host; "hosted": a worker that such an agent serves, whose session it names.
"""


class Message(MessagePart, frozen=True, tag=0):
    """A whole message; its tag is its number."""


class Hello(Message, tag=1, frozen=True):
    """Begin the handshake."""

    protocol: Count
    nonce: Nonce


class Challenge(Message, tag=2, frozen=True):
    """Prove that the server knows the token, and ask the client for its proof."""

    nonce: Nonce
    proof: Nonce


class Proof(Message, tag=3, frozen=True):
    """Prove that the client knows the token."""

    proof: Nonce
    session: Session = b""  # that a "data" or "hosted" connection belongs to
    kind: Kind = "control"


class Refused(Message, tag=6, frozen=True):
    """Refuse the connection or the worker, with the reason."""

    reason: str


class SlotShared(Message, tag=18, frozen=True):
    """Hand over the memory of the worker's slot and of the constants."""


class BufferShared(Message, tag=19, frozen=True):
    """Hand over the memory of a parameter buffer."""

    buffer: Count


class SendPayload(Message, tag=27, frozen=True):
    """Let the worker send a payload that it has announced."""

    payload: Count


class StopPayload(Message, tag=28, frozen=True):
    """Tell the worker that a payload is no longer wanted, whether it has begun or not."""

    payload: Count


class DataAttached(Message, tag=29, frozen=True):
    """Confirm that a connection is the data connection of its session from now on."""
