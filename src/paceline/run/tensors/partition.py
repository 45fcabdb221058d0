# SPDX-License-Identifier: BSD-3-Clause
"""Which server holds which part of the parameters.

Every process computes the same partition from the description of the tensors, the number of servers
and which optimizers can be split. An optimizer that works element by element is cut anywhere, so
the parts are equally large however the tensors are. One that isn't known to do so stays whole, on
the head. The head also holds everything that isn't stepped: buffers, counters and constants.

The cuts are between the blocks in which gradients are added up and measured. So the servers
together measure exactly the blocks that a single server would.

A part has the blocks of the whole, each with a range of its elements. So the bytes of the ranges
are those of the part, in the same order, and travel between the two without a copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from paceline.run.tensors import sums
from paceline.run.tensors.layout import Block, Layout, Section, Views, flat
from paceline.run.tensors.state_spec import OptimizerSpec, StateSpec, TensorSpec

__all__ = ["HEAD", "Part", "Range", "Slice", "partition"]

HEAD = 0
ALIGNED = 32  # elements; of every type that can be trained, they fill whole cache lines
NAME_LENGTH = 200  # the longest name that a message can have


class Slice(NamedTuple):
    """A part of a parameter, as a range of its elements in the order of memory."""

    parameter: int  # among those of its optimizer
    begin: int
    end: int


class Range(NamedTuple):
    """A part of a flat block, as a range of its elements."""

    begin: int
    end: int


@dataclass(frozen=True)
class Part:
    """What one server holds."""

    spec: StateSpec
    layout: Layout  # not `Layout.of(spec)`: its blocks are those of the whole
    slices: tuple[tuple[Slice, ...] | None, ...]  # by optimizer; None: all of it, in its shape
    ranges: tuple[tuple[Range, ...], ...]  # by optimizer and flat block

    def has(self, optimizer: int | None) -> bool:
        """Return whether this server has any bytes of an optimizer's parameters; None: any."""
        if optimizer is None:
            return self.layout.size > 0
        return any(begin < end for begin, end in self.ranges[optimizer])

    def of(self, whole: Views) -> Views:
        """Return this part of whole memory, as `layout.view()` does of the part's own memory."""
        flats = [
            [one[begin:end] for one, (begin, end) in zip(own, ranges, strict=True)]
            for own, ranges in zip(whole.flats, self.ranges, strict=True)
        ]
        parameters = [
            own if slices is None else [flat(own[i])[begin:end] for i, begin, end in slices]
            for own, slices in zip(whole.parameters, self.slices, strict=True)
        ]
        small_flats = [
            [one for one, block in zip(own, section.blocks, strict=True) if block.is_small]
            for own, section in zip(flats, self.layout.parameters, strict=True)
        ]
        return Views(
            parameters,
            flats,
            small_flats,
            whole.buffers if self.spec.buffers else [],
            whole.buffer_flats if self.spec.buffers else [],
            whole.counters if self.spec.counters else [],
            whole.counter_flats if self.spec.counters else [],
        )

    def unused(self, optimizer: int, parameters: frozenset[int]) -> frozenset[int]:
        """Return which tensors of this part belong to these parameters."""
        slices = self.slices[optimizer]
        if slices is None or not parameters:
            return parameters
        return frozenset(i for i, one in enumerate(slices) if one.parameter in parameters)


def partition(
    spec: StateSpec, servers: int, is_split: Sequence[bool], unit: int | None = None
) -> list[Part]:
    """Return the part of each server, the head's first.

    `is_split`: for each optimizer, whether it may be cut. `unit`: how many elements stay together;
    None: a block, see `sums`.

    In bytes of each optimizer that is cut, a server has its equal share to within less than a unit,
    and the head is never below it.
    """
    unit = unit or sums.BLOCK
    assert unit % ALIGNED == 0
    whole = Layout.of(spec)
    if servers == 1:
        is_split = [False] * len(is_split)
    cuts = [
        _cut(section, servers, unit) if can_be_cut else None
        for section, can_be_cut in zip(whole.parameters, is_split, strict=True)
    ]
    return [_part(spec, whole, cuts, server) for server in range(servers)]


def _cut(section: Section, servers: int, unit: int) -> list[list[Range]]:
    """Return the ranges that each server holds, by server and block.

    A server holds the units that begin before its share of the section's bytes ends.
    """
    sizes = [block.numbers * block.dtype.itemsize for block in section.blocks]
    found: list[list[Range]] = [[] for _ in range(servers)]
    before = 0
    for block, size in zip(section.blocks, sizes, strict=True):
        unit_bytes, end = unit * block.dtype.itemsize, 0
        for server in range(servers):
            share = sum(sizes) * (server + 1) - before * servers  # in bytes, times `servers`
            units = -(-share // (unit_bytes * servers))
            begin, end = end, min(block.numbers, max(0, unit * units))
            found[server].append(Range(begin, end))
        before += size
    return found


def _part(
    spec: StateSpec, whole: Layout, cuts: Sequence[list[list[Range]] | None], server: int
) -> Part:
    """Describe and lay out what one server holds; `cuts`: by optimizer, None if it is whole."""
    sections: list[Section] = []
    all_slices: list[tuple[Slice, ...] | None] = []
    all_ranges: list[tuple[Range, ...]] = []
    end = 0
    for section, cut in zip(whole.parameters, cuts, strict=True):
        slices: tuple[Slice, ...] | None = None
        if cut is None and server == HEAD:
            ranges = [Range(0, block.numbers) for block in section.blocks]
            held, end = _moved(section, end)
        else:
            ranges = [Range(0, 0) for _ in section.blocks] if cut is None else cut[server]
            held, slices, end = _cut_section(section, ranges, end, server)
        sections.append(held)
        all_slices.append(slices)
        all_ranges.append(tuple(ranges))
    pairs = zip(spec.optimizers, sections, strict=True)
    optimizers = tuple(OptimizerSpec(one.kind, held.specs) for one, held in pairs)
    buffers = counters = Section((), (), ())
    held_spec = StateSpec(optimizers, (), (), ())
    if server == HEAD:
        buffers, end = _moved(whole.buffers, end)
        counters, end = _moved(whole.counters, end)
        held_spec = StateSpec(optimizers, spec.buffers, spec.counters, spec.constants)
    layout = Layout(tuple(sections), buffers, counters, end)
    return Part(held_spec, layout, tuple(all_slices), tuple(all_ranges))


def _cut_section(
    section: Section, ranges: Sequence[Range], begin: int, server: int
) -> tuple[Section, tuple[Slice, ...], int]:
    """Return these ranges of a section, from byte `begin` on, its slices, and where it ends."""
    blocks = []
    placed = []  # slices and their offsets
    end = begin
    for block, held in zip(section.blocks, ranges, strict=True):
        blocks.append(block._replace(offset=end, numbers=held.end - held.begin))
        for i, first in _elements_before(section, block):
            count = _count(section.specs[i])
            one = Slice(i, max(held.begin - first, 0), min(held.end - first, count))
            if one.begin < one.end:
                placed.append((one, end + (first + one.begin - held.begin) * block.dtype.itemsize))
        end += (held.end - held.begin) * block.dtype.itemsize
    if server == HEAD:  # an optimizer has a state of empty parameters, too
        placed += [(Slice(i, 0, 0), begin) for i, s in enumerate(section.specs) if not _count(s)]
    placed.sort()
    slices = tuple(one for one, _ in placed)
    offsets = tuple(offset for _, offset in placed)
    specs = tuple(_spec_of(one, section.specs[one.parameter]) for one in slices)
    return Section(specs, offsets, tuple(blocks)), slices, end


def _elements_before(section: Section, block: Block) -> list[tuple[int, int]]:
    """Return the tensors in a block, each with the number of elements of the block before it."""
    end = block.offset + block.numbers * block.dtype.itemsize
    return [
        (i, (offset - block.offset) // block.dtype.itemsize)
        for i, offset in enumerate(section.offsets)
        if block.offset <= offset < end and _count(section.specs[i])
    ]


def _count(spec: TensorSpec) -> int:
    return prod(spec.shape)


def _spec_of(one: Slice, whole: TensorSpec) -> TensorSpec:
    """Describe a slice; it has a name of its own if the parameter is cut."""
    count, name = one.end - one.begin, whole.name
    if count < _count(whole):
        range_text = f"[{one.begin}:{one.end}]"
        name = whole.name[: NAME_LENGTH - len(range_text)] + range_text
    return TensorSpec(name, whole.dtype, (count,), (1,))


def _moved(section: Section, begin: int) -> tuple[Section, int]:
    """Return a section from byte `begin` on, and where it ends."""
    shift = begin - min((block.offset for block in section.blocks), default=begin)
    blocks = tuple(block._replace(offset=block.offset + shift) for block in section.blocks)
    offsets = tuple(offset + shift for offset in section.offsets)
    size = sum(block.numbers * block.dtype.itemsize for block in section.blocks)
    return Section(section.specs, offsets, blocks), begin + size
