# SPDX-License-Identifier: BSD-3-Clause
"""Detect states that training can't continue from."""

from collections.abc import Iterator
from math import isfinite, isnan
from typing import Any

import msgspec
from torch import Tensor

from paceline.run.tensors.layout import TRAINABLE
from paceline.run.tensors.state_spec import StateSpec
from paceline.run.tensors.sums import square

__all__ = ["first_spoiled"]


def first_spoiled(state: dict[str, Any]) -> str:
    """Return which tensor of a shard's `state_dict()` is spoiled, "" if none is.

    A parameter is if it contains NaN or infinity, the state of an optimizer if it contains NaN.
    Buffers may contain both from the start, and so may parameters that aren't trained, such as the
    mask of an attention layer. These are listed as "infinite".
    """
    spec = msgspec.convert(state["contents"], StateSpec)
    for index, optimizer in enumerate(spec.optimizers):
        values = state["parameters"][index]
        for i, (parameter, value) in enumerate(zip(optimizer.parameters, values, strict=True)):
            if isfinite(_square(value)) or i in state["infinite"][index]:
                continue
            if not bool(value.isfinite().all()):
                return f"parameter {parameter.name!r}"
        if any(isnan(_square(part)) for part in _tensors_in(state["optimizers"][index])):
            return f"the state of optimizer {index}"
    return ""


def _square(tensor: Tensor) -> float:
    return square(tensor.detach().reshape(-1))


def _tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors whose numbers can be NaN; the state of a script's optimizer may be any."""
    if isinstance(tree, Tensor):
        if tree.dtype in TRAINABLE:
            yield tree
    elif isinstance(tree, dict | list | tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors_in(part)
