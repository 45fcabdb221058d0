# SPDX-License-Identifier: BSD-3-Clause
"""Add up the gradients of one host's workers, chunk by chunk, while the sum is sent.

Each chunk is added up just before its bytes are needed, so adding takes no time of its own: the
first chunk travels while the others are still parts. The workers' slots stay unchanged meanwhile,
because the workers wait for the fate of their gradients.

The sum is relative to its first gradient: that one counts once, the others in proportion to their
samples. Integer buffers aren't added up; they are those of the first worker.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.run.net.payload_stream import CHUNK_BYTES, Codec, Span
from paceline.run.tensors.layout import Views, flat
from paceline.run.tensors.sums import add_up

__all__ = ["SpoiledSum", "SumCodec", "Summand", "terms_of"]


class SpoiledSum(Exception):
    """The gradients of some workers contain NaN or infinity."""

    def __init__(self, workers: tuple[int, ...]) -> None:
        super().__init__(workers)
        self.workers = workers


class Summand(NamedTuple):
    """A gradient that goes into a sum."""

    worker: int
    part: Views  # of its slot, for one server
    ratio: float  # how much it counts, relative to the first


class _Chunk(NamedTuple):
    """A piece of the sum, and the pieces that it is made of."""

    total: Tensor
    parts: list[Tensor]  # in the order of the summands; only the first of them if none is added
    may_be_infinite: bool  # it is no part of a gradient


def terms_of(total: Views, summands: Sequence[Summand], optimizer: int) -> deque[_Chunk]:
    """Return the chunks of a sum, in the order in which `spans_of_version` cuts and sends them."""
    found: deque[_Chunk] = deque()
    sections = [
        (total.flats[optimizer], [one.part.flats[optimizer] for one in summands], False),
        (total.buffer_flats, [one.part.buffer_flats for one in summands], True),
        (total.counter_flats, [one.part.counter_flats for one in summands[:1]], True),
    ]
    for totals, parts, may_be_infinite in sections:
        for whole, *pieces in zip(totals, *parts, strict=True):
            cuts = zip(_cut(whole), *map(_cut, pieces), strict=True)
            found.extend(_Chunk(own, list(others), may_be_infinite) for own, *others in cuts)
    return found


def _cut(one: Tensor) -> Iterator[Tensor]:
    if one.numel():
        yield from flat(one).split(CHUNK_BYTES // one.itemsize)


class SumCodec:
    """Sends sums; how their numbers look on the wire is up to another codec."""

    def __init__(self, inner: Codec) -> None:
        self.inner = inner
        self.wire_bytes = inner.wire_bytes
        self.space = inner.space
        self.decode = inner.decode
        self._workers: tuple[int, ...] = ()
        self._ratios: list[float] = []
        self._terms: deque[_Chunk] = deque()

    def begin(self, summands: Sequence[Summand], terms: deque[_Chunk]) -> None:
        """Send the sum of these next; what was left of the last one is forgotten."""
        self._workers = tuple([one.worker for one in summands])
        self._ratios = [one.ratio for one in summands]
        self._terms = terms

    def encode(self, chunk: Span) -> memoryview:
        """Add up the next chunk, and return its bytes; raises SpoiledSum if they aren't finite.

        If all parts are finite, the sum has overflowed, which is nobody's fault.
        """
        own = self._terms.popleft()
        add_up(own.total, own.parts, self._ratios[: len(own.parts)], was_empty=True)
        if not own.may_be_infinite and not _is_finite(own.total):
            pairs = zip(self._workers, own.parts, strict=True)
            spoilers = [worker for worker, part in pairs if not _is_finite(part)]
            if spoilers:
                raise SpoiledSum(tuple(spoilers))
        return self.inner.encode(chunk)


def _is_finite(numbers: Tensor) -> bool:
    return all(isfinite(end) for end in torch.aminmax(numbers))  # NaN if there is one
