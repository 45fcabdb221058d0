# SPDX-License-Identifier: BSD-3-Clause
"""A worker's position: how far it is in its data, and in its random numbers.

For a checkpoint, a worker sends its position to the server, as bytes that only workers decode. A
worker that gets a position in its welcome continues from there.
"""

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from weakref import ReferenceType, ref

import msgspec
import torch

from paceline.errors import ProtocolError

__all__ = [
    "Bookmark",
    "Generators",
    "Position",
    "PositionTracker",
    "Randomness",
    "decode_position",
    "encode_position",
]

_ALWAYS_FIRST = 3  # the first calls of `read` read every generator
_EVERY = 64  # later, one call in this many does; after a change, this many in a row


class _PositionPart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A value inside an encoded position."""


class Bookmark(_PositionPart, frozen=True):
    """A position in a stream of batches."""

    loop: int  # the script's loops over the stream, counted from 0
    batches: int  # how many this loop has handed out
    again: tuple[tuple[int, int], ...] = ()  # (loop, batch) of each batch to hand out again


class Randomness(_PositionPart, frozen=True):
    """The states of the global random number generators."""

    torch: bytes
    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, bytes, int, int, float] | None  # None: NumPy wasn't imported

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))
        random.setstate(self.python)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and self.numpy is not None:
            name, keys, *rest = self.numpy
            numpy.random.set_state((name, numpy.frombuffer(keys, numpy.uint32), *rest))


class Generators:
    """Remembers the states of the global random number generators.

    Reading the generators of Python and NumPy takes longer than everything else that Paceline does
    in a step, and few scripts use them while they train. So they are read in every step only while
    they are seen to change.
    """

    def __init__(self) -> None:
        self._reads = 0
        self._python: Any = None
        self._numpy: Any = None
        self._read_all_until = _ALWAYS_FIRST

    def read(self, thorough: bool = False) -> None:
        """Remember the states that the generators have now; `thorough` reads every generator."""
        self._torch = torch.get_rng_state()
        self._reads += 1
        if thorough or self._reads <= self._read_all_until or self._reads % _EVERY == 0:
            self._read_others()

    def _read_others(self) -> None:
        python, numpy = random.getstate(), _numpy_state()
        if self._reads > 1 and (python, numpy) != (self._python, self._numpy):
            self._read_all_until = self._reads + _EVERY
        self._python, self._numpy = python, numpy

    def remembered(self) -> Randomness:
        """Return the states at the last `read`."""
        return Randomness(bytes(self._torch.numpy()), self._python, self._numpy)


def _numpy_state() -> tuple[Any, ...] | None:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    state = numpy.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":  # a script may replace it
        return None
    inner = state["state"]
    return (
        "MT19937",
        inner["key"].tobytes(),
        int(inner["pos"]),
        int(state["has_gauss"]),
        float(state["gauss"]),
    )


class Position(_PositionPart, frozen=True):
    """How far a worker is in its data and random numbers."""

    bookmarks: tuple[Bookmark, ...]  # by stream
    randomness: Randomness


encode_position = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Position).decode


def decode_position(body: bytes) -> Position:
    """Decode what `encode_position` returned; raises ProtocolError for anything else."""
    try:
        return _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"expected the position of a worker: {error}") from None


class Seekable(Protocol):
    """A stream of batches that knows its position."""

    @property
    def can_go_back(self) -> bool:
        """Whether `move_to` has an effect."""

    def bookmark(self) -> Bookmark:
        """Return the position."""

    def move_to(self, bookmark: Bookmark, before_first: Callable[[], None]) -> None:
        """Continue at the bookmark; call `before_first` just before the first batch is loaded."""


class PositionTracker:
    """Tracks the position at which a worker's current turn began."""

    def __init__(self) -> None:
        # Weak references, so that a loader that the script drops can end its processes.
        self._streams: list[ReferenceType[Seekable]] = []
        self._generators = Generators()
        self._bookmarks: list[Bookmark] = []  # by stream
        self._first: Randomness | None = None  # states of the generators at the beginning
        self._target: Position | None = None  # where streams that are added later begin
        self._to_restore: Randomness | None = None  # None: a batch was loaded since

    def add(self, stream: Seekable) -> None:
        """Track one more stream; if its position is known, it begins there."""
        number = len(self._streams)
        self._streams.append(ref(stream))
        self._move(stream, number)
        self._bookmarks.append(stream.bookmark())

    def _move(self, stream: Seekable, number: int) -> None:
        if self._target is not None and number < len(self._target.bookmarks):
            stream.move_to(self._target.bookmarks[number], self._restore)

    def _restore(self) -> None:
        """Restore the generators before the first batch: the script may have drawn since."""
        if self._to_restore is not None:
            self._to_restore.restore()
            self._to_restore = None

    def _alive(self) -> Iterator[tuple[int, Seekable]]:
        for number, reference in enumerate(self._streams):
            stream = reference()
            if stream is not None:
                yield number, stream

    def record(self, thorough: bool = False) -> None:
        """Record the current position; `thorough` reads every random number generator."""
        for number, stream in self._alive():
            self._bookmarks[number] = stream.bookmark()
        self._generators.read(thorough)
        if self._first is None:
            self._first = self._generators.remembered()

    def encode(self) -> bytes:
        """Return the position that was recorded last."""
        return encode_position(Position(tuple(self._bookmarks), self._generators.remembered()))

    def move_to(self, body: bytes) -> None:
        """Move to an encoded position; an empty one is the beginning.

        If a stream can't go back, the random numbers aren't restored either: they belong to its
        data.
        """
        if body:
            self._target = decode_position(body)
        elif self._first is not None:
            beginning = tuple([Bookmark(0, 0)] * len(self._streams))
            self._target = Position(beginning, self._first)
        else:
            return
        streams = list(self._alive())
        self._to_restore = None
        if all(stream.can_go_back for _, stream in streams):
            self._to_restore = self._target.randomness
            self._to_restore.restore()
        for number, stream in streams:
            self._move(stream, number)
