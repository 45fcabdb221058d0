# SPDX-License-Identifier: BSD-3-Clause
"""Gradients and parameters in half precision on the wire, and error feedback for gradients.

Theory of operation
    Numbers in single or double precision are rounded to the nearest bfloat16 or float16 when they
    are sent, and widened when they arrive. Only spans that have a `kind` are rounded: the
    parameters and their gradients. Module buffers travel exactly, because an average that is
    rounded in every update drifts (a batch norm's running variance moves by less than a rounding),
    and they are small. Counters, constants and states travel exactly as well, and so does the last
    version of a run, which the script may save.

    Error feedback: a worker keeps what rounding has cut off from its gradients, the *residual*, and
    adds it to its next gradient before that is rounded. So the sum of what the server accepts
    follows the sum of the gradients, and numbers too small for float16 arrive once they have added
    up. The residual changes only when the server says that it has accepted the gradient. A gradient
    that was dropped, cancelled or sent in part leaves it as it was: the server has used none of it.
    The script's gradients don't change. The worker learns of the fate with its next assignment, and
    updates the residual while it receives the parameters.

    Residuals belong to a connection. They aren't part of checkpoints: after a restart, and with a
    new server, they start at zero. What is lost is less than one rounding of one gradient.

Finite numbers that are too large for the format become its largest number. What that cuts off is
dropped, not fed back: it would push the same way for many updates. With bfloat16 it never happens
in practice, because its range is that of single precision. A number that isn't finite stays so.

Memory for the conversion is allocated once, for the largest chunk.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.run.net.payload_stream import CHUNK_BYTES, Codec, Exact, Span, cut
from paceline.run.settings import WireFormat

__all__ = ["ErrorFeedback", "HalfPrecision", "codec_for"]

_ROUNDED = {"torch.float32": torch.float32, "torch.float64": torch.float64}
_FORMATS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_MOST_NUMBERS = CHUNK_BYTES // torch.float32.itemsize  # in a chunk

# Up to this many numbers, torch computes in one thread. Others gain nothing on a chunk, and where
# workers keep the cores busy, each operation would wait for them, for milliseconds.
_PIECE = 1 << 15


def codec_for(wire: WireFormat) -> Codec:
    """Return how numbers look on the wire in this format."""
    return Exact() if wire == "exact" else HalfPrecision(_FORMATS[wire])


class HalfPrecision:
    """Sends single and double precision in half precision, and everything else as it is."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._largest = torch.finfo(dtype).max
        self._half = torch.empty(_MOST_NUMBERS, dtype=dtype)
        self._bytes: memoryview = self._half.view(torch.uint8).numpy().data
        self._scratch = torch.empty(CHUNK_BYTES, dtype=torch.uint8)

    def wire_bytes(self, chunk: Span) -> int:
        """Return the size of a chunk on the wire."""
        wide = _ROUNDED.get(chunk.kind)
        size = len(chunk.memory)
        return size if wide is None else size // wide.itemsize * self._dtype.itemsize

    def encode(self, chunk: Span) -> memoryview:
        """Return the chunk in half precision, with its residual added."""
        if chunk.kind not in _ROUNDED:
            return chunk.memory
        return self._bytes[: self._round(chunk).half.nbytes]

    def space(self, chunk: Span) -> memoryview:
        """Return the memory into which to receive the bytes of a chunk."""
        if chunk.kind not in _ROUNDED:
            return chunk.memory
        return self._bytes[: self.wire_bytes(chunk)]

    def decode(self, chunk: Span) -> None:
        """Widen the numbers that were received into `space`."""
        if chunk.kind in _ROUNDED:
            numbers = _view(chunk.memory, chunk.kind)
            for wide, half in _pieces(numbers, self._half[: len(numbers)]):
                wide.copy_(half)

    def update_residual(self, chunk: Span) -> None:
        """Keep what `encode` has cut off from this chunk, whose memory hasn't changed since.

        Everything that was encoded must have been sent, as it has if the gradient was accepted.
        """
        residual, rounded = _view(chunk.residual, chunk.kind), self._round(chunk)
        if rounded.is_finite:
            for kept, wide, half in _pieces(residual, rounded.wide, rounded.half):
                torch.sub(wide, half, out=kept)
        else:
            residual.zero_()

    def _round(self, chunk: Span) -> "_Rounded":
        """Round a chunk and its residual; the result is valid until the next call."""
        wide = _view(chunk.memory, chunk.kind)
        scratch = self._scratch.view(wide.dtype)[: len(wide)]
        half = self._half[: len(wide)]
        if chunk.residual:
            residual = _view(chunk.residual, chunk.kind)
            for added, own, extra in _pieces(scratch, wide, residual):
                torch.add(own, extra, out=added)
            wide = scratch
        is_finite = True
        for narrow, own in _pieces(half, wide):
            is_finite &= _is_finite(narrow.copy_(own))
        if is_finite:
            return _Rounded(wide, half, is_finite=True)
        if not _is_finite(wide):
            return _Rounded(wide, half, is_finite=False)
        wide = torch.clamp(wide, -self._largest, self._largest, out=scratch)
        return _Rounded(wide, half.copy_(wide), is_finite=True)


class _Rounded(NamedTuple):
    """Numbers before and after they were rounded."""

    wide: Tensor  # within the range of the format
    half: Tensor
    is_finite: bool


def _pieces(*numbers: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the parts of these tensors, which are equally long, that are worked on together."""
    return zip(*(one.split(_PIECE) for one in numbers), strict=True)


def _is_finite(numbers: Tensor) -> bool:
    return all(isfinite(end) for end in torch.aminmax(numbers))  # NaN if there is one


def _view(memory: memoryview, kind: str) -> Tensor:
    return torch.frombuffer(memory, dtype=_ROUNDED[kind])


class ErrorFeedback:
    """The residuals of one worker's gradients."""

    def __init__(self, codec: HalfPrecision, residuals: Callable[[int], list[Span]]) -> None:
        """`residuals`: returns those of an optimizer, laid out as its gradient."""
        self._codec = codec
        self._residuals = residuals
        self._sent: list[Span] = []  # the last gradient, until its fate is known
        self._unsettled: deque[Span] = deque()  # chunks whose residual is out of date

    def add_to(self, gradient: Sequence[Span], optimizer: int) -> list[Span]:
        """Return the spans of an optimizer's gradient, with the residuals to add to them."""
        pairs = zip(gradient, self._residuals(optimizer), strict=True)
        spans = [
            own._replace(residual=other.memory) if own.kind in _ROUNDED else own
            for own, other in pairs
        ]
        self._sent = [span for span in spans if span.residual]
        return spans

    def settle(self, is_accepted: bool) -> None:
        """Note the fate of the last gradient, before its memory changes."""
        self._unsettled = cut(self._sent) if is_accepted else deque()
        self._sent = []

    def advance(self) -> bool:
        """Update the residual of one chunk; return whether there was one to update."""
        if not self._unsettled:
            return False
        self._codec.update_residual(self._unsettled.popleft())
        return True

    def finish(self) -> None:
        """Update the rest of the residual; after that, the gradient's memory may change."""
        while self.advance():
            pass
