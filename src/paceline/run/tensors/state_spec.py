# SPDX-License-Identifier: BSD-3-Clause
"""Descriptions of what the processes of a run have in common, as values that can be sent.

A worker describes its tensors and optimizers in a `StateSpec`; the server compares it with its own
before it lets the worker join. Nothing here imports torch, so the launcher can read messages
without it.
"""

from math import prod
from typing import Annotated

import msgspec

__all__ = [
    "LARGEST",
    "Count",
    "MessagePart",
    "Name",
    "OptimizerSpec",
    "OptionChange",
    "StateSpec",
    "TensorSpec",
    "Text",
]

LARGEST = 2**53  # what every number of a message must stay below, so that sums stay exact
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Name = Annotated[str, msgspec.Meta(max_length=200)]
Scalar = (
    None | bool | int | float | Text | Annotated[tuple[float, ...], msgspec.Meta(max_length=64)]
)


class MessagePart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A value inside a message."""


class TensorSpec(MessagePart, frozen=True):
    """A tensor that the processes of a run have in common."""

    name: Name
    dtype: Name
    shape: tuple[Count, ...]
    stride: tuple[Count, ...]

    def __str__(self) -> str:
        sizes = [max(size, 1) for size in self.shape]
        usual = tuple(prod(sizes[i + 1 :]) for i in range(len(sizes)))
        strides = "" if self.stride == usual else f" with strides {list(self.stride)}"
        return f"{self.name}: {self.dtype}{list(self.shape)}{strides}"


class OptimizerSpec(MessagePart, frozen=True):
    """An optimizer, and the parameters that it steps."""

    kind: Name
    parameters: tuple[TensorSpec, ...]


class StateSpec(MessagePart, frozen=True):
    """Everything that the processes of a run have in common, in the order of the script."""

    optimizers: tuple[OptimizerSpec, ...]
    buffers: tuple[TensorSpec, ...]  # of floating point: averaged over the contributors
    counters: tuple[TensorSpec, ...]  # other buffers: taken from one contributor
    constants: tuple[TensorSpec, ...]  # parameters that no optimizer steps


class OptionChange(MessagePart, frozen=True):
    """A setting of a parameter group that the script has changed: optimizer, group, name, value."""

    optimizer: Count
    group: Count
    name: Name
    value: Scalar
