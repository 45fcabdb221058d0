# SPDX-License-Identifier: BSD-3-Clause
"""Models of many kinds train on several workers as in a plain loop."""

import pytest
import torch

from plain import LATE, LOOP, SETUP, assert_same, execute, train, weights

STEPS = 4

MODELS = {
    "tied weights": """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.out = nn.Linear(4, 10, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens):
        return self.out(self.embedding(tokens))

model = Tied()

def loss_of(worker, version):
    tokens = (batch(worker, version)[0].abs() * 3).long().clamp(max=9)
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1).flatten())
""",
    "several types": """
class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(4, 4, dtype=torch.float64)
        self.brain = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.single = nn.Linear(4, 1)

    def forward(self, x):
        return self.single(self.wide(x.double()).float() + self.brain(x.bfloat16()).float())

model = Mixed()
""",
    "channels last": """
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 1, 2))
model = model.to(memory_format=torch.channels_last)

def loss_of(worker, version):
    x = batch(worker, version)[0].reshape(1, 1, 4, 8).expand(2, 3, 4, 8)
    return model(x.contiguous(memory_format=torch.channels_last)).square().mean()
""",
    "recurrent": """
model = nn.LSTM(4, 4, num_layers=2)

def loss_of(worker, version):
    x, y = batch(worker, version)
    return F.mse_loss(model(x)[0].sum(-1, keepdim=True), y)
""",
    "attention": """
model = nn.TransformerEncoderLayer(4, nhead=2, dim_feedforward=8, dropout=0.0)

def loss_of(worker, version):
    x, y = batch(worker, version)
    return F.mse_loss(model(x).sum(-1, keepdim=True), y)
""",
    "checkpointed activations": """
from torch.utils.checkpoint import checkpoint
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

def loss_of(worker, version):
    x, y = batch(worker, version)
    return F.mse_loss(checkpoint(model, x, use_reentrant=False), y)
""",
    "parametrized weights": """
model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)), nn.Linear(8, 1))
""",
    "an empty and a single parameter": """
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 3))
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.factor * x.sum(-1, keepdim=True) + self.none.sum()

model = Odd()
""",
    "an expanded buffer": """
class Masked(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)
        self.register_buffer("mask", torch.tensor([0.5]).expand(8, 4))

    def forward(self, x):
        return super().forward(x * self.mask)

model = Masked()
""",
}

SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)\n"


@pytest.mark.parametrize("kind", MODELS)
def test_model_trains_as_in_a_plain_loop(launch, kind):
    source = SETUP + MODELS[kind] + SGD
    ran = launch(source + LOOP, steps=STEPS)
    assert ran.code == 0, ran.err
    expected = weights(train(source, STEPS))
    for kept in ran.kept.values():
        assert_same(kept["weights"], expected)
    assert [w.stride() for w in ran.kept[0]["weights"]] == [w.stride() for w in expected]
    assert any(
        not torch.equal(a, b) for a, b in zip(expected, weights(execute(source)), strict=True)
    )


@pytest.mark.parametrize("policy", ["async", "backup:1", "softsync:2"])
def test_model_of_several_dtypes_trains_under_one_by_one_policies(launch, policy):
    ran = launch(
        SETUP + MODELS["several types"] + SGD + LOOP, steps=STEPS, policy=policy, min_workers=2
    )
    assert ran.code == 0, ran.err
    assert_same(ran.kept[0]["weights"], ran.kept[1]["weights"])
    dtypes = {w.dtype for w in ran.kept[0]["weights"]}
    assert dtypes == {torch.float64, torch.bfloat16, torch.float32}


def test_embedding_with_max_norm_is_renormalized_in_the_worker_only(launch):
    """It changes its weights in the forward pass, and the server's are read-only."""
    source = (
        SETUP
        + """
model = nn.Embedding(4, 4, max_norm=0.5)

def loss_of(worker, version):
    tokens = torch.tensor([worker, (worker + version) % 4])
    return F.mse_loss(model(tokens), torch.ones(2, 4))
"""
        + SGD
    )
    ran = launch(source + LOOP, steps=STEPS)
    assert ran.code == 0, ran.err
    names = execute(source)
    weight = names["model"].weight
    for version in range(STEPS):
        names["optimizer"].zero_grad()
        before = weight.detach().clone()
        for worker in (0, 1):
            (names["loss_of"](worker, version) / 2).backward()
            with torch.no_grad():
                weight.copy_(before)
        names["optimizer"].step()
    assert_same([kept["weights"] for kept in ran.kept.values()], [[weight.detach()]] * 2)


# ------------------------------------------------------------------------------------------ buffers

NORM = (
    SETUP
    + """
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
"""
    + SGD
)
KEEP_BUFFERS = """
keep(run, weights=[p.detach().clone() for p in model.parameters()], buffers=list(model.buffers()))
"""


def train_normed(steps, workers):
    """Train in a plain loop with separate statistics for each worker, averaged after each step."""
    names = execute(NORM)
    norm = names["model"][1]
    for version in range(steps):
        names["optimizer"].zero_grad()
        before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
        after = []
        for worker in workers:
            for name, buffer in norm.named_buffers():
                buffer.copy_(before[name])
            (names["loss_of"](worker, version) / len(workers)).backward()
            after.append([buffer.clone() for buffer in norm.buffers()])
        for buffer, *others in zip(norm.buffers(), *after, strict=True):
            count = torch.stack(others).double().mean(0)
            buffer.copy_(count)
        names["optimizer"].step()
    return names


def test_batch_norm_statistics_are_averaged_over_the_contributors(launch):
    ran = launch(NORM + LOOP + KEEP_BUFFERS, steps=STEPS)
    names = train_normed(STEPS, workers=[0, 1])
    for kept in ran.kept.values():
        assert_same(kept["weights"], weights(names))
        assert_same(kept["buffers"], list(names["model"].buffers()))
        assert kept["buffers"][2].item() == STEPS


def test_batch_norm_statistics_of_a_late_worker_do_not_count(launch):
    loop = LOOP.replace("    optimizer.step()", f"    be_late(run, {STEPS})\n    optimizer.step()")
    ran = launch(
        f"{NORM}{LATE}{loop}be_late(run, {STEPS})\n{KEEP_BUFFERS}", steps=STEPS, policy="backup:1"
    )
    names = train_normed(STEPS, workers=[0])
    for kept in ran.kept.values():
        assert_same(kept["weights"], weights(names))
        assert_same(kept["buffers"], list(names["model"].buffers()))


def test_joining_worker_gets_the_current_state(launch):
    ran = launch(
        NORM
        + LATE
        + """
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
run = paceline.join()
if run.worker == 1:
    with torch.no_grad():
        model[0].weight.fill_(7.0)
    wait_for("at-3")
model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)

def now():
    tensors = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    return {"version": run.version, "tensors": tensors, "lr": scheduler.get_last_lr()}

if run.worker == 1:
    keep(run, **now())
    (OUT / "is here").touch()
while not run.finished:
    if run.is_first and run.version == 3:
        keep(run, **now())
        (OUT / "at-3").touch()
        wait_for("is here")
    optimizer.zero_grad()
    loss_of(run.worker, run.version).backward()
    optimizer.step()
    scheduler.step()
""",
        steps=5,
        policy="backup:1",
    )
    assert ran.code == 0, ran.err
    assert ran.kept[0]["version"] == 3
    assert ran.kept[0]["lr"] == pytest.approx([0.05 / 8])
    assert ran.kept[1]["version"] == ran.kept[0]["version"]
    assert ran.kept[1]["lr"] == ran.kept[0]["lr"]
    assert_same(ran.kept[1]["tensors"], ran.kept[0]["tensors"])


def test_buffer_that_a_module_replaces_is_sent_as_well(launch):
    source = (
        SETUP
        + """
class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return self.linear(x - self.mean)

model = Centred()
"""
        + SGD
    )
    ran = launch(source + LOOP + "keep(run, mean=model.mean)", steps=3)
    mean = torch.zeros(4)
    for version in range(3):
        both = [execute(SETUP)["batch"](worker, version)[0].mean(0) for worker in (0, 1)]
        mean = 0.5 * mean + 0.5 * torch.stack(both).mean(0)
    assert_same([kept["mean"] for kept in ran.kept.values()], [mean, mean])


# ----------------------------------------------------------------------------------------- compiled


@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_model_trains_as_in_a_plain_loop(launch, when):
    source = SETUP + SGD
    compiled = 'model = torch.compile(model, backend="aot_eager")\n'
    if when == "before":
        script = source + compiled + LOOP
    else:
        script = source + LOOP.replace("while", f"{compiled}while")
    ran = launch(script, workers=1, steps=STEPS)
    assert (ran.code, ran.err) == (0, "")
    assert_same(ran.kept[0]["weights"], weights(train(source, STEPS, workers=1)))


def test_dropout_differs_between_workers_that_are_seeded_alike(launch):
    ran = launch(
        SETUP + SGD + LOOP + "keep(run, drawn=torch.rand(4), seed=torch.initial_seed())", steps=1
    )
    assert not torch.equal(ran.kept[0]["drawn"], ran.kept[1]["drawn"])
    assert ran.kept[0]["seed"] == 0
