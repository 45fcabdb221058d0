# SPDX-License-Identifier: BSD-3-Clause
"""Nested values with tensors in them, as bytes and a region: what `state_dict()` gives, no pickle.

Dictionaries, lists, tuples, numbers, strings, None and tensors; a tuple comes back as a list. What
else there may be is refused, and named.
"""

from typing import Any

import msgspec
import torch
from torch import Tensor

from paceline.errors import ProtocolError, SpecError
from paceline.run.bulk import Region
from paceline.run.layout import dtype_of

__all__ = ["pack", "unpack"]

_TENSOR = 1
_ALIGNMENT = 64


class _Where(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor that lies in the region."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def pack(tree: Any, what: str) -> tuple[bytes, int]:
    """The tree as bytes, and the descriptor of the region in which its tensors lie."""
    tensors: list[tuple[Tensor, int]] = []
    end = 0

    def place(value: Any) -> Any:
        nonlocal end
        if not isinstance(value, Tensor):
            raise SpecError(
                f"the {what} has a {type(value).__qualname__} in it, which cannot travel"
            )
        tensors.append((value.detach(), end))
        where = _Where(str(value.dtype), tuple(value.shape), end)
        end += -(-value.numel() * value.element_size() // _ALIGNMENT) * _ALIGNMENT
        return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode(where))

    body = msgspec.msgpack.encode(tree, enc_hook=place)
    region, fd = Region.create(end, what)
    for tensor, offset in tensors:
        region.tensor(tensor.dtype, tensor.numel(), offset).view(tensor.shape).copy_(tensor)
    return body, fd


def unpack(body: bytes, fd: int) -> Any:
    """The tree again, its tensors copied out of the region. The descriptor stays the caller's."""
    region = Region(fd, writable=False)

    def find(code: int, data: memoryview) -> Tensor:
        if code != _TENSOR:
            raise ProtocolError(f"expected a tensor in a state, got extension {code}")
        where = msgspec.msgpack.decode(data, type=_Where)
        dtype = dtype_of(where.dtype)
        count = torch.Size(where.shape).numel()
        if min(where.shape, default=0) < 0 or where.offset % dtype.itemsize or where.offset < 0:
            raise ProtocolError(f"a tensor of a state cannot lie there: {where}")
        if where.offset + count * dtype.itemsize > region.size:
            raise ProtocolError(f"a tensor of a state lies outside of its memory: {where}")
        return region.tensor(dtype, count, where.offset).view(where.shape).clone()

    try:
        return msgspec.msgpack.Decoder(ext_hook=find, strict=True).decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"expected a state: {error}") from None
