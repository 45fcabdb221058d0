# SPDX-License-Identifier: BSD-3-Clause
"""Nested states, such as a `state_dict()`, as bytes and a region of shared memory. No pickle.

A state may consist of dictionaries, lists, tuples, numbers, strings, None and tensors. A tuple
comes back as a list. Anything else raises an error that names its type.
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
from paceline.run.tensors.shared_region import Region
from paceline.run.tensors.state_spec import Count

__all__ = ["pack", "unpack"]

_TENSOR = 1
_ALIGNMENT = 64


class _TensorRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor in the region."""

    dtype: str
    shape: tuple[Count, ...]
    offset: Count
    stride: tuple[Count, ...] | None = None  # None: contiguous


def pack(tree: Any, what: str) -> tuple[bytes, int]:
    """Return the tree as bytes, and the descriptor of a region with its tensors.

    `what` names the tree in errors, such as "state of the optimizer".
    """
    tensors: list[tuple[Tensor, int]] = []
    end = 0

    def reference(tensor: Tensor) -> msgspec.msgpack.Ext:
        nonlocal end
        dtype = dtype_of(str(tensor.dtype))
        if tensor.layout is not torch.strided:
            raise SpecError(f"the {what} contains a sparse tensor, which can't be sent")
        tensors.append((tensor.detach(), end))
        found = _TensorRef(str(dtype), tuple(tensor.shape), end, _stride(tensor))
        end += -(-tensor.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode(found))

    def plain(value: Any) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, Real):  # such as a NumPy number
            return int(value) if isinstance(value, Integral) else float(value)
        raise SpecError(f"the {what} contains a {type(value).__qualname__}, which can't be sent")

    def encodable(value: Any) -> Any:
        if isinstance(value, Tensor):
            return reference(value)
        if isinstance(value, dict):
            return {plain(key): encodable(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [encodable(item) for item in value]
        return plain(value)

    try:
        body = msgspec.msgpack.encode(encodable(tree))
    except OverflowError as error:
        raise SpecError(f"the {what} contains a number that can't be sent: {error}") from None
    region, fd = Region.create(end, what)
    for tensor, offset in tensors:
        flat = region.tensor(tensor.dtype, tensor.numel(), offset)
        _shaped(flat, tensor.shape, _stride(tensor)).copy_(tensor)
    return body, fd


def _stride(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the strides without gaps, because some optimizers rely on them; None: contiguous."""
    if tensor.is_contiguous():
        return None
    return tuple(torch.empty_like(tensor, device="meta").stride())


def _shaped(flat: Tensor, shape: Sequence[int], stride: Sequence[int] | None) -> Tensor:
    return flat.view(shape) if stride is None else flat.as_strided(shape, stride)


def unpack(body: bytes, fd: int, *, copy: bool = True) -> Any:
    """Return the tree, with its tensors copied out of the region; the caller closes `fd`.

    Without `copy`, the tensors stay in the region and must not be written. Raises ProtocolError,
    and nothing else, whatever a peer sends.
    """
    region = Region(fd, writable=False)
    end = 0

    def find(code: int, data: memoryview) -> Tensor:
        nonlocal end
        if code != _TENSOR:
            raise ProtocolError(f"expected a tensor in a state, got extension {code}")
        found = msgspec.msgpack.decode(data, type=_TensorRef)
        dtype, count = dtype_of(found.dtype), prod(found.shape)
        # In order and without overlap, so that a state is never larger than its memory.
        if found.offset % dtype.itemsize or found.offset < end:
            raise ProtocolError(f"a tensor of a state is misaligned or overlaps another: {found}")
        end = found.offset + count * dtype.itemsize
        if end > region.size:
            raise ProtocolError(f"a tensor of a state is outside of its memory: {found}")
        flat = region.tensor(dtype, count, found.offset)
        shaped = _shaped(flat, found.shape, found.stride)
        return shaped.clone() if copy else shaped

    try:
        return msgspec.msgpack.Decoder(ext_hook=find, strict=True).decode(body)
    except (msgspec.MsgspecError, ValueError, RuntimeError) as error:
        raise ProtocolError(f"expected a state: {error}") from None
