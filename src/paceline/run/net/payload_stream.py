# SPDX-License-Identifier: BSD-3-Clause
"""Large payloads on a data connection, in chunks between which they can be cancelled. No sockets.

Theory of operation
    A message on the control connection may have a payload: a version of the parameters, a gradient,
    a state. A payload is a list of spans of memory. Both sides know the spans from the message, so
    they cut them into the same chunks, and each chunk travels straight from memory to memory.

    Payloads of one direction are numbered from 1, in the order of their messages. Before each chunk
    there is a header: the number of the payload, the number of the chunk, and its size in bytes. A
    sender that cancels a payload sends the chunk that has begun, and then a header that says so. A
    receiver that no longer wants a payload skips its chunks.

These classes move no bytes themselves. A sender says what to send next and is told how much was
sent; a receiver says where the next bytes belong and is told how many have arrived.
"""

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from paceline.errors import InternalError, ProtocolError

__all__ = [
    "CHUNK_BYTES",
    "Arrival",
    "Codec",
    "Exact",
    "PayloadReceiver",
    "PayloadSender",
    "Span",
    "cut",
]

CHUNK_BYTES = 1 << 19  # a cancellation takes effect after at most this much
_HEADER = struct.Struct("<QII")  # payload, chunk, bytes of the chunk
_CANCELLED = 2**32 - 1  # in place of the number of a chunk


class Span(NamedTuple):
    """Memory that holds numbers of one type."""

    memory: memoryview  # of bytes
    kind: str = ""  # the type of its numbers, such as "torch.float32"; "": never round them
    residual: memoryview = memoryview(b"")  # to add to the numbers; as large as they are, or empty


class Codec(Protocol):
    """How the numbers of a chunk look on the wire."""

    def wire_bytes(self, chunk: Span) -> int:
        """Return the size of a chunk on the wire."""

    def encode(self, chunk: Span) -> memoryview:
        """Return the bytes to send for a chunk; they are used before the next one is encoded."""

    def space(self, chunk: Span) -> memoryview:
        """Return the memory into which to receive the bytes of a chunk."""

    def decode(self, chunk: Span) -> None:
        """Complete a chunk whose bytes have been received into `space`."""


class Exact:
    """Sends memory as it is."""

    def wire_bytes(self, chunk: Span) -> int:
        """Return the size of the memory."""
        return len(chunk.memory)

    def encode(self, chunk: Span) -> memoryview:
        """Return the memory itself."""
        return chunk.memory

    def space(self, chunk: Span) -> memoryview:
        """Return the memory itself."""
        return chunk.memory

    def decode(self, chunk: Span) -> None:
        """Do nothing: the bytes are already where they belong."""


def cut(spans: Sequence[Span]) -> deque[Span]:
    """Return the chunks in which these spans travel."""
    return deque(
        Span(span.memory[begin:end], span.kind, span.residual[begin:end])
        for span in spans
        for begin in range(0, len(span.memory), CHUNK_BYTES)
        for end in (begin + CHUNK_BYTES,)
    )


@dataclass
class _Outgoing:
    """A payload of which something is left to send."""

    number: int
    chunks: deque[Span]
    next_chunk: int = 0
    is_cancelled: bool = False


class PayloadSender:
    """The sending side of one direction of a data connection."""

    def __init__(self, codec: Codec | None = None) -> None:
        self.codec = codec or Exact()
        self._payloads: deque[_Outgoing] = deque()
        self._unsent: list[memoryview] = []  # of the chunk that has begun
        self.sent_bytes = 0
        """How many bytes were sent so far, headers included."""

    def __bool__(self) -> bool:
        """Return whether there is something to send."""
        return bool(self._unsent or self._payloads)

    def add(self, number: int, spans: Sequence[Span]) -> None:
        """Send a payload after those that were added before; it must not be empty."""
        chunks = cut(spans)
        if not chunks:
            raise InternalError("a payload must not be empty")
        self._payloads.append(_Outgoing(number, chunks))

    def cancel(self, number: int) -> None:
        """Send no more chunks of this payload; does nothing if all of them have begun."""
        for payload in self._payloads:
            if payload.number == number:
                payload.chunks.clear()
                payload.is_cancelled = True

    def pending(self) -> list[memoryview]:
        """Return the bytes to send next."""
        if not self._unsent and self._payloads:
            self._begin_chunk(self._payloads[0])
        return self._unsent

    def _begin_chunk(self, payload: _Outgoing) -> None:
        if payload.is_cancelled:
            self._unsent = [memoryview(_HEADER.pack(payload.number, _CANCELLED, 0))]
        else:
            body = self.codec.encode(payload.chunks.popleft())
            header = _HEADER.pack(payload.number, payload.next_chunk, len(body))
            self._unsent = [memoryview(header), body]
            payload.next_chunk += 1
        if not payload.chunks:
            self._payloads.popleft()

    def sent(self, count: int) -> None:
        """Note that this many of the pending bytes were sent."""
        self.sent_bytes += count
        while count and count >= len(self._unsent[0]):
            count -= len(self._unsent.pop(0))
        if count:
            self._unsent[0] = self._unsent[0][count:]


class Arrival(NamedTuple):
    """A payload that has arrived, or was cancelled by its sender."""

    number: int
    is_complete: bool


class PayloadReceiver:
    """The receiving side of one direction of a data connection."""

    def __init__(self, codec: Codec | None = None) -> None:
        self.codec = codec or Exact()
        self._number = 0  # of the payload that is expected, or was expected last
        self._chunks: deque[Span] | None = None  # that haven't arrived; None: none is expected
        self._next_chunk = 0
        self._header = memoryview(bytearray(_HEADER.size))
        self._space = self._header  # where the next bytes belong
        self._is_skipping = False
        self._chunk: Span | None = None  # that is being received; None: a header, or skipped bytes
        self.received_bytes = 0
        """How many bytes were received so far, headers included."""

    @property
    def is_expecting(self) -> bool:
        """Whether a payload is expected that hasn't arrived."""
        return self._chunks is not None

    def expect(self, number: int, spans: Sequence[Span]) -> None:
        """Receive this payload into these spans; earlier ones that never came are skipped."""
        if self._chunks is not None or number <= self._number:
            raise InternalError(f"payload {number} can't be expected after {self._number}")
        self._number, self._chunks, self._next_chunk = number, cut(spans), 0

    def skip(self) -> None:
        """Expect no more of the current payload; chunks of it that still arrive are skipped."""
        self._chunks = None
        if self._chunk is not None:  # the rest of this chunk must not touch its memory any more
            rest = len(self._space)
            self._chunk, self._is_skipping = None, True
            self._space = memoryview(bytearray(rest))

    def space(self) -> memoryview:
        """Return where the next bytes belong; it is never empty."""
        return self._space

    def received(self, count: int) -> Arrival | None:
        """Note that this many bytes have arrived; return the payload that ends with them, if any.

        Raises ProtocolError if they are not what the sender may send.
        """
        self.received_bytes += count
        self._space = self._space[count:]
        if self._space:
            return None
        if self._chunk is None and not self._is_skipping:
            return self._read_header()
        chunk, self._chunk, self._is_skipping = self._chunk, None, False
        self._space = self._header
        if chunk is None:
            return None
        self.codec.decode(chunk)
        return self._end_if_complete()

    def _end_if_complete(self) -> Arrival | None:
        if self._chunks:
            return None
        self._chunks = None
        return Arrival(self._number, is_complete=True)

    def _read_header(self) -> Arrival | None:
        number, chunk, size = _HEADER.unpack(self._header)
        self._space = self._header
        is_current = number == self._number and self._chunks is not None
        if number > self._number or size > CHUNK_BYTES:
            raise ProtocolError(f"payload {number} with a chunk of {size} bytes wasn't expected")
        if chunk == _CANCELLED and not size:
            return self._on_cancelled() if is_current else None
        if not is_current:
            self._is_skipping = size > 0
            self._space = memoryview(bytearray(size)) if size else self._header
            return None
        assert self._chunks
        expected = self.codec.wire_bytes(self._chunks[0])
        if chunk != self._next_chunk or size != expected:
            raise ProtocolError(
                f"expected chunk {self._next_chunk} with {expected} bytes, got chunk {chunk} with "
                f"{size} bytes"
            )
        self._chunk = self._chunks.popleft()
        self._next_chunk += 1
        self._space = self.codec.space(self._chunk)
        return None

    def _on_cancelled(self) -> Arrival:
        self._chunks = None
        return Arrival(self._number, is_complete=False)
