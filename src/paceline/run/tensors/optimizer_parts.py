# SPDX-License-Identifier: BSD-3-Clause
"""Which optimizers can be split over servers, and the parts of their states.

An optimizer can be split if the step of an element depends on nothing but this element's gradient,
value and state. Each server then steps slices of the parameters, which its optimizer has in place
of them, and together they compute what one server would. To be exact to the bit, a slice must begin
at a multiple of a vector in its parameter. The slices of a partition do.

For float16 and bfloat16, torch rounds the last elements of a thread's share otherwise than the
rest. So large tensors of these types depend on the number of threads to the last bit, and on the
number of servers in the same way.

A state consists, for each parameter, of tensors with an element for each of its elements, which are
cut where the parameter is, and of values such as the number of steps, which every server has.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from paceline.errors import InternalError, ProtocolError
from paceline.run.tensors.layout import TRAINABLE, flat
from paceline.run.tensors.optimizer_states import check_kind
from paceline.run.tensors.partition import HEAD, Slice
from paceline.run.tensors.state_spec import TensorSpec

__all__ = ["can_split", "cut", "join", "merge_states", "split_state"]

Slices = Sequence[Slice] | None  # of one server; None: it has all parameters, in their shapes

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
WHOLE_VALUES = frozenset({"step", "mu_product", "eta", "mu"})
"""The parts of a parameter's state that have no elements, although they may be tensors."""


def can_split(optimizer: Optimizer) -> bool:
    """Return whether slices of its parameters can be stepped apart from each other.

    Only torch's own code is known to allow it. A subclass, a hook or a `step` that the script has
    replaced may look at whole gradients.
    """
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    step = vars(optimizer).get("step")  # a scheduler replaces it with one that counts
    return (
        type(optimizer) in ELEMENTWISE
        and not any(hooks)
        and (step is None or hasattr(step, "_wrapped_by_lr_sched"))
        and not any(group.get("differentiable") for group in optimizer.param_groups)
        and all(p.dtype in TRAINABLE for group in optimizer.param_groups for p in group["params"])
    )


def cut(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """Return the elements of a tensor in the order that this parameter has in memory.

    It is a view if the tensor has this order, too.
    """
    strides = zip(spec.shape, tensor.stride(), spec.stride, strict=True)
    if not all(size == 1 or own == wanted for size, own, wanted in strides):
        tensor = torch.empty_strided(spec.shape, spec.stride, dtype=tensor.dtype).copy_(tensor)
    return flat(tensor.detach())


def join(slices: Sequence[tuple[Slice, Tensor]], spec: TensorSpec) -> Tensor:
    """Return a tensor with the shape and strides of this parameter, made of slices."""
    joined = torch.empty_strided(spec.shape, spec.stride, dtype=slices[0][1].dtype)
    for (_, begin, end), elements in slices:
        flat(joined)[begin:end].copy_(elements.detach())
    return joined


def split_state(
    saved: dict[str, Any], specs: Sequence[TensorSpec], slices_by_server: Sequence[Slices]
) -> list[dict[str, Any]]:
    """Return the part of an optimizer's `state_dict()` that each server loads.

    What isn't the state of a parameter stays on the head. Raises ProtocolError if this isn't a
    `state_dict()`, or a tensor doesn't have the shape of its parameter.
    """
    check_kind(saved)
    if not isinstance(saved["state"], dict):
        kind = type(saved["state"]).__qualname__
        raise ProtocolError(f"expected the states of parameters by number, got a {kind}")
    states = []
    for server, slices in enumerate(slices_by_server):
        if slices is None:
            states.append(saved)
            continue
        own = {
            one.parameter: _slice_of(saved["state"][one.parameter], specs[one.parameter], one)
            for one in slices
            if one.parameter in saved["state"]
        }
        if server == HEAD:
            known = range(len(specs))
            own |= {key: value for key, value in saved["state"].items() if key not in known}
        states.append({**saved, "state": own})
    return states


def _slice_of(values: Any, spec: TensorSpec, one: Slice) -> Any:
    """Return the state of a slice, from that of its parameter."""
    if not isinstance(values, dict):  # nothing that an optimizer can load
        return values
    found = {}
    for name, value in values.items():
        if not isinstance(value, Tensor):
            found[name] = value
        elif name in WHOLE_VALUES:
            found[name] = value.clone()  # because optimizers change it in place
        elif value.shape != spec.shape:
            raise ProtocolError(
                f"{name} of {spec.name} has the shape {list(value.shape)}, "
                f"expected {list(spec.shape)}"
            )
        else:
            found[name] = cut(value, spec)[one.begin : one.end]
    return found


def merge_states(
    states: Sequence[dict[str, Any] | None],
    specs: Sequence[TensorSpec],
    slices_by_server: Sequence[Slices],
) -> dict[str, Any]:
    """Return the `state_dict()` that one server would have; None: a server without slices.

    Raises InternalError if the servers haven't made the same steps.
    """
    head = states[HEAD]
    assert head is not None
    if slices_by_server[HEAD] is None:
        return head
    found: list[list[tuple[Slice, Any]]] = [[] for _ in specs]  # by parameter
    for state, slices in zip(states, slices_by_server, strict=True):
        for one in slices or ():
            assert state is not None
            found[one.parameter].append((one, state["state"].get(one.parameter)))
    merged = {
        i: _merged(held, spec)
        for i, (held, spec) in enumerate(zip(found, specs, strict=True))
        if any(values is not None for _, values in held)
    }
    merged |= {key: value for key, value in head["state"].items() if key not in range(len(specs))}
    return {**head, "state": merged}


def _merged(held: Sequence[tuple[Slice, Any]], spec: TensorSpec) -> dict[str, Any]:
    """Return the state of a parameter, from those of its slices."""
    first = held[0][1]
    for _, values in held:
        if values is None or first is None or values.keys() != first.keys():
            raise InternalError(f"only some servers have a complete state of {spec.name}")
    found = {}
    for name, value in first.items():
        if isinstance(value, Tensor) and name not in WHOLE_VALUES:
            found[name] = join([(one, values[name]) for one, values in held], spec)
        elif all(_is_equal(value, values[name]) for _, values in held):
            found[name] = value
        else:
            raise InternalError(f"servers differ in {name} of {spec.name}")
    return found


def _is_equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.allclose(value, other.to(value), rtol=0, atol=0, equal_nan=True)
    return type(value) is type(other) and value == other
