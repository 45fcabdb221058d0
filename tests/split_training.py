# SPDX-License-Identifier: BSD-3-Clause
"""The same training on one server and on several, without processes."""

from copy import deepcopy
from functools import cache

import torch
from torch import nn

from paceline.run.net.in_process import PlainMemory
from paceline.run.tensors.layout import Layout, flat, gather
from paceline.run.tensors.optimizer_states import load_exactly
from paceline.run.tensors.partition import partition
from paceline.run.tensors.state_parts import merge_shard_state, split_shard_state

__all__ = ["Servers", "Whole", "is_same", "make_grads", "same_bits"]

SHAPES = [(6, 4, 3, 3), (), (33, 17), (1,), (0, 3), (5,), (2, 3), (70,)]
NEVER, SOMETIMES = 6, 7  # parameters that have no gradient, or one in odd steps only


def make_values(dtype):
    """Return the first values of the parameters; the first is in channels_last order."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    values[0] = values[0].to(memory_format=torch.channels_last)
    return values


@cache
def make_grads(step, dtype):
    """Return the gradients of a step."""
    generator = torch.Generator().manual_seed(step + 1)
    grads = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    grads[0] = grads[0].to(memory_format=torch.channels_last)
    return grads


class Whole:
    """One server: an optimizer with two groups, and its parameters."""

    def __init__(self, make_optimizer, dtype=torch.float32, *, is_regular=False):
        """`is_regular`: all parameters but one have a gradient in every step."""
        self.dtype = dtype
        self.is_regular = is_regular
        self.model = nn.ParameterList(nn.Parameter(one) for one in make_values(dtype))
        self.parameters = list(self.model)
        self.optimizer = make_optimizer(
            [{"params": self.parameters[:3]}, {"params": self.parameters[3:], "lr": 0.05}]
        )
        self.state = gather([self.model], [self.optimizer])
        self.steps = 0

    def grads(self):
        """Return the gradients of the next step; None: a parameter has none."""
        missing = {NEVER} if self.is_regular or self.steps % 2 else {NEVER, SOMETIMES}
        grads = make_grads(self.steps, self.dtype)
        return [None if i in missing else grad.clone() for i, grad in enumerate(grads)]

    def step(self, grads=None):
        """Make a step with these gradients, or those that are next."""
        for p, grad in zip(self.parameters, grads or self.grads(), strict=True):
            p.grad = grad
        self.optimizer.step()
        self.steps += 1


class Servers:
    """Several servers, each with its slices of the parameters and the script's own optimizer."""

    def __init__(self, whole, make_optimizer, servers, unit):
        """Continue from where `whole` is."""
        self.spec = whole.state.spec
        self.parts = partition(self.spec, servers, [True], unit)
        self.own = [
            Whole(make_optimizer, whole.dtype, is_regular=whole.is_regular) for _ in self.parts
        ]
        saved = {
            "parameters": [[p.detach() for p in whole.parameters]],
            "average": None,
            "optimizers": [deepcopy(whole.optimizer.state_dict())],  # slices would be views of it
            "version": whole.steps,
        }
        states = split_shard_state(saved, self.spec, self.parts)
        for part, own, state in zip(self.parts, self.own, states, strict=True):
            own.steps = whole.steps
            values = held_in(part, state["parameters"][0], len(own.parameters))
            for p, value in zip(own.parameters, values, strict=True):
                p.data = torch.empty(0, dtype=whole.dtype) if value is None else value.clone()
            if state["optimizers"][0] is not None:
                load_exactly(own.optimizer, own.parameters, state["optimizers"][0])

    def step(self):
        """Make the step that `Whole` would make."""
        grads = self.own[0].grads()
        layout = Layout.of(self.spec)
        views = layout.view(PlainMemory(layout.size))
        for view, grad in zip(views.parameters[0], grads, strict=True):
            if grad is not None:
                view.copy_(grad)
        for part, own in zip(self.parts, self.own, strict=True):
            slot = part.layout.view(PlainMemory(part.layout.size))
            for mine, theirs in zip(slot.flats[0], part.of(views).flats[0], strict=True):
                mine.copy_(theirs)
            held = held_in(part, slot.parameters[0], len(grads))
            pairs = zip(held, grads, strict=True)
            own.step([None if grad is None else value for value, grad in pairs])

    def shard_states(self):
        """Return the state of each server, as its shard would."""
        return [
            {
                "parameters": [[own.parameters[i].detach() for i in numbers_of(part, own)]],
                "average": None,
                "optimizers": [
                    own.optimizer.state_dict() if number == 0 or numbers_of(part, own) else None
                ],
                **({} if number else {"version": own.steps}),
            }
            for number, (part, own) in enumerate(zip(self.parts, self.own, strict=True))
        ]

    def merged(self):
        """Return the parameters and the state of the optimizer, as one server would have them."""
        merged = merge_shard_state(self.shard_states(), self.spec, self.parts)
        return merged["parameters"][0], merged["optimizers"][0]

    def become(self, whole):
        """Give `whole` the parameters and the state of these servers."""
        parameters, state = deepcopy(self.merged())
        for p, values in zip(whole.parameters, parameters, strict=True):
            p.data = values
        load_exactly(whole.optimizer, whole.parameters, state)
        whole.steps = self.own[0].steps
        return whole


def numbers_of(part, own):
    """Return which parameters a server has anything of."""
    slices = part.slices[0]
    return list(range(len(own.parameters))) if slices is None else [one.parameter for one in slices]


def held_in(part, tensors, count):
    """Return a part's tensors by parameter; None: it has nothing of this one."""
    if part.slices[0] is None:
        return tensors
    held = {one.parameter: value for one, value in zip(part.slices[0], tensors, strict=True)}
    return [held.get(i) for i in range(count)]


def same_bits(a, b):
    """Return whether two tensors are the same to the bit, with their type, shape and strides."""
    if (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()):
        return False
    return torch.equal(flat(a.detach()).view(torch.uint8), flat(b.detach()).view(torch.uint8))


def is_same(a, b):
    """Return whether two states are the same, tensors to the bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_bits(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(is_same, a, b))
    return type(a) is type(b) and a == b
