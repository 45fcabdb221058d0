# SPDX-License-Identifier: BSD-3-Clause
"""Where a worker is: in its streams of data, and in its random numbers.

A worker tells its place to the server for a checkpoint, as bytes that only workers read. One that
gets a place when it is welcomed goes on from there.
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

_FIRST = 3  # looks at which everything is looked at
_SELDOM = 64  # later one in so many, in case a script uses them; where one does, so many more


class _PositionPart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A value inside a place."""


class Bookmark(_PositionPart, frozen=True):
    """A place in a stream of batches."""

    loop: int  # which of the script's loops over it this is; the first is 0
    batches: int  # that were handed out in this one
    again: tuple[tuple[int, int], ...] = ()  # (loop, batch) of those that are to come again


class Randomness(_PositionPart, frozen=True):
    """The states of the generators that scripts draw from without naming them."""

    torch: bytes
    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, bytes, int, int, float] | None  # None: it was not in use

    def restore(self) -> None:
        """Let them be so again."""
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))
        random.setstate(self.python)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and self.numpy is not None:
            name, keys, *rest = self.numpy
            numpy.random.set_state((name, numpy.frombuffer(keys, numpy.uint32), *rest))


class Generators:
    """Remembers where the generators were.

    To look at those of Python and NumPy takes longer than all else that a step needs of us, and few
    scripts use them while they train: so it is done in each step only where they are seen to move.
    """

    def __init__(self) -> None:
        self._looks = 0
        self._python: Any = None
        self._numpy: Any = None
        self._look_until = _FIRST

    def look(self, thorough: bool = False) -> None:
        """Remember where they are now."""
        self._torch = torch.get_rng_state()
        self._looks += 1
        if thorough or self._looks <= self._look_until or self._looks % _SELDOM == 0:
            self._look_at_others()

    def _look_at_others(self) -> None:
        python, numpy = random.getstate(), _numpy_state()
        if self._looks > 1 and (python, numpy) != (self._python, self._numpy):
            self._look_until = self._looks + _SELDOM
        self._python, self._numpy = python, numpy

    def remembered(self) -> Randomness:
        """Where they were at the last look."""
        return Randomness(bytes(self._torch.numpy()), self._python, self._numpy)


def _numpy_state() -> tuple[Any, ...] | None:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    state = numpy.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":  # a script may put another in its place
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
    """Where a worker is."""

    bookmarks: tuple[Bookmark, ...]  # by stream
    randomness: Randomness


encode_position = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Position).decode


def decode_position(body: bytes) -> Position:
    """Read what `encode_position` gave; raises ProtocolError if it is something else."""
    try:
        return _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"expected the place of a worker: {error}") from None


class Marked(Protocol):
    """A stream of batches that knows where it is."""

    @property
    def can_go_back(self) -> bool:
        """Whether `move_to` leads anywhere."""

    def bookmark(self) -> Bookmark:
        """Where it is."""

    def move_to(self, bookmark: Bookmark, then: Callable[[], None]) -> None:
        """Go on there; call `then` just before the first batch is loaded."""


class PositionTracker:
    """Where a worker was when it got the work that it has."""

    def __init__(self) -> None:
        # Not held: a script that lets go of its loader ends the processes of it.
        self._streams: list[ReferenceType[Marked]] = []
        self._generators = Generators()
        self._bookmarks: list[Bookmark] = []  # by stream
        self._first: Randomness | None = None  # where the generators were in the beginning
        self._given: Position | None = None
        self._to_restore: Randomness | None = None  # None: a batch was loaded since

    def add(self, stream: Marked) -> None:
        """The script has a stream more; where there is a place for it, it begins there."""
        number = len(self._streams)
        self._streams.append(ref(stream))
        self._begin(stream, number)
        self._bookmarks.append(stream.bookmark())

    def _begin(self, stream: Marked, number: int) -> None:
        if self._given is not None and number < len(self._given.bookmarks):
            stream.move_to(self._given.bookmarks[number], self._restore)

    def _restore(self) -> None:
        """The first batch of any stream comes: what was drawn since is to be drawn again."""
        if self._to_restore is not None:
            self._to_restore.restore()
            self._to_restore = None

    def _there(self) -> Iterator[tuple[int, Marked]]:
        for number, reference in enumerate(self._streams):
            stream = reference()
            if stream is not None:
                yield number, stream

    def record(self, thorough: bool = False) -> None:
        """There is new work; look thoroughly if somebody has asked for our place."""
        for number, stream in self._there():
            self._bookmarks[number] = stream.bookmark()
        self._generators.look(thorough)
        if self._first is None:
            self._first = self._generators.remembered()

    def encode(self) -> bytes:
        """What was noted last."""
        return encode_position(Position(tuple(self._bookmarks), self._generators.remembered()))

    def move_to(self, body: bytes) -> None:
        """Be where this tells; nothing: at the beginning.

        Where a stream can only go on, so do random numbers: they belong to its data.
        """
        if body:
            self._given = decode_position(body)
        elif self._first is not None:
            beginning = tuple([Bookmark(0, 0)] * len(self._streams))
            self._given = Position(beginning, self._first)
        else:
            return
        streams = list(self._there())
        self._to_restore = None
        if all(stream.can_go_back for _, stream in streams):
            self._to_restore = self._given.randomness
            self._to_restore.restore()
        for number, stream in streams:
            self._begin(stream, number)
