# SPDX-License-Identifier: BSD-3-Clause
"""A server that goes on from a checkpoint makes the very updates that it would have made."""

import os

import pytest
import torch
import torch._dynamo  # an optimizer loads it, and it sets a variable of the environment
from torch import nn
from torch.optim import lr_scheduler as lrs

from paceline.errors import CheckpointError
from paceline.run.server.checkpoint import Archive, Saved, Snapshot
from paceline.run.settings import Settings
from paceline.run.tensors.group_options import OptionBook, set_option
from paceline.run.tensors.layout import gather
from paceline.run.tensors.shard import Shard
from paceline.run.tensors.state_spec import OptionChange
from paceline.run.tensors.sums import SlotGradient
from paceline.spec import RunSpec

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
    """Matrices, a vector, a frozen one, buffers and a counter, of several types."""

    def __init__(self, matrices_only=False):
        super().__init__()
        self.one = nn.Linear(3, 4, bias=not matrices_only)
        self.two = nn.Linear(4, 2, bias=False, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)


class Bench:
    """A shard, and one worker's slot."""

    def __init__(self, make_model=Net, make_optimizer=None, make_scheduler=None, **options):
        torch.manual_seed(0)
        self.model = make_model()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        make_optimizer = make_optimizer or VARIANTS["momentum"]
        self.optimizer = make_optimizer(parameters)
        schedulers = [] if make_scheduler is None else [make_scheduler(self.optimizer)]
        common = gather([self.model], [self.optimizer])
        told = Settings(spec=RunSpec(workers=1), **options)
        self.shard = Shard(common, schedulers, told, 1)
        self.slot, fd = self.shard.new_slot()
        os.close(fd)

    def train(self, updates):
        """Make updates; what each is of follows from its number alone."""
        for _ in range(updates):
            number = self.shard.version + 1
            generator = torch.Generator().manual_seed(number)
            for view in (*self.slot.parameters[0], *self.slot.buffers):
                view.copy_(torch.rand(view.shape, generator=generator, dtype=torch.float64) - 0.4)
            for view in self.slot.counters:
                view.fill_(number)
            self.shard.give(number, SlotGradient(0, 0, 1, 1.0, frozenset(), self.slot))
            self.shard.apply(number)
        return self

    def everything(self):
        """All that a run has come to."""
        views = self.shard.newest.views
        own = {name: p.detach() for name, p in self.model.named_parameters()}
        state = (self.optimizer.state_dict()["state"], self.optimizer.param_groups[0]["lr"])
        groups = [
            {k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups
        ]
        kept = (views.parameters, views.buffers, views.counters, self.shard.average)
        return own, state, groups, kept, self.shard.version, self.shard.steps

    def close(self):
        for fd in (self.shard.constants_fd, *(place.fd for place in self.shard._places)):
            os.close(fd)


@pytest.fixture
def bench():
    made = []

    def make(*parts, **options):
        made.append(Bench(*parts, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def through_a_file(tmp_path):
    def travel(shard):
        """What a checkpoint of the shard gives."""
        archive = Archive(tmp_path / "checkpoints", pytest.fail)
        archive.save(Snapshot.of(Saved(shard.version, 1, [], None, shard.saved(), {})), {})
        archive.wait()
        found = archive.load()
        return found.version, found.shard

    return travel


def assert_same(found, expected):
    """Equal to the bit; a tuple may have become a list."""
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
def goes_on(bench, through_a_file):
    def check(*parts, **options):
        """One that was restored in the middle comes to the same as one that was not."""
        lived = bench(*parts, **options).train(BEFORE)
        saved = through_a_file(lived.shard)
        expected = lived.train(AFTER).everything()
        again = bench(*parts, **options)
        again.shard.restore(*saved)
        assert_same(again.train(AFTER).everything(), expected)
        assert again.shard.version == BEFORE + AFTER
        return again

    return check


# ---------------------------------------------------------------------------------- what goes on


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_goes_on_to_the_bit(goes_on, name):
    model = (lambda: Net(matrices_only=True)) if name == "Muon" else Net
    goes_on(model, lambda parameters: OPTIMIZERS[name](parameters, lr=0.1))


@pytest.mark.parametrize("name", VARIANTS)
def test_their_settings_go_on_too(goes_on, name):
    goes_on(Net, VARIANTS[name])


@pytest.mark.parametrize("optimizer", ["momentum", "amsgrad", "a tensor"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_scheduler_goes_on_where_it_was(goes_on, optimizer, scheduler):
    goes_on(Net, VARIANTS[optimizer], SCHEDULERS[scheduler])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_of_the_weights_goes_on(goes_on, dtype):
    again = goes_on(lambda: nn.Linear(3, 2, dtype=dtype), ema=0.9)
    assert not torch.equal(again.shard.average[0][0], again.model.weight.float())


def test_clipping_and_several_places_make_no_difference(goes_on):
    goes_on(clip_norm=0.1)


def test_a_version_that_somebody_reads_is_saved_from_where_it_lies(bench, through_a_file):
    lived = bench().train(2)
    lived.shard.read(0, 2)  # so that the next one lies elsewhere
    lived.train(1)
    saved = through_a_file(lived.shard)
    expected = lived.train(2).everything()
    again = bench()
    again.shard.restore(*saved)
    assert_same(again.train(2).everything(), expected)


@pytest.mark.parametrize("name", ["momentum", "one by one", "fused"])
def test_a_state_lies_as_its_parameter_does(goes_on, name):
    """Which a fused optimizer takes for granted."""
    goes_on(lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), VARIANTS[name])


class Master(torch.optim.Optimizer):
    """Keeps more digits than its parameters have, as optimizers for half precision do."""

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


def test_an_optimizer_of_the_script_keeps_the_digits_of_its_state(goes_on):
    goes_on(lambda: nn.Linear(3, 2, dtype=torch.bfloat16), Master)


# ------------------------------------------------------------------------------------ what changes


def test_an_average_that_is_new_begins_with_the_weights(bench, through_a_file):
    saved = through_a_file(bench().train(BEFORE).shard)
    again = bench(ema=0.5)
    again.shard.restore(*saved)
    assert_same(again.shard.average, saved[1]["parameters"])
    again.train(1)


def test_an_average_that_is_not_wanted_any_more_is_forgotten(bench, through_a_file):
    lived = bench(ema=0.5).train(BEFORE)
    saved = through_a_file(lived.shard)
    again = bench()
    again.shard.restore(*saved)
    assert again.shard.average is None
    again.train(1)


def test_constants_are_those_of_the_run_and_not_of_the_new_process(bench, through_a_file):
    lived = bench()
    saved = through_a_file(lived.shard)
    again = bench()
    with torch.no_grad():
        again.model.frozen.fill_(7)
    again.shard.restore(*saved)
    assert torch.equal(again.model.frozen, lived.model.frozen)
    assert torch.equal(again.shard._constants[0], lived.model.frozen)


def test_workers_are_sent_to_the_version_that_was_restored(bench, through_a_file):
    saved = through_a_file(bench().train(BEFORE).shard)
    again = bench()
    again.shard.restore(*saved)
    assert again.shard.steps_at(BEFORE) == (BEFORE,)
    place = again.shard.read(0, BEFORE)
    assert torch.equal(place.views.parameters[0][0], saved[1]["parameters"][0][0])
    with pytest.raises(KeyError):
        again.shard.read(0, 0)


# ----------------------------------------------------------------------------- options set by hand


@pytest.mark.parametrize("scheduler", [None, "step", "cosine", "one cycle"])
def test_a_setting_that_was_set_by_hand_holds_after_it(bench, through_a_file, scheduler):
    parts = (Net, VARIANTS["amsgrad"], SCHEDULERS.get(scheduler))
    lived, book = bench(*parts).train(2), OptionBook()
    for option in (OptionChange(0, 0, "lr", 0.025), OptionChange(0, 0, "weight_decay", 0.5)):
        assert book.enter(option, 2)
        set_option([lived.optimizer], option)
    lived.train(2)
    saved = through_a_file(lived.shard)
    expected = lived.train(AFTER).everything()
    again = bench(*parts)
    again.shard.restore(*saved)
    assert_same(again.train(AFTER).everything(), expected)
    assert again.optimizer.param_groups[0]["weight_decay"] == 0.5


VALUES = [None, True, 3, 0.5, float("inf"), "max", (0.9, 0.99), ()]


def test_all_that_scripts_have_changed_is_known_again(tmp_path):
    book = OptionBook()
    for number, value in enumerate(VALUES):
        book.enter(OptionChange(0, 1, f"option {number}", value), version=number)
    book.enter(OptionChange(0, 1, "option 0", "newer"), version=9)
    archive = Archive(tmp_path, pytest.fail)
    archive.save(Snapshot.of(Saved(1, 1, book.saved(), None, {}, {})), {})
    archive.wait()
    again = OptionBook()
    again.restore(archive.load().options)
    assert again.since(0) == (*book.since(1)[1:], OptionChange(0, 1, "option 0", "newer"))
    assert again.saved() == book.saved()
    assert not again.enter(OptionChange(0, 1, "option 0", "late"), version=8)
    assert again.enter(OptionChange(0, 1, "option 0", "newest"), version=9)
    assert again.since(again.edition - 1) == (OptionChange(0, 1, "option 0", "newest"),)
    assert OptionBook().saved() == []


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
            r"of its parameters one is one.weight: torch.float32\[4, 3\], in the run it is ",
        ),
        ((Longer,), "it has 3 parameters, the run has 5"),
        ((Unfrozen,), "it has 3 parameters, the run has 4"),
        ((lambda: nn.Linear(1, 1),), "it has 3 parameters, the run has 2"),
        ((Net, VARIANTS["amsgrad"]), "of its optimizers one is SGD, in the run it is AdamW"),
        ((Net, in_groups), "parameter group"),
        (
            (Net, None, lambda o: lrs.OneCycleLR(o, 0.5, total_steps=2)),
            "Tried to step",
        ),
    ],
    ids=["wider", "longer", "unfrozen", "other", "optimizer", "groups", "shorter"],
)
def test_a_checkpoint_of_another_script_is_refused_and_the_difference_named(
    bench, through_a_file, parts, what
):
    saved = through_a_file(bench().train(BEFORE).shard)
    with pytest.raises(CheckpointError, match=f"the checkpoint is not of this script: .*{what}"):
        bench(*parts).shard.restore(*saved)
