# SPDX-License-Identifier: BSD-3-Clause
"""`sync` equals plain large-batch training, bit for bit if sums are rounded alike.

The reference adds up the gradients of all workers' batches in one process, in the order of the
workers. Two and four workers divide a sum by a power of two, which is exact, so every bit must be
the same. With three workers, and with DDP, roundings happen in another order.
"""

import pytest
import torch

from ddp import train_with_ddp
from paceline.core.decider import replay
from paceline.core.events import Accept, ApplyUpdate, Drop
from paceline.core.policies import parse_policy
from plain import assert_same, train, weights

STEPS = 50

MLP = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
shape = (8, 6)
"""
CNN = """
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(6, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 2 * 2, 3),
)
shape = (8, 1, 8, 8)
"""
LSTM = """
class LastOfSequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])

torch.manual_seed(0)
model = LastOfSequence()
shape = (8, 7, 5)
"""
LOSS = """
torch.set_num_threads(1)  # several would share a sum among them, each time in another way

def loss_of(worker, version):
    generator = torch.Generator().manual_seed(1000 * version + worker)
    x = torch.randn(shape, generator=generator).to(DTYPE)
    return F.cross_entropy(model(x), x.flatten(1).sum(1).long() % 3)
"""
SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)\n"
ADAM = "optimizer = torch.optim.Adam(model.parameters(), lr=0.003)\n"

LOOP = """
run = paceline.join()
torch.set_num_threads(1)
model, optimizer = run.prepare(model, optimizer)
losses = []
while not run.finished:
    optimizer.zero_grad()
    loss = loss_of(run.worker, run.version)
    losses.append(loss.item())
    loss.backward()
    optimizer.step()
keep(run, weights=[p.detach().clone() for p in model.parameters()], losses=losses)
"""

MODELS = {"mlp": MLP, "cnn": CNN, "lstm": LSTM}
OPTIMIZERS = {"sgd": SGD, "adam": ADAM}
CASES = [(model, optimizer) for model in MODELS for optimizer in OPTIMIZERS]


def source_of(model, optimizer, dtype="float32"):
    to_dtype = f"DTYPE = torch.{dtype}\nmodel = model.to(DTYPE)\n"
    return MODELS[model] + to_dtype + LOSS + OPTIMIZERS[optimizer]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def by_ddp(tmp_path_factory):
    """The weights that DDP trains in each case, with three workers, in double precision."""
    sources = [source_of(*case, "float64") for case in CASES]
    trained = train_with_ddp(sources, 3, STEPS, tmp_path_factory.mktemp("ddp"))
    return dict(zip(CASES, trained, strict=True))


def bits_of(ran):
    assert ran.code == 0, ran.err
    return [torch.cat([p.flatten() for p in kept["weights"]]) for kept in ran.kept.values()]


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize(("model", "optimizer"), CASES)
def test_sync_is_large_batch_training_bit_for_bit(launch, model, optimizer, workers):
    source = source_of(model, optimizer)
    ran = launch(source + LOOP, workers=workers, steps=STEPS)
    expected = torch.cat([p.flatten() for p in weights(train(source, STEPS, workers))])
    assert len(ran.kept) == workers
    for mine in bits_of(ran):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize(("model", "optimizer"), CASES)
def test_sync_is_ddp_up_to_rounding(launch, by_ddp, model, optimizer):
    """In double precision, so that rounding is far smaller than any real difference."""
    source = source_of(model, optimizer, "float64")
    ran = launch(source + LOOP, workers=3, steps=STEPS)
    assert ran.code == 0, ran.err
    assert_same(ran.kept[0]["weights"], by_ddp[model, optimizer])
    assert_same(ran.kept[0]["weights"], weights(train(source, STEPS, 3)))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_repeated_run_gives_the_same_bits(launch, optimizer):
    source = source_of("lstm", optimizer) + LOOP
    runs = [launch(source, workers=4, steps=STEPS) for _ in range(3)]
    first, *others = [mine for ran in runs for mine in bits_of(ran)]
    assert all(torch.equal(first, other) for other in others)
    for ran in runs[1:]:
        for worker in range(4):
            assert ran.kept[worker]["losses"] == runs[0].kept[worker]["losses"]


@pytest.mark.parametrize("policy", ["backup:0", "delayed:0"])
def test_policies_equivalent_to_sync_give_the_same_bits(launch, policy):
    source = source_of("cnn", "adam")
    ran = launch(source + LOOP, workers=4, steps=STEPS, policy=policy)
    expected = torch.cat([p.flatten() for p in weights(train(source, STEPS, 4))])
    for mine in bits_of(ran):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("policy", ["sync", "backup:1", "batchsync:2", "async", "delayed:1"])
def test_replayed_events_of_a_real_run_give_the_same_decisions(launch, policy):
    ran = launch(source_of("mlp", "sgd") + LOOP, workers=3, steps=STEPS, policy=policy)
    assert ran.code == 0, ran.err
    trace = ran.trace
    decided = replay(parse_policy(policy), trace.header.spec(), trace.events())
    actions = [action for some in decided for action in some]
    updates = [a for a in actions if isinstance(a, ApplyUpdate)]
    assert [(u.update, u.contributors) for u in trace.updates()] == [
        (a.update, tuple(c.worker for c in a.contributions)) for a in updates
    ]
    fates = [a for a in actions if isinstance(a, Accept | Drop)]
    assert [(g.worker, g.version, g.fate) for g in trace.gradients()] == [
        (a.worker, a.version, "accepted" if isinstance(a, Accept) else a.fate) for a in fates
    ]


LARGE = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600), nn.Linear(600, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
generator = torch.Generator().manual_seed(run.worker)
while not run.finished:
    optimizer.zero_grad()
    model(torch.randn(2, 600, generator=generator)).square().mean().backward()
    optimizer.step()
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
keep(run, weights=weights)
"""


def test_run_repeats_bit_for_bit_whatever_the_order_of_large_gradients(launch):
    """In one run the first worker arrives last, in the other the last one does."""
    latencies = ["1ms; worker 0 x20", "1ms; worker 1 x20; worker 2 x40"]
    runs = [launch(LARGE, workers=3, steps=4, latency=one) for one in latencies]
    assert [ran.code for ran in runs] == [0, 0]
    first, second = (ran.kept[0]["weights"] for ran in runs)
    assert torch.equal(first, second)
