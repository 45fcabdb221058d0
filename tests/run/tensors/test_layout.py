# SPDX-License-Identifier: BSD-3-Clause
"""The tensors that the processes of a run share, and their layout in memory."""

import os

import pytest
import torch
import torch._dynamo  # optimizers import it, and it sets an environment variable
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import nn

from message_examples import unhurried
from paceline.errors import SpecError
from paceline.run.tensors import layout
from paceline.run.tensors.layout import (
    ALIGNMENT,
    Layout,
    difference,
    dtype_of,
    gather,
    lay_out_constants,
    tensors,
)
from paceline.run.tensors.shared_region import Region
from paceline.run.tensors.state_spec import OptimizerSpec, StateSpec, TensorSpec

SGD = torch.optim.SGD


def spec(name, dtype, shape):
    stride = torch.empty(shape, device="meta").stride()
    return TensorSpec(name, dtype, tuple(shape), tuple(stride))


specs = st.lists(
    st.builds(
        spec,
        st.just("x"),
        st.sampled_from(["torch.float32", "torch.float64", "torch.bfloat16", "torch.int64"]),
        st.lists(st.integers(0, 5), max_size=3),
    ),
    max_size=6,
).map(tuple)
contents = st.builds(
    StateSpec,
    st.lists(st.builds(OptimizerSpec, st.just("SGD"), specs), max_size=3).map(tuple),
    specs,
    specs,
    specs,
)


def test_tensors_are_disjoint_aligned_and_covered_by_blocks(monkeypatch):
    monkeypatch.setattr(layout, "SMALL_BYTES", 64)

    @unhurried
    @given(contents)
    def holds(contents):
        found = Layout.of(contents)
        taken = set()
        for section in (*found.parameters, found.buffers, found.counters):
            assert len({(b.dtype, b.is_small) for b in section.blocks}) == len(section.blocks)
            covered = {
                (b.dtype, b.is_small): range(b.offset, b.offset + b.numbers * b.dtype.itemsize)
                for b in section.blocks
            }
            for one, offset in zip(section.specs, section.offsets, strict=True):
                dtype = dtype_of(one.dtype)
                own = range(offset, offset + torch.Size(one.shape).numel() * dtype.itemsize)
                assert offset % ALIGNMENT == 0
                assert not taken.intersection(own)
                taken.update(own)
                if own:
                    block = covered[dtype, len(own) <= 64]
                    assert own[0] in block
                    assert own[-1] in block
            for block in covered.values():
                assert block.stop <= found.size

    holds()


@unhurried
@given(contents)
def test_operation_on_the_blocks_reaches_every_tensor(contents):
    found = Layout.of(contents)
    region, fd = Region.create(found.size, "test")
    os.close(fd)
    views = found.view(region)
    groups = [
        *zip(views.parameters, views.flats, strict=True),
        (views.buffers, views.buffer_flats),
        (views.counters, views.counter_flats),
    ]
    for number, (_, flats) in enumerate(groups):
        for flat in flats:
            flat.fill_(number + 1)
    for number, (own, _) in enumerate(groups):
        for tensor in own:
            assert torch.equal(tensor, torch.full_like(tensor, number + 1))


def test_same_spec_gives_the_same_layout():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    common = gather([model], [SGD(model.parameters(), lr=0.1)])
    assert Layout.of(common.spec) == Layout.of(common.spec)


def test_memory_formats_are_kept_and_gaps_closed():
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    model.gap = nn.Parameter(torch.zeros(4, 4)[:, :2])
    common = gather([model], [SGD(model.parameters(), lr=0.1)])
    found = {one.name: one for one in common.spec.optimizers[0].parameters}
    assert found["weight"].stride == model.weight.stride()
    assert found["gap"].stride == (2, 1)


def test_gather_finds_every_tensor_once_and_names_it():
    shared = nn.Linear(2, 2, bias=False)
    first = nn.Sequential(shared, nn.BatchNorm1d(2, affine=False))
    second = nn.Sequential(shared, nn.Linear(2, 1, bias=False))
    loose = nn.Parameter(torch.zeros(3))
    common = gather([first, second], [SGD([shared.weight, loose], lr=0.1)])
    found = common.spec
    names = [
        [one.name for one in part] for part in (found.buffers, found.counters, found.constants)
    ]
    assert [one.name for one in found.optimizers[0].parameters] == [
        "model 0, 0.weight",
        "optimizer 0, parameter 1",
    ]
    assert names == [
        ["model 0, 1.running_mean", "model 0, 1.running_var"],
        ["model 0, 1.num_batches_tracked"],
        ["model 1, 1.weight"],
    ]


def test_constants_have_separate_memory():
    model = nn.Linear(2, 3)
    common = gather([model], [SGD([model.bias], lr=0.1)])
    section, size = lay_out_constants(common.spec)
    region, fd = Region.create(size, "test")
    os.close(fd)
    [weight] = tensors(section, region)
    assert weight.shape == model.weight.shape
    assert Layout.of(common.spec).size == ALIGNMENT  # only the bias


# ----------------------------------------------------------------------------------- what cannot be


def lazy():
    model = nn.LazyLinear(2)
    return [model], [SGD([*model.parameters()], lr=0.1)]


def integers():
    model = nn.Module()
    model.count = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    return [model], []


def complex_numbers():
    model = nn.Module()
    model.wave = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    return [model], [SGD(model.parameters(), lr=0.1)]


def two_optimizers():
    model = nn.Linear(2, 1)
    return [model], [SGD(model.parameters(), lr=0.1), SGD([model.bias], lr=0.1)]


def same_memory():
    model = nn.Linear(2, 2)
    model.other = nn.Parameter(model.weight.data)
    return [model], [SGD(model.parameters(), lr=0.1)]


def overlapping():
    flat, model = torch.zeros(6), nn.Module()
    model.one, model.two = nn.Parameter(flat[:4]), nn.Parameter(flat[2:])
    return [model], [SGD(model.parameters(), lr=0.1)]


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lazy, "weight has no shape yet; run one batch through the model before"),
        (integers, "count must have a floating-point type, got torch.int64"),
        (complex_numbers, "wave must have a floating-point type, got torch.complex64"),
        (two_optimizers, "bias belongs to two optimizers; pass it to only one of them"),
        (same_memory, "weight and other share memory; to tie them"),
        (overlapping, "one and two share memory; to tie them"),
    ],
)
def test_gather_refuses_what_a_run_cannot_train(make, what):
    with pytest.raises(SpecError, match=what):
        gather(*make())


def test_interleaved_parameters_are_disjoint():
    flat, model = torch.zeros(6), nn.Module()
    model.one, model.two = nn.Parameter(flat[::2]), nn.Parameter(flat[1::2])
    common = gather([model], [SGD(model.parameters(), lr=0.1)])
    assert [spec.stride for spec in common.spec.optimizers[0].parameters] == [(1,), (1,)]


def test_shared_parameter_is_one_parameter():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    common = gather([model], [SGD(model.parameters(), lr=0.1)])
    assert [one.name for one in common.spec.optimizers[0].parameters] == [
        "0.weight",
        "0.bias",
        "1.bias",
    ]


@pytest.mark.parametrize("name", ["torch.nonsense", "torch.Tensor", "", "torch.", "__class__"])
def test_unknown_dtype_is_refused(name):
    with pytest.raises(SpecError, match="unknown tensor type"):
        dtype_of(name)


@pytest.mark.parametrize("name", ["torch.qint8", "torch.quint8", "torch.qint32"])
def test_quantized_dtype_is_refused(name):
    with pytest.raises(SpecError, match="a quantized tensor"):
        dtype_of(name)


# -------------------------------------------------------------------------------------- differences

MODEL = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
OURS = gather([MODEL], [SGD([*MODEL[0].parameters(), *MODEL[1].parameters()], lr=0.1)]).spec
[ONE] = OURS.optimizers


def with_parameters(*parameters):
    return replace(OURS, optimizers=(replace(ONE, parameters=parameters),))


@pytest.mark.parametrize(
    ("theirs", "what"),
    [
        (OURS, None),
        (replace(OURS, optimizers=()), "it has 0 optimizers, the run has 1"),
        (
            replace(OURS, optimizers=(replace(ONE, kind="Adam"),)),
            "its optimizers differ: it has Adam, the run has SGD",
        ),
        (with_parameters(*ONE.parameters[1:]), "it has 3 parameters, the run has 4"),
        (
            with_parameters(spec("0.weight", "torch.float32", (4, 2)), *ONE.parameters[1:]),
            "its parameters differ: it has 0.weight: torch.float32[4, 2], the run has "
            "0.weight: torch.float32[3, 2]",
        ),
        (
            with_parameters(spec("0.weight", "torch.float64", (3, 2)), *ONE.parameters[1:]),
            "its parameters differ: it has 0.weight: torch.float64[3, 2], the run has "
            "0.weight: torch.float32[3, 2]",
        ),
        (
            with_parameters(spec("first", "torch.float32", (3, 2)), *ONE.parameters[1:]),
            "its parameters differ: it has first: torch.float32[3, 2], the run has "
            "0.weight: torch.float32[3, 2]",
        ),
        (replace(OURS, buffers=OURS.buffers[:1]), "it has 1 buffers, the run has 2"),
        (replace(OURS, counters=()), "it has 0 counters, the run has 1"),
        (replace(OURS, constants=()), "it has 0 constants, the run has 2"),
    ],
)
def test_difference_names_both_sides(theirs, what):
    assert difference(theirs, OURS) == what


def test_difference_shows_other_strides():
    first, *others = ONE.parameters
    assert difference(with_parameters(replace(first, stride=(1, 3)), *others), OURS) == (
        "its parameters differ: it has 0.weight: torch.float32[3, 2] with strides [1, 3], "
        "the run has 0.weight: torch.float32[3, 2]"
    )
