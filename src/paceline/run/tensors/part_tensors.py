# SPDX-License-Identifier: BSD-3-Clause
"""The script's own tensors on a server that holds a part of the parameters.

The script's optimizers step the slices that this server has: a parameter gets its slice as its
data. Parameters that other servers have get no data and no gradient, so optimizers skip them.
"""

import torch
from torch import Tensor

from paceline.run.tensors.layout import TrainingState, flat
from paceline.run.tensors.partition import Part

__all__ = ["dense", "take_part"]


def dense(state: TrainingState) -> list[list[Tensor]]:
    """Return the parameters of each optimizer, in memory without gaps."""
    return [[_dense(parameter.detach()) for parameter in own] for own in state.parameters]


def _dense(tensor: Tensor) -> Tensor:
    like = torch.empty_like(tensor, device="meta")
    if like.stride() == tensor.stride():
        return tensor
    return torch.empty_like(tensor).copy_(tensor)


def take_part(state: TrainingState, part: Part) -> TrainingState:
    """Return what this server trains; the script's parameters shrink to it."""
    parameters = []
    for own, values, slices in zip(state.parameters, dense(state), part.slices, strict=True):
        if slices is None:
            parameters.append(own)
            continue
        for parameter in own:
            parameter.data = parameter.data.new_empty(0)
        for one in slices:
            own[one.parameter].data = flat(values[one.parameter])[one.begin : one.end]
        parameters.append([own[one.parameter] for one in slices])
    spec = part.spec
    return TrainingState(
        state.optimizers,
        parameters,
        state.buffers if spec.buffers else [],
        state.counters if spec.counters else [],
        state.constants if spec.constants else [],
        spec,
    )
