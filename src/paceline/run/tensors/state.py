# SPDX-License-Identifier: BSD-3-Clause
"""Nested values with tensors in them, as bytes and a region: what `state_dict()` gives, no pickle.

Dictionaries, lists, tuples, numbers, strings, None and tensors; a tuple comes back as a list. What
else there may be is refused, and named.
"""

from collections.abc import Sequence
from math import prod
from numbers import Integral, Real
from typing import Any

import msgspec
import torch
from torch import Tensor

from paceline.errors import ProtocolError, SpecError
from paceline.run.tensors.layout import dtype_of
from paceline.run.tensors.region import Region
from paceline.run.tensors.state_spec import Count

__all__ = ["pack", "unpack"]

_TENSOR = 1
_ALIGNMENT = 64


class _Where(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor that lies in the region."""

    dtype: str
    shape: tuple[Count, ...]
    offset: Count
    stride: tuple[Count, ...] | None = None  # None: as usual


def pack(tree: Any, what: str) -> tuple[bytes, int]:
    """The tree as bytes, and the descriptor of the region in which its tensors lie."""
    tensors: list[tuple[Tensor, int]] = []
    end = 0

    def place(tensor: Tensor) -> msgspec.msgpack.Ext:
        nonlocal end
        dtype = dtype_of(str(tensor.dtype))
        if tensor.layout is not torch.strided:
            raise SpecError(f"the {what} has a sparse tensor in it, which cannot travel")
        tensors.append((tensor.detach(), end))
        where = _Where(str(dtype), tuple(tensor.shape), end, _stride(tensor))
        end += -(-tensor.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode(where))

    def plain(value: Any) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, Real):  # a number of NumPy, say
            return int(value) if isinstance(value, Integral) else float(value)
        raise SpecError(f"the {what} has a {type(value).__qualname__} in it, which cannot travel")

    def travel(value: Any) -> Any:
        if isinstance(value, Tensor):
            return place(value)
        if isinstance(value, dict):
            return {plain(key): travel(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [travel(item) for item in value]
        return plain(value)

    try:
        body = msgspec.msgpack.encode(travel(tree))
    except OverflowError as error:
        raise SpecError(f"the {what} has a number in it that cannot travel: {error}") from None
    region, fd = Region.create(end, what)
    for tensor, offset in tensors:
        flat = region.tensor(tensor.dtype, tensor.numel(), offset)
        _shaped(flat, tensor.shape, _stride(tensor)).copy_(tensor)
    return body, fd


def _stride(tensor: Tensor) -> tuple[int, ...] | None:
    """The order of its dimensions, if it has another than usual: some optimizers rely on it."""
    if tensor.is_contiguous():
        return None
    return tuple(torch.empty_like(tensor, device="meta").stride())  # without gaps


def _shaped(flat: Tensor, shape: Sequence[int], stride: Sequence[int] | None) -> Tensor:
    return flat.view(shape) if stride is None else flat.as_strided(shape, stride)


def unpack(body: bytes, fd: int) -> Any:
    """The tree again, its tensors copied out of the region. The descriptor stays the caller's.

    Raises ProtocolError, and nothing else, whatever a peer sends.
    """
    region = Region(fd, writable=False)
    end = 0

    def find(code: int, data: memoryview) -> Tensor:
        nonlocal end
        if code != _TENSOR:
            raise ProtocolError(f"expected a tensor in a state, got extension {code}")
        where = msgspec.msgpack.decode(data, type=_Where)
        dtype, count = dtype_of(where.dtype), prod(where.shape)
        # One after the other, so that a state is never larger than its memory.
        if where.offset % dtype.itemsize or where.offset < end:
            raise ProtocolError(f"a tensor of a state cannot lie there: {where}")
        end = where.offset + count * dtype.itemsize
        if end > region.size:
            raise ProtocolError(f"a tensor of a state lies outside of its memory: {where}")
        flat = region.tensor(dtype, count, where.offset)
        return _shaped(flat, where.shape, where.stride).clone()

    try:
        return msgspec.msgpack.Decoder(ext_hook=find, strict=True).decode(body)
    except (msgspec.MsgspecError, ValueError, RuntimeError) as error:
        raise ProtocolError(f"expected a state: {error}") from None
