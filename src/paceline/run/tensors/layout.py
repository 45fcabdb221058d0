# SPDX-License-Identifier: BSD-3-Clause
"""The tensors that every process of a run has, and their layout in memory.

All processes of a run execute the same script, so each finds the same tensors in it: the parameters
of each optimizer, the buffers of the models, and parameters that no optimizer steps. A worker's
slot and a version of the parameters have the same layout: a gradient is where its parameter is.

Within a section, tensors of one type are adjacent, small ones first, so that adding up gradients is
one operation on a flat block instead of one per tensor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from paceline.errors import SpecError
from paceline.run.tensors.state_spec import OptimizerSpec, StateSpec, TensorSpec

__all__ = [
    "SMALL_BYTES",
    "TRAINABLE",
    "Layout",
    "Section",
    "TensorMemory",
    "TrainingState",
    "Views",
    "difference",
    "dtype_of",
    "flat",
    "gather",
    "lay_out_constants",
    "tensors",
]

ALIGNMENT = 64  # bytes; a cache line, and the widest vector
SMALL_BYTES = 1 << 16  # tensors up to this size are moved together, because each move has a cost
TRAINABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class TrainingState:
    """The optimizers and tensors of one process, and their description."""

    optimizers: list[Optimizer]
    parameters: list[list[Tensor]]  # by optimizer
    buffers: list[Tensor]
    counters: list[Tensor]
    constants: list[Tensor]
    spec: StateSpec


def gather(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> TrainingState:
    """Collect the tensors of these models and optimizers.

    Raises SpecError, with the name of the tensor, if a run can't train them.
    """
    names = {id(p): name for name, p in _named(models, "parameters")}
    owner: dict[int, int] = {}
    parameters: list[list[Tensor]] = []
    for index, optimizer in enumerate(optimizers):
        parameters.append([])
        for number, parameter in enumerate(_parameters_of(optimizer)):
            name = names.setdefault(id(parameter), f"optimizer {index}, parameter {number}")
            _check_parameter(parameter, name)
            if owner.setdefault(id(parameter), index) != index:
                raise SpecError(f"{name} belongs to two optimizers; pass it to only one of them")
            parameters[index].append(parameter)
    constants = {n: p for n, p in _named(models, "parameters") if id(p) not in owner}
    buffers = dict(_named(models, "buffers"))
    averaged = {name: b for name, b in buffers.items() if b.is_floating_point()}
    counted = {name: b for name, b in buffers.items() if not b.is_floating_point()}
    for name, tensor in (*constants.items(), *buffers.items()):
        _check_parameter(tensor, name)
    _check_disjoint([(names[id(p)], p) for own in parameters for p in own])
    spec = StateSpec(
        tuple(
            OptimizerSpec(
                type(optimizer).__qualname__, tuple([_spec(names[id(p)], p) for p in own])
            )
            for optimizer, own in zip(optimizers, parameters, strict=True)
        ),
        tuple([_spec(name, b) for name, b in averaged.items()]),
        tuple([_spec(name, b) for name, b in counted.items()]),
        tuple([_spec(name, p) for name, p in constants.items()]),
    )
    return TrainingState(
        list(optimizers),
        parameters,
        list(averaged.values()),
        list(counted.values()),
        list(constants.values()),
        spec,
    )


def _named(models: Sequence[nn.Module], what: str) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of all models, each tensor once; several models are numbered."""
    seen: set[int] = set()
    for number, model in enumerate(models):
        for name, tensor in getattr(model, f"named_{what}")():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield (f"model {number}, {name}" if len(models) > 1 else name), tensor


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check_parameter(tensor: Tensor, name: str) -> None:
    if is_lazy(tensor):
        raise SpecError(
            f"{name} has no shape yet; run one batch through the model before run.prepare()"
        )
    if isinstance(tensor, nn.Parameter) and tensor.dtype not in TRAINABLE:
        raise SpecError(f"{name} must have a floating-point type, got {tensor.dtype}")


def _check_disjoint(parameters: list[tuple[str, Tensor]]) -> None:
    """Raise SpecError if two parameters share memory."""
    nonempty = [(name, p) for name, p in parameters if p.numel()]
    nonempty.sort(key=lambda one: (str(one[1].device), one[1].data_ptr()))
    for (name, one), (other_name, other) in pairwise(nonempty):
        # Another parameter may be in the gaps of one that isn't dense.
        is_dense = torch.empty_like(one, device="meta").stride() == one.stride()
        end = one.data_ptr() + (one.nbytes if is_dense else one.itemsize)
        if one.device == other.device and other.data_ptr() < end:
            raise SpecError(
                f"{name} and {other_name} share memory; to tie them, use one parameter in both "
                "places"
            )


def _spec(name: str, tensor: Tensor) -> TensorSpec:
    # Keeps the order of dimensions (such as channels last), and closes gaps.
    stride = torch.empty_like(tensor, device="meta").stride()
    return TensorSpec(name, str(tensor.dtype), tuple(tensor.shape), tuple(stride))


class Block(NamedTuple):
    """Memory without gaps that holds tensors of one type."""

    dtype: torch.dtype
    offset: int  # in bytes
    numbers: int  # count of elements
    is_small: bool


class TensorMemory(Protocol):
    """Memory that a layout can view as tensors."""

    def tensor(self, dtype: torch.dtype, count: int, offset: int) -> Tensor:
        """Return a flat tensor on this memory, from this byte on."""


@dataclass(frozen=True)
class Section:
    """Adjacent tensors: where each begins, and the flat blocks that they form.

    A block has tensors of one type, either small or large ones.
    """

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]  # in bytes, by tensor
    blocks: tuple[Block, ...]


@dataclass
class Views:
    """Memory viewed as tensors."""

    parameters: list[list[Tensor]]  # by optimizer
    flats: list[list[Tensor]]  # by optimizer; its parameters in as few tensors as possible
    small_flats: list[list[Tensor]]  # by optimizer; the flats of its small parameters
    buffers: list[Tensor]
    buffer_flats: list[Tensor]
    counters: list[Tensor]
    counter_flats: list[Tensor]


@dataclass(frozen=True)
class Layout:
    """Where each tensor is in memory."""

    parameters: tuple[Section, ...]  # by optimizer
    buffers: Section
    counters: Section
    size: int

    @classmethod
    def of(cls, spec: StateSpec) -> "Layout":
        """Lay out these tensors."""
        end = 0
        sections = []
        for specs in (
            *(o.parameters for o in spec.optimizers),
            spec.buffers,
            spec.counters,
        ):
            section, end = _lay_out(specs, end)
            sections.append(section)
        return cls(tuple(sections[:-2]), sections[-2], sections[-1], end)

    def view(self, memory: TensorMemory) -> Views:
        """Return memory of this layout as tensors."""
        return Views(
            [tensors(section, memory) for section in self.parameters],
            [flats(section, memory) for section in self.parameters],
            [small_flats(section, memory) for section in self.parameters],
            tensors(self.buffers, memory),
            flats(self.buffers, memory),
            tensors(self.counters, memory),
            flats(self.counters, memory),
        )


def lay_out_constants(spec: StateSpec) -> tuple[Section, int]:
    """Return the layout of the constants, which have memory of their own, and its size."""
    return _lay_out(spec.constants, 0)


def _lay_out(specs: tuple[TensorSpec, ...], begin: int) -> tuple[Section, int]:
    offsets = [0] * len(specs)
    blocks = []
    end = begin
    sizes = [torch.Size(s.shape).numel() * dtype_of(s.dtype).itemsize for s in specs]
    kinds = [(s.dtype, size > SMALL_BYTES) for s, size in zip(specs, sizes, strict=True)]
    by_kind = sorted(range(len(specs)), key=kinds.__getitem__)
    for (name, is_large), same in groupby(by_kind, kinds.__getitem__):
        dtype, first = dtype_of(name), end
        for i in same:
            offsets[i] = end
            end += -(-sizes[i] // ALIGNMENT) * ALIGNMENT
        blocks.append(Block(dtype, first, (end - first) // dtype.itemsize, not is_large))
    return Section(specs, tuple(offsets), tuple(blocks)), end


def tensors(section: Section, memory: TensorMemory) -> list[Tensor]:
    """Return the tensors of a section in this memory."""
    return [
        memory.tensor(dtype_of(s.dtype), torch.Size(s.shape).numel(), offset).as_strided(
            s.shape, s.stride
        )
        for s, offset in zip(section.specs, section.offsets, strict=True)
    ]


def flats(section: Section, memory: TensorMemory) -> list[Tensor]:
    """Return the blocks of a section in this memory."""
    return [memory.tensor(b.dtype, b.numbers, b.offset) for b in section.blocks]


def small_flats(section: Section, memory: TensorMemory) -> list[Tensor]:
    """Return the blocks of small tensors of a section in this memory."""
    return [memory.tensor(b.dtype, b.numbers, b.offset) for b in section.blocks if b.is_small]


def flat(dense: Tensor) -> Tensor:
    """Return a dense tensor, whatever the order of its dimensions, as a flat one."""
    return dense.as_strided((dense.numel(),), (1,))


def dtype_of(name: str) -> torch.dtype:
    """Return the type of a name like "torch.float32"; raises SpecError if it can't be sent."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise SpecError(f"unknown tensor type {name!r}")
    if str(dtype).startswith(("torch.qint", "torch.quint")):
        # Its numbers mean nothing without their scale, which isn't sent, and torch crashes on them.
        raise SpecError(f"a quantized tensor ({name}) can't be sent; use another type")
    return dtype


def difference(theirs: StateSpec, ours: StateSpec) -> str | None:
    """Return how a worker's tensors differ from those of the run; None if they don't."""
    pairs: list[tuple[str, Sequence[object], Sequence[object]]] = [
        ("optimizers", [o.kind for o in theirs.optimizers], [o.kind for o in ours.optimizers])
    ]
    pairs += [
        ("parameters", a.parameters, b.parameters)
        for a, b in zip(theirs.optimizers, ours.optimizers, strict=False)
    ]
    pairs += [
        (what, getattr(theirs, what), getattr(ours, what))
        for what in ("buffers", "counters", "constants")
    ]
    for what, mine, run in pairs:
        if len(mine) != len(run):
            return f"it has {len(mine)} {what}, the run has {len(run)}"
        for a, b in zip(mine, run, strict=True):
            if a != b:
                return f"its {what} differ: it has {a}, the run has {b}"
    return None
