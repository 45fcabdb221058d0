# SPDX-License-Identifier: BSD-3-Clause
"""Descriptions of the tensors and optimizers of a run, as values that can be sent.

A worker describes what its script trains in a `StateSpec`; the server compares it with its own
before it lets the worker join. Nothing here imports torch, so the launcher can decode messages
without it.
"""

from math import prod
from typing import Annotated, Literal

import msgspec

__all__ = [
    "LARGEST",
    "Count",
    "MessagePart",
    "Name",
    "OptimizerSpec",
    "OptionChange",
    "SchedulerCalls",
    "SchedulerMode",
    "StateSpec",
    "TensorSpec",
    "Text",
]

LARGEST = 2**53  # bound of every number in a message, so that sums stay exact
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Name = Annotated[str, msgspec.Meta(max_length=200)]
Scalar = (
    None | bool | int | float | Text | Annotated[tuple[float, ...], msgspec.Meta(max_length=64)]
)

SchedulerMode = Literal["epoch", "call", "step", "mini-batch", "metric", "given"]
"""How a script calls the `step()` of a scheduler.

"epoch": outside the passes over its training data. "mini-batch": inside them. A script without such
passes calls it once after every step of the optimizer ("step") or at other times ("call").
"metric": with a metric, as for ReduceLROnPlateau. "given": with the epoch as its argument.
"""


class MessagePart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A value inside a message."""


class TensorSpec(MessagePart, frozen=True):
    """A tensor that every process of a run has."""

    name: Name
    dtype: Name
    shape: tuple[Count, ...]
    stride: tuple[Count, ...]

    def __str__(self) -> str:
        sizes = [max(size, 1) for size in self.shape]
        contiguous = tuple(prod(sizes[i + 1 :]) for i in range(len(sizes)))
        strides = "" if self.stride == contiguous else f" with strides {list(self.stride)}"
        return f"{self.name}: {self.dtype}{list(self.shape)}{strides}"


class OptimizerSpec(MessagePart, frozen=True):
    """An optimizer and the parameters that it steps."""

    kind: Name
    parameters: tuple[TensorSpec, ...]


class StateSpec(MessagePart, frozen=True):
    """Everything that every process of a run has, in the order of the script."""

    optimizers: tuple[OptimizerSpec, ...]
    buffers: tuple[TensorSpec, ...]  # floating-point buffers: averaged over the contributors
    counters: tuple[TensorSpec, ...]  # other buffers: copied from one contributor
    constants: tuple[TensorSpec, ...]  # parameters that no optimizer steps


class OptionChange(MessagePart, frozen=True):
    """An option of a parameter group that a script has changed."""

    optimizer: Count
    group: Count
    name: Name
    value: Scalar


class SchedulerCalls(MessagePart, frozen=True):
    """The calls of a scheduler's `step()` in a worker's script."""

    scheduler: Count
    mode: SchedulerMode
    calls: Count = 0  # so far
    steps: Count = 0  # of its optimizer in the same time; only for "step" and "mini-batch"
    epoch: float | None = None  # the largest argument so far; not None iff "given"
    metrics: tuple[float, ...] = ()  # of the latest calls, which the server doesn't know yet
