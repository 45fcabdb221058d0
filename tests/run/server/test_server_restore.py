# SPDX-License-Identifier: BSD-3-Clause
"""A server that continues from a checkpoint makes the updates that it would have made."""

import pytest
import torch
import torch._dynamo  # an optimizer loads it, and it sets an environment variable
from torch import nn
from torch.optim import lr_scheduler as lrs

from paceline.errors import CheckpointError
from paceline.run.net.in_process import InProcessStore
from paceline.run.server.checkpoint import Archive, Saved, Snapshot
from paceline.run.tensors.group_options import OptionLog, set_option
from paceline.run.tensors.layout import gather
from paceline.run.tensors.shard import Shard
from paceline.run.tensors.state_spec import OptionChange, SchedulerCalls
from paceline.run.tensors.sums import SlotGradient
from shard_updates import make_update

BEFORE, AFTER = 4, 5  # updates

OPTIMIZERS = {
    name: kind
    for name in dir(torch.optim)
    if isinstance(kind := getattr(torch.optim, name), type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "SparseAdam", "LBFGS")  # for sparse gradients; with a closure
}
VARIANTS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, betas=(0.5, 0.9)),
    "one by one": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "centered": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
}
SCHEDULERS = {
    "step": lambda o: lrs.StepLR(o, 2, 0.3),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 7),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: lrs.OneCycleLR(o, 0.5, total_steps=12),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.01, 0.5, step_size_up=3),
    "warm-up": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=3), lrs.CosineAnnealingLR(o, 6)], [3]
    ),
    "lambda": lambda o: lrs.LambdaLR(o, lambda step: 1 / (1 + step)),
    "chained": lambda o: lrs.ChainedScheduler([lrs.ExponentialLR(o, 0.9), lrs.StepLR(o, 3)]),
}


class Net(nn.Module):
    """Matrices, vectors, a frozen parameter, buffers and a counter, of several types."""

    def __init__(self, matrices_only=False):
        super().__init__()
        self.one = nn.Linear(3, 4, bias=not matrices_only)
        self.two = nn.Linear(4, 2, bias=False, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)


class Bench:
    """A shard, and one worker's slot."""

    def __init__(
        self,
        make_model=Net,
        make_optimizer=None,
        make_scheduler=None,
        scale=1.0,
        **options,
    ):
        torch.manual_seed(0)
        self.model = make_model()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        make_optimizer = make_optimizer or VARIANTS["momentum"]
        self.optimizer = make_optimizer(parameters)
        schedulers = [] if make_scheduler is None else [make_scheduler(self.optimizer)]
        state = gather([self.model], [self.optimizer])
        self.store = InProcessStore(state.spec)
        self.shard = Shard(state, schedulers, self.store, **options)
        calls = [SchedulerCalls(0, "mini-batch", calls=1, steps=1)][: len(schedulers)]
        self.shard.schedules.note_calls(0, calls)
        self.slot = self.store.new_accumulator()
        self.scale = scale

    def train(self, updates):
        """Make updates; a gradient depends only on the number of its update."""
        for _ in range(updates):
            number = self.shard.version + 1
            generator = torch.Generator().manual_seed(number)
            for view in (*self.slot.parameters[0], *self.slot.buffers):
                view.copy_(torch.rand(view.shape, generator=generator, dtype=torch.float64) - 0.4)
            for view in self.slot.counters:
                view.fill_(number)
            gradient = SlotGradient(0, 0, 1, 1.0, frozenset(), self.slot)
            make_update(self.shard, [gradient], self.scale)
        return self

    def everything(self):
        """Return all tensors and options of the run."""
        views = self.shard.newest.views
        own = {name: p.detach() for name, p in self.model.named_parameters()}
        state = (self.optimizer.state_dict()["state"], self.optimizer.param_groups[0]["lr"])
        groups = [
            {k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups
        ]
        kept = (views.parameters, views.buffers, views.counters, self.shard.average)
        version = self.shard.version
        return own, state, groups, kept, version, self.shard.schedules.state_dict()


@pytest.fixture
def through_a_file(tmp_path):
    def travel(shard):
        """Write a checkpoint of the shard, and return what is read from it."""
        archive = Archive(tmp_path / "checkpoints", pytest.fail)
        archive.save(Snapshot.of(Saved(shard.version, 1, [], None, shard.state_dict(), {})), {})
        archive.wait()
        found = archive.load()
        return found.version, found.shard

    return travel


def assert_same(found, expected):
    """Assert equality to the bit; a tuple may have become a list."""
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


@pytest.fixture
def continues(through_a_file):
    def check(*parts, **options):
        """Check that a run that was restored in the middle equals one that wasn't."""
        original = Bench(*parts, **options).train(BEFORE)
        saved = through_a_file(original.shard)
        expected = original.train(AFTER).everything()
        restored = Bench(*parts, **options)
        restored.shard.load_state_dict(*saved)
        assert_same(restored.train(AFTER).everything(), expected)
        assert restored.shard.version == BEFORE + AFTER
        return restored

    return check


# ---------------------------------------------------------------------------------- what continues


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_continues_to_the_bit(continues, name):
    model = (lambda: Net(matrices_only=True)) if name == "Muon" else Net
    continues(model, lambda parameters: OPTIMIZERS[name](parameters, lr=0.1))


@pytest.mark.parametrize("name", VARIANTS)
def test_optimizer_options_continue(continues, name):
    continues(Net, VARIANTS[name])


@pytest.mark.parametrize("optimizer", ["momentum", "amsgrad", "a tensor"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_scheduler_continues(continues, optimizer, scheduler):
    continues(Net, VARIANTS[optimizer], SCHEDULERS[scheduler])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moving_average_continues(continues, dtype):
    restored = continues(lambda: nn.Linear(3, 2, dtype=dtype), ema=0.9)
    assert not torch.equal(restored.shard.average[0][0], restored.model.weight.float())


def test_clipped_run_continues(continues):
    continues(scale=0.1)


def test_version_in_a_second_buffer_is_saved(through_a_file):
    original = Bench().train(2)
    original.shard.add_reader(0, 2)  # so that the next version is in another buffer
    original.train(1)
    saved = through_a_file(original.shard)
    expected = original.train(2).everything()
    restored = Bench()
    restored.shard.load_state_dict(*saved)
    assert_same(restored.train(2).everything(), expected)


@pytest.mark.parametrize("name", ["momentum", "one by one", "fused"])
def test_state_has_the_memory_format_of_its_parameter(continues, name):
    """A fused optimizer relies on it."""
    continues(lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), VARIANTS[name])


class Master(torch.optim.Optimizer):
    """Keeps its state in single precision, as optimizers for half precision do."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("master", p.float().clone())
                state["count"] = state.get("count", 0) + 1
                state["master"] -= group["lr"] * p.grad.float() / state["count"]
                p.copy_(state["master"])


def test_state_is_restored_in_its_own_precision(continues):
    continues(lambda: nn.Linear(3, 2, dtype=torch.bfloat16), Master)


# ------------------------------------------------------------------------------------ what changes


def test_new_moving_average_begins_with_the_weights(through_a_file):
    saved = through_a_file(Bench().train(BEFORE).shard)
    restored = Bench(ema=0.5)
    restored.shard.load_state_dict(*saved)
    assert_same(restored.shard.average, saved[1]["parameters"])
    restored.train(1)


def test_unwanted_moving_average_is_forgotten(through_a_file):
    original = Bench(ema=0.5).train(BEFORE)
    saved = through_a_file(original.shard)
    restored = Bench()
    restored.shard.load_state_dict(*saved)
    assert restored.shard.average is None
    restored.train(1)


def test_constants_are_restored_for_workers_too(through_a_file):
    original = Bench()
    saved = through_a_file(original.shard)
    restored = Bench()
    with torch.no_grad():
        restored.model.frozen.fill_(7)
    restored.shard.load_state_dict(*saved)
    assert torch.equal(restored.model.frozen, original.model.frozen)
    assert torch.equal(restored.store.constants[0], original.model.frozen)


def test_workers_are_given_the_restored_version(through_a_file):
    saved = through_a_file(Bench().train(BEFORE).shard)
    restored = Bench()
    restored.shard.load_state_dict(*saved)
    assert restored.shard.schedules.contributions == [BEFORE]
    buffer = restored.shard.add_reader(0, BEFORE)
    assert torch.equal(buffer.views.parameters[0][0], saved[1]["parameters"][0][0])
    with pytest.raises(KeyError):
        restored.shard.add_reader(0, 0)


# --------------------------------------------------------------------------- options set by scripts


@pytest.mark.parametrize("scheduler", [None, "step", "cosine", "one cycle"])
def test_option_set_by_a_script_is_restored(through_a_file, scheduler):
    parts = (Net, VARIANTS["amsgrad"], SCHEDULERS.get(scheduler))
    original, log = Bench(*parts).train(2), OptionLog()
    for option in (OptionChange(0, 0, "lr", 0.025), OptionChange(0, 0, "weight_decay", 0.5)):
        assert log.add(option, 2)
        set_option([original.optimizer], option)
    original.train(2)
    saved = through_a_file(original.shard)
    expected = original.train(AFTER).everything()
    restored = Bench(*parts)
    restored.shard.load_state_dict(*saved)
    assert_same(restored.train(AFTER).everything(), expected)
    assert restored.optimizer.param_groups[0]["weight_decay"] == 0.5


VALUES = [None, True, 3, 0.5, float("inf"), "max", (0.9, 0.99), ()]


def test_option_log_is_restored(tmp_path):
    log = OptionLog()
    for number, value in enumerate(VALUES):
        log.add(OptionChange(0, 1, f"option {number}", value), version=number)
    log.add(OptionChange(0, 1, "option 0", "newer"), version=9)
    archive = Archive(tmp_path, pytest.fail)
    archive.save(Snapshot.of(Saved(1, 1, log.saved(), None, {}, {})), {})
    archive.wait()
    restored = OptionLog()
    restored.restore(archive.load().options)
    assert restored.since(0) == (*log.since(1)[1:], OptionChange(0, 1, "option 0", "newer"))
    assert restored.saved() == log.saved()
    assert not restored.add(OptionChange(0, 1, "option 0", "late"), version=8)
    assert restored.add(OptionChange(0, 1, "option 0", "newest"), version=9)
    assert restored.since(restored.edition - 1) == (OptionChange(0, 1, "option 0", "newest"),)
    assert OptionLog().saved() == []


# ---------------------------------------------------------------------------------- another script


class Wider(Net):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 5)


class Longer(Net):
    def __init__(self):
        super().__init__()
        self.three = nn.Linear(1, 1)


class Unfrozen(Net):
    def __init__(self):
        super().__init__()
        self.frozen.requires_grad_()


def in_groups(parameters):
    return torch.optim.SGD([{"params": [p]} for p in parameters], lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("parts", "what"),
    [
        (
            (Wider,),
            r"its parameters differ: it has one.weight: torch.float32\[4, 3\], the run has ",
        ),
        ((Longer,), "it has 3 parameters, the run has 5"),
        ((Unfrozen,), "it has 3 parameters, the run has 4"),
        ((lambda: nn.Linear(1, 1),), "it has 3 parameters, the run has 2"),
        ((Net, VARIANTS["amsgrad"]), "its optimizers differ: it has SGD, the run has AdamW"),
        ((Net, in_groups), "parameter group"),
        ((Net, None, SCHEDULERS["step"]), "it has 0 schedulers, the run has 1"),
    ],
    ids=["wider", "longer", "unfrozen", "other", "optimizer", "groups", "scheduler"],
)
def test_checkpoint_of_another_script_is_refused_with_the_difference(through_a_file, parts, what):
    saved = through_a_file(Bench().train(BEFORE).shard)
    with pytest.raises(CheckpointError, match=f"the checkpoint is not of this script: .*{what}"):
        Bench(*parts).shard.load_state_dict(*saved)


def test_scheduler_that_cannot_make_the_steps_of_the_checkpoint_is_refused(through_a_file):
    saved = through_a_file(Bench(Net, None, SCHEDULERS["step"]).train(BEFORE).shard)
    shorter = Bench(Net, None, lambda o: lrs.LambdaLR(o, [1.0, 1.0, 1.0].__getitem__))
    with pytest.raises(CheckpointError, match="not of this script: list index out of range"):
        shorter.shard.load_state_dict(*saved)
