# SPDX-License-Identifier: BSD-3-Clause
"""The parts of a shard's state that each server loads, and the whole made of them.

A whole state doesn't depend on the number of servers, so a run can continue with another number.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from paceline.run.tensors.optimizer_parts import cut, join, merge_states, split_state
from paceline.run.tensors.partition import HEAD, Part, Slice
from paceline.run.tensors.state_spec import StateSpec

__all__ = ["merge_shard_state", "split_shard_state"]


def split_shard_state(
    saved: dict[str, Any], spec: StateSpec, parts: Sequence[Part]
) -> list[dict[str, Any]]:
    """Return the part of a shard's `state_dict()` that each server loads.

    "parameters" and "average" have slices in place of tensors, and "optimizers" has None for an
    optimizer that a server has nothing of. Everything else stays on the head. Tensors aren't
    copied if they have the strides of their parameters.
    """
    states: list[dict[str, Any]] = [
        {
            "parameters": _cut_all(saved["parameters"], spec, part),
            "average": saved["average"] and _cut_all(saved["average"], spec, part),
            "optimizers": [],
        }
        for part in parts
    ]
    for index, state in enumerate(saved["optimizers"]):
        slices = [part.slices[index] for part in parts]
        split = split_state(state, spec.optimizers[index].parameters, slices)
        for server, own in enumerate(split):
            is_empty = server != HEAD and not slices[server]
            states[server]["optimizers"].append(None if is_empty else own)
    states[HEAD] = {**saved, **states[HEAD]}
    return states


def merge_shard_state(
    states: Sequence[dict[str, Any]], spec: StateSpec, parts: Sequence[Part]
) -> dict[str, Any]:
    """Return the `state_dict()` that a shard would have with one server, from that of each."""
    head = states[HEAD]
    averages = [state["average"] for state in states]
    return {
        **head,
        "parameters": _join_all([state["parameters"] for state in states], spec, parts),
        "average": head["average"] and _join_all(averages, spec, parts),
        "optimizers": [
            merge_states(
                [state["optimizers"][index] for state in states],
                optimizer.parameters,
                [part.slices[index] for part in parts],
            )
            for index, optimizer in enumerate(spec.optimizers)
        ],
    }


def _cut_all(tensors: Sequence[list[Tensor]], spec: StateSpec, part: Part) -> list[list[Tensor]]:
    """Return one server's slices of tensors that are like the parameters, by optimizer."""
    found = []
    for own, optimizer, slices in zip(tensors, spec.optimizers, part.slices, strict=True):
        specs = optimizer.parameters
        found.append(own if slices is None else [cut(own[i], specs[i])[a:b] for i, a, b in slices])
    return found


def _join_all(
    tensors: Sequence[Sequence[list[Tensor]]], spec: StateSpec, parts: Sequence[Part]
) -> list[list[Tensor]]:
    """Return tensors that are like the parameters, by optimizer, from the slices of each server."""
    found = []
    for index, optimizer in enumerate(spec.optimizers):
        if parts[HEAD].slices[index] is None:
            found.append(tensors[HEAD][index])
            continue
        pieces: list[list[tuple[Slice, Tensor]]] = [[] for _ in optimizer.parameters]
        for part, own in zip(parts, tensors, strict=True):
            for one, elements in zip(part.slices[index] or (), own[index], strict=True):
                pieces[one.parameter].append((one, elements))
        found.append(list(map(join, pieces, optimizer.parameters)))
    return found
