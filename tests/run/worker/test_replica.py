# SPDX-License-Identifier: BSD-3-Clause
"""A worker's tensors: whether they are copied or point at shared memory, the numbers are the same.

Parameters on another device are copied. Here, `stage=True` makes a replica treat all parameters as
if they were on one.
"""

from math import isfinite

import pytest
import torch
from torch import nn

from paceline.run.net.in_process import InProcessStore
from paceline.run.tensors import sums
from paceline.run.tensors.layout import gather
from paceline.run.worker.replica import Replica


class Scene:
    """A replica of a small model with its slot and two parameter buffers."""

    def __init__(self, stage):
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 5000), nn.Linear(2, 2)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.common = gather([self.model], [self.optimizer])
        self.replica = Replica(self.common, [self.model], stage=stage)
        self.store = InProcessStore(self.common.contents)
        self.slot = self.store.new_accumulator()
        self.replica.set_slot(self.slot)
        self.places = [self.store.new_buffer().views for _ in range(2)]
        self.touched = []
        self.replica.on_gradients(self.touched.append)
        for place, factor in zip(self.places, (1.0, 2.0), strict=True):
            for view, own in zip(place.parameters[0], self.common.parameters[0], strict=True):
                view.copy_(own.detach() * factor)
            for view, own in zip(place.buffers, self.common.buffers, strict=True):
                view.copy_(own + factor)

    def turn(self, place, passes=1, set_to_none=True):
        """Compute a gradient; return what `collect` returned, and what is in the slot."""
        self.replica.load(self.places[place])
        self.optimizer.zero_grad(set_to_none=set_to_none)
        for number in range(passes):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * place + number))
            self.model[:3](x).square().mean().backward()
        with torch.no_grad():
            unused, sq_norm = self.replica.collect(0)
        gradients = [view.clone() for view in self.slot.parameters[0]]
        rest = [*self.slot.buffers, *self.slot.counters]
        return unused, sq_norm, gradients, [tensor.clone() for tensor in rest]


TURNS = [(0, 1, True), (1, 1, True), (1, 3, True), (0, 2, False), (0, 1, False)]


def test_staged_and_pointed_parameters_give_the_same_numbers():
    staged, pointed = Scene(stage=True), Scene(stage=False)
    for turn in TURNS:
        torch.testing.assert_close(staged.turn(*turn), pointed.turn(*turn))
        ours = [p.detach() for p in staged.model.parameters()]
        torch.testing.assert_close(ours, [p.detach() for p in pointed.model.parameters()])
    assert staged.touched == pointed.touched


@pytest.mark.parametrize("stage", [True, False])
def test_collected_gradient_is_what_a_plain_model_computes(stage):
    scene, plain = Scene(stage), Scene(stage).model
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(2.0)
        for buffer in plain[1].buffers():
            if buffer.is_floating_point():
                buffer.add_(2.0)
    unused, sq_norm, gradients, rest = scene.turn(place=1)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(10))
    plain[:3](x).square().mean().backward()
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in plain.parameters()]
    torch.testing.assert_close(gradients, grads)
    torch.testing.assert_close(rest, list(plain.buffers()))
    assert unused == (6, 7), "the parameters of the last layer"
    assert sq_norm == pytest.approx(sum(g.square().sum().item() for g in grads), rel=1e-4)


def test_only_pointed_parameters_change_their_address():
    for stage in (True, False):
        scene = Scene(stage)
        before = [p.data_ptr() for p in scene.model.parameters()]
        scene.replica.load(scene.places[0])
        stayed = [p.data_ptr() for p in scene.model.parameters()] == before
        assert stayed == stage


def test_parameter_that_its_module_changes_is_copied():
    torch.manual_seed(0)
    model = nn.Embedding(3, 2, max_norm=0.1)
    common = gather([model], [torch.optim.SGD(model.parameters(), lr=0.1)])
    replica = Replica(common, [model])
    own = model.weight.data_ptr()
    replica.load(InProcessStore(common.contents).new_buffer().views)
    assert model.weight.data_ptr() == own
    model(torch.tensor([0]))


def test_norm_of_a_huge_gradient_is_finite_and_of_a_non_finite_one_is_not():
    scene = Scene(stage=False)
    scene.replica.load(scene.places[0])
    for value, is_finite in ((1e30, True), (float("inf"), False), (float("nan"), False)):
        for p in scene.model.parameters():
            p.grad = torch.full_like(p, value)
        with torch.no_grad():
            _, sq_norm = scene.replica.collect(0)
        assert torch.tensor(sq_norm, dtype=torch.float64).isfinite() == is_finite


# --------------------------------------------------------------------------------- what is measured


def scale(scene):
    scene.large.mul_(3.0)


def scale_unnoticed(scene):
    """Change it as `GradScaler` and some scripts do: torch's version counter misses it."""
    before = scene.large._version
    scene.large.data.mul_(3.0)
    assert scene.large._version == before


def replace(scene):
    scene.model[2].weight.grad = torch.full_like(scene.large, 0.5)


def remove(scene):
    scene.model[2].weight.grad = None


class Measured(Scene):
    """A scene in which the large gradient changes after the backward pass."""

    @property
    def large(self):
        return self.model[2].weight.grad

    def norms(self, factor, change):
        """Return the squared norm from `collect`, and that of the slot."""
        self.replica.load(self.places[0])
        self.optimizer.zero_grad()
        (self.model[:3](torch.ones(6, 4)).square().mean() * factor).backward()
        change(self)
        with torch.no_grad():
            _, sq_norm = self.replica.collect(0)
        return sq_norm, float(sum(v.double().square().sum() for v in self.slot.parameters[0]))


@pytest.mark.parametrize("stage", [True, False])
@pytest.mark.parametrize(
    "change",
    [lambda _: None, scale, scale_unnoticed, replace, remove],
    ids=lambda f: f.__name__,
)
def test_norm_is_that_of_the_gradient_in_the_slot(stage, change):
    scene = Measured(stage)
    for factor in (1.0, 2.0):
        sq_norm, expected = scene.norms(factor, change)
        assert sq_norm == pytest.approx(expected, rel=1e-4)


def test_gradient_that_the_script_repairs_is_measured_again():
    scene = Measured(stage=False)
    with torch.no_grad():
        scene.places[0].parameters[0][2].fill_(float("inf"))  # makes its gradient infinite
    sq_norm, expected = scene.norms(1.0, lambda _: None)
    assert not isfinite(sq_norm)
    del expected

    def repair(scene):
        for p in scene.model.parameters():
            if p.grad is not None:
                p.grad.data.nan_to_num_(nan=2.0, posinf=2.0, neginf=2.0)

    sq_norm, expected = scene.norms(1.0, repair)
    assert sq_norm == pytest.approx(expected, rel=1e-4)


def test_only_a_new_nan_in_a_buffer_makes_the_norm_non_finite():
    scene = Scene(stage=False)
    assert isfinite(scene.turn(0)[1])
    mean = scene.model[1].running_mean
    scene.replica.load(scene.places[0])
    scene.optimizer.zero_grad()
    scene.model[:3](torch.ones(6, 4)).square().mean().backward()
    mean[3] = float("nan")
    with torch.no_grad():
        assert not isfinite(scene.replica.collect(0)[1])
    scene.places[0].buffers[0][3] = float("nan")
    assert isfinite(scene.turn(0)[1])
    assert scene.slot.buffers[0][3].isnan()


def test_infinite_buffer_is_allowed():
    """Attention masks are."""
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((3,), float("-inf")))
    scene = Scene.__new__(Scene)
    scene.model, scene.common = model, gather([model], [torch.optim.SGD(model.parameters(), 0.1)])
    scene.replica = Replica(scene.common, [model])
    scene.store = InProcessStore(scene.common.contents)
    scene.slot = scene.store.new_accumulator()
    scene.replica.set_slot(scene.slot)
    scene.places = [scene.store.new_buffer().views]
    scene.places[0].buffers[0].copy_(model.mask)
    scene.replica.on_gradients(lambda _: None)
    scene.replica.load(scene.places[0])
    model(torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        assert isfinite(scene.replica.collect(0)[1])


def test_gradient_whose_first_block_is_zero_is_measured_again(monkeypatch):
    monkeypatch.setattr(sums, "BLOCK", 1000)
    scene = Measured(stage=False)

    scene.replica.load(scene.places[0])
    scene.optimizer.zero_grad()
    (scene.model[2](torch.ones(1, 8))[0, 3000:].sum()).backward()  # zeros before element 24,000
    scene.large.data.mul_(3.0)
    with torch.no_grad():
        _, sq_norm = scene.replica.collect(0)
    expected = float(sum(v.double().square().sum() for v in scene.slot.parameters[0]))
    assert sq_norm == pytest.approx(expected)
