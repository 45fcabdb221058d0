# SPDX-License-Identifier: BSD-3-Clause
"""A worker's tensors: whether they are copied or point at shared memory, the numbers are the same.

Parameters on another device are copied. Here, `stage=True` makes a replica treat all parameters as
if they were on one.
"""

from math import isfinite

import pytest
import torch
from torch import nn

from paceline.errors import SpecError
from paceline.run.net.in_process import InProcessStore
from paceline.run.tensors import sums
from paceline.run.tensors.layout import gather
from paceline.run.worker.replica import Replica


class Bench:
    """A replica of a small model with its slot and two parameter buffers."""

    def __init__(self, stage):
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 5000), nn.Linear(2, 2)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = gather([self.model], [self.optimizer])
        self.replica = Replica(self.state, [self.model], stage=stage)
        self.share(buffers=2)
        self.touched = []
        self.replica.on_gradients(self.touched.append)
        for views, factor in zip(self.buffers, (1.0, 2.0), strict=True):
            for view, own in zip(views.parameters[0], self.state.parameters[0], strict=True):
                view.copy_(own.detach() * factor)
            for view, own in zip(views.buffers, self.state.buffers, strict=True):
                view.copy_(own + factor)

    def share(self, buffers):
        """Allocate a slot and parameter buffers."""
        store = InProcessStore(self.state.spec)
        self.slot = store.new_accumulator()
        self.buffers = [store.new_buffer().views for _ in range(buffers)]
        self.replica.set_slot(self.slot)

    def turn(self, buffer, passes=1, set_to_none=True):
        """Compute a gradient; return what `collect` returned, and what is in the slot."""
        self.replica.load(self.buffers[buffer])
        self.optimizer.zero_grad(set_to_none=set_to_none)
        for number in range(passes):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * buffer + number))
            self.model[:3](x).square().mean().backward()
        with torch.no_grad():
            unused, sq_norm = self.replica.collect(0)
        gradients = [view.clone() for view in self.slot.parameters[0]]
        rest = [*self.slot.buffers, *self.slot.counters]
        return unused, sq_norm, gradients, [tensor.clone() for tensor in rest]


TURNS = [(0, 1, True), (1, 1, True), (1, 3, True), (0, 2, False), (0, 1, False)]


def test_staged_and_pointed_parameters_give_the_same_numbers():
    staged, pointed = Bench(stage=True), Bench(stage=False)
    for turn in TURNS:
        torch.testing.assert_close(staged.turn(*turn), pointed.turn(*turn))
        ours = [p.detach() for p in staged.model.parameters()]
        torch.testing.assert_close(ours, [p.detach() for p in pointed.model.parameters()])
    assert staged.touched == pointed.touched


@pytest.mark.parametrize("stage", [True, False])
def test_collected_gradient_is_what_a_plain_model_computes(stage):
    bench, plain = Bench(stage), Bench(stage).model
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(2.0)
        for buffer in plain[1].buffers():
            if buffer.is_floating_point():
                buffer.add_(2.0)
    unused, sq_norm, gradients, rest = bench.turn(buffer=1)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(10))
    plain[:3](x).square().mean().backward()
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in plain.parameters()]
    torch.testing.assert_close(gradients, grads)
    torch.testing.assert_close(rest, list(plain.buffers()))
    assert unused == (6, 7), "the parameters of the last layer"
    assert sq_norm == pytest.approx(sum(g.square().sum().item() for g in grads), rel=1e-4)


@pytest.mark.parametrize("stage", [True, False])
def test_graph_from_before_a_load_can_still_be_used(stage):
    """Batch norm saves its buffers for the backward pass, and autograd checks for changes."""
    bench = Bench(stage)
    bench.replica.load(bench.buffers[0])
    bench.optimizer.zero_grad()
    loss = bench.model[:3](torch.ones(6, 4)).square().mean()
    editions = [buffer._version for buffer in bench.model.buffers()]
    bench.replica.load(bench.buffers[0])
    assert [buffer._version for buffer in bench.model.buffers()] == editions
    loss.backward()


@pytest.mark.parametrize("stage", [True, False])
def test_parameters_of_other_optimizers_stay_as_they_are(stage):
    models = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    state = gather(models, optimizers)
    replica = Replica(state, models, stage=stage)
    store = InProcessStore(state.spec)
    versions = [store.new_buffer().views for _ in range(3)]
    for number, views in enumerate(versions):
        for flat in (*views.flats[0], *views.flats[1], *views.buffer_flats):
            flat.fill_(number)

    def loaded():
        return [model[0].weight[0, 0].item() for model in models]

    replica.load(versions[0])
    assert loaded() == [0, 0]
    replica.load(versions[1], optimizer=1)
    assert loaded() == [0, 1]
    assert models[0][1].running_mean[0] == 1, "buffers are always loaded"
    replica.load(versions[2], optimizer=0)
    assert loaded() == [2, 1]
    replica.load_again()
    assert loaded() == [2, 1]
    replica.load(versions[2])
    assert loaded() == [2, 2]


def test_only_pointed_parameters_change_their_address():
    for stage in (True, False):
        bench = Bench(stage)
        before = [p.data_ptr() for p in bench.model.parameters()]
        bench.replica.load(bench.buffers[0])
        stayed = [p.data_ptr() for p in bench.model.parameters()] == before
        assert stayed == stage


def test_parameter_that_its_module_changes_is_copied():
    torch.manual_seed(0)
    model = nn.Embedding(3, 2, max_norm=0.1)
    state = gather([model], [torch.optim.SGD(model.parameters(), lr=0.1)])
    replica = Replica(state, [model])
    own = model.weight.data_ptr()
    replica.load(InProcessStore(state.spec).new_buffer().views)
    assert model.weight.data_ptr() == own
    model(torch.tensor([0]))


def test_norm_of_a_huge_gradient_is_finite_and_of_a_non_finite_one_is_not():
    bench = Bench(stage=False)
    bench.replica.load(bench.buffers[0])
    for value, is_finite in ((1e30, True), (float("inf"), False), (float("nan"), False)):
        for p in bench.model.parameters():
            p.grad = torch.full_like(p, value)
        with torch.no_grad():
            _, sq_norm = bench.replica.collect(0)
        assert torch.tensor(sq_norm, dtype=torch.float64).isfinite() == is_finite


# --------------------------------------------------------------------------------- what is measured


def scale(bench):
    bench.large.mul_(3.0)


def scale_unnoticed(bench):
    """Change it as `GradScaler` and some scripts do: torch's version counter misses it."""
    before = bench.large._version
    bench.large.data.mul_(3.0)
    assert bench.large._version == before


def replace(bench):
    bench.model[2].weight.grad = torch.full_like(bench.large, 0.5)


def remove(bench):
    bench.model[2].weight.grad = None


class Measured(Bench):
    """A bench on which the large gradient changes after the backward pass."""

    @property
    def large(self):
        return self.model[2].weight.grad

    def norms(self, factor, change):
        """Return the squared norm from `collect`, and that of the slot."""
        self.replica.load(self.buffers[0])
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
    bench = Measured(stage)
    for factor in (1.0, 2.0):
        sq_norm, expected = bench.norms(factor, change)
        assert sq_norm == pytest.approx(expected, rel=1e-4)


def test_gradient_that_the_script_repairs_is_measured_again():
    bench = Measured(stage=False)
    with torch.no_grad():
        bench.buffers[0].parameters[0][2].fill_(float("inf"))  # makes its gradient infinite
    sq_norm, expected = bench.norms(1.0, lambda _: None)
    assert not isfinite(sq_norm)
    del expected

    def repair(bench):
        for p in bench.model.parameters():
            if p.grad is not None:
                p.grad.data.nan_to_num_(nan=2.0, posinf=2.0, neginf=2.0)

    sq_norm, expected = bench.norms(1.0, repair)
    assert sq_norm == pytest.approx(expected, rel=1e-4)


def test_only_a_new_nan_in_a_buffer_makes_the_norm_non_finite():
    bench = Bench(stage=False)
    assert isfinite(bench.turn(0)[1])
    mean = bench.model[1].running_mean
    bench.replica.load(bench.buffers[0])
    bench.optimizer.zero_grad()
    bench.model[:3](torch.ones(6, 4)).square().mean().backward()
    mean[3] = float("nan")
    with torch.no_grad():
        assert not isfinite(bench.replica.collect(0)[1])
    bench.buffers[0].buffers[0][3] = float("nan")
    assert isfinite(bench.turn(0)[1])
    assert bench.slot.buffers[0][3].isnan()


def test_infinite_buffer_is_allowed():
    """Attention masks are."""
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((3,), float("-inf")))
    bench = Bench.__new__(Bench)
    bench.model, bench.state = model, gather([model], [torch.optim.SGD(model.parameters(), 0.1)])
    bench.replica = Replica(bench.state, [model])
    bench.share(buffers=1)
    bench.buffers[0].buffers[0].copy_(model.mask)
    bench.replica.on_gradients(lambda _: None)
    bench.replica.load(bench.buffers[0])
    model(torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        assert isfinite(bench.replica.collect(0)[1])


def test_gradient_whose_first_block_is_zero_is_measured_again(monkeypatch):
    monkeypatch.setattr(sums, "BLOCK", 1000)
    bench = Measured(stage=False)

    bench.replica.load(bench.buffers[0])
    bench.optimizer.zero_grad()
    (bench.model[2](torch.ones(1, 8))[0, 3000:].sum()).backward()  # zeros before element 24,000
    bench.large.data.mul_(3.0)
    with torch.no_grad():
        _, sq_norm = bench.replica.collect(0)
    expected = float(sum(v.double().square().sum() for v in bench.slot.parameters[0]))
    assert sq_norm == pytest.approx(expected)


@pytest.mark.parametrize("stage", [False, True])
def test_script_that_left_has_its_own_parameters_and_keeps_them(stage):
    bench = Bench(stage)
    bench.turn(0)
    bench.replica.leave()
    with torch.no_grad():
        for parameter in bench.model.parameters():
            parameter.fill_(7.0)
    bench.replica.load(bench.buffers[1])  # a version that arrives later
    bench.replica.detach()  # the end of the run
    assert all((parameter == 7.0).all() for parameter in bench.model.parameters())
    assert not any((view == 7.0).all() for view in bench.buffers[0].parameters[0])


def test_script_that_left_cannot_train():
    bench = Bench(stage=False)
    bench.turn(0)
    bench.replica.leave()
    with pytest.raises(SpecError, match="after weights were loaded with"):
        bench.turn(0)
