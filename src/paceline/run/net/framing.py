# SPDX-License-Identifier: BSD-3-Clause
"""Frames: how a stream of bytes is divided into messages.

A frame is a length of four bytes, little-endian, followed by a body of that many bytes. A length
above the limit is refused before any of the body is read. No sockets here.
"""

import struct

from paceline.errors import ProtocolError

__all__ = ["FrameBuffer", "frame"]

_LENGTH = struct.Struct("<I")


def frame(body: bytes) -> bytes:
    """Return the body as a frame."""
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Collects received bytes and cuts them into frames."""

    def __init__(self, limit: int) -> None:
        """Accept bodies of 1 to `limit` bytes."""
        self.limit = limit
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        """Add bytes that were received."""
        self._bytes += data

    def has_frame(self) -> bool:
        """Return whether a whole frame has been received."""
        size = len(self._bytes)
        return size >= _LENGTH.size and size >= _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]

    def next_body(self) -> bytes | None:
        """Remove and return the body of the next frame; None if it isn't complete yet.

        Raises ProtocolError if the announced length is above the limit.
        """
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if not 0 < length <= self.limit:
            raise ProtocolError(f"a frame must have 1 to {self.limit} bytes, got {length}")
        end = _LENGTH.size + length
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
        return body
