# SPDX-License-Identifier: BSD-3-Clause
"""Streams in real runs: their end, their order, and the samples that they count."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler

from paceline.run.worker.batch_stream import count_samples, samples_in_epoch
from plain import assert_same

SIZE = 24

DATA = """
from torch.utils.data import *
numbers = torch.arange(24.0)
data = TensorDataset(numbers)
"""

LOOP = """
run = paceline.join()
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
model, optimizer, loader = run.prepare(model, optimizer, loader)
seen = []
for batch in loader:
    x = batch[0] if isinstance(batch, (list, tuple)) else batch
    seen.append(x.flatten().tolist())
    optimizer.zero_grad()
    model(x.reshape(-1, 1)).mean().backward()
    optimizer.step()
keep(run, seen=seen, version=run.version, finished=run.finished)
"""

SHUFFLED = DATA + "loader = DataLoader(data, batch_size=4, shuffle=True)\n" + LOOP


# ------------------------------------------------------------------------------------------ its end


@pytest.mark.parametrize(
    ("policy", "options", "updates"),
    [
        ("sync", {"steps": 5}, 5),
        ("sync", {"samples": 20}, 3),  # 8 per update
        ("sync", {"epochs": 1}, 3),
        ("sync", {"epochs": 1.5}, 5),
        ("sync", {"steps": 2, "epochs": 1.5}, 2),  # whichever comes first
        ("async", {"samples": 18}, 5),  # 4 per update
        ("async", {"epochs": 0.5}, 3),
    ],
)
def test_stream_ends_with_the_last_update(launch, policy, options, updates):
    ran = launch(SHUFFLED, policy=policy, min_workers=2, **{"steps": None, **options})
    assert (ran.code, ran.err) == (0, "")
    assert len(list(ran.trace.updates())) == updates
    for kept in ran.kept.values():
        assert (kept["version"], kept["finished"]) == (updates, True)
    if policy == "sync":
        assert [len(kept["seen"]) for kept in ran.kept.values()] == [updates, updates]


@pytest.mark.parametrize(
    ("loader", "samples"),
    [
        (DataLoader(range(10), batch_size=3), 10),
        (DataLoader(range(10), sampler=SubsetRandomSampler([1, 2, 3])), 3),
        (DataLoader(range(10), batch_sampler=[[0, 1], [2]]), 10),
        (
            DataLoader(type("Endless", (IterableDataset,), {"__iter__": lambda self: iter(())})()),
            None,
        ),
        ([torch.ones(4, 2), torch.ones(3, 2)], 7),
        (iter(()), None),
    ],
)
def test_samples_in_an_epoch_are_counted(loader, samples):
    assert samples_in_epoch(loader) == samples


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.ones(5, 2), 5),
        (torch.tensor(1.0), 1),
        ((torch.ones(5, 2), torch.ones(5)), 5),
        ({"ids": torch.ones(3, 2), "label": 1}, 3),
        ([{"x": torch.ones(6)}, torch.ones(2)], 6),
        (["one", "two"], 2),
        ("words", 1),
        (None, 1),
        ([], 1),
    ],
)
def test_samples_in_a_batch_are_counted(batch, samples):
    assert count_samples(batch) == samples


# ---------------------------------------------------------------------------------------- its order


def orders(ran):
    """Return the samples that each worker saw, in order."""
    return [[x for batch in ran.kept[w]["seen"] for x in batch] for w in sorted(ran.kept)]


def test_order_of_a_worker_depends_only_on_the_seed_and_its_number(launch):
    first, second = orders(launch(SHUFFLED, steps=12, seed=1))
    for one in (first, second):
        assert sorted(one[:SIZE]) == sorted(one[SIZE:]) == list(range(SIZE))
        assert one[:SIZE] != one[SIZE:]
    assert first != second
    # Neither the script's own seed nor the number of workers matters.
    again = orders(launch(f"torch.manual_seed(7)\n{SHUFFLED}", workers=3, steps=12, seed=1))
    assert again[:2] == [first, second]
    assert orders(launch(SHUFFLED, workers=1, steps=12, seed=2))[0] != first


def test_without_shuffling_each_worker_starts_at_its_own_offset(launch):
    ran = launch(SHUFFLED.replace("shuffle=True", "shuffle=False"), workers=3, steps=8)
    for worker, seen in enumerate(orders(ran)):
        assert seen == [(worker * 8 + i) % SIZE for i in range(32)]


KEPT = {
    "a sampler": "DataLoader(data, batch_size=2, sampler=SubsetRandomSampler([5]))",
    "a batch sampler": "DataLoader(data, batch_sampler=[[3, 1], [2]])",
    "a sampler with replacement": (
        "DataLoader(data, 2, sampler=RandomSampler(data, replacement=True, num_samples=2))"
    ),
    "an endless data set": "DataLoader(Counting(), batch_size=2)",
    "a list": "[numbers[:2], numbers[2:3]]",
    "batches of the data set itself": "DataLoader(list(numbers.split(20)), batch_size=None)",
}

COUNTING = """
class Counting(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(3.0))
"""

SEEN = {
    "a sampler": [[5.0], [5.0], [5.0]],
    "a batch sampler": [[3.0, 1.0], [2.0], [3.0, 1.0]],
    "an endless data set": [[0.0, 1.0], [2.0], [0.0, 1.0]],
    "a list": [[0.0, 1.0], [2.0], [0.0, 1.0]],
    "batches of the data set itself": [list(map(float, r)) for r in (range(20), range(20, 24))]
    + [list(map(float, range(20)))],
}


@pytest.mark.parametrize("kind", KEPT)
def test_order_provided_by_the_script_is_kept_and_repeated(launch, kind):
    ran = launch(f"{DATA}{COUNTING}loader = {KEPT[kind]}\n{LOOP}", steps=3)
    assert (ran.code, ran.err) == (0, "")
    for kept in ran.kept.values():
        assert [len(batch) for batch in kept["seen"]] == [
            len(b) for b in SEEN.get(kind, [[0] * 2] * 3)
        ]
        assert kept["seen"] == SEEN.get(kind, kept["seen"])


def test_set_epoch_of_a_sampler_is_called(launch):
    sampler = """
class Own(Sampler):
    epoch = -1
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __iter__(self):
        return iter([self.epoch, self.epoch])

loader = DataLoader(data, batch_size=2, sampler=Own())
"""
    ran = launch(DATA + sampler + LOOP, workers=1, steps=3)
    assert ran.kept[0]["seen"] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


def test_stream_has_the_length_and_the_data_set_of_its_loader(launch):
    sizes = "keep(run, sizes=(len(loader), loader.batch_size, len(loader.dataset)))\n"
    ran = launch(SHUFFLED + sizes, workers=1, steps=1)
    assert ran.kept[0]["sizes"] == (6, 4, SIZE)


@pytest.mark.parametrize("options", ["", ", persistent_workers=True", ", prefetch_factor=4"])
def test_loader_with_worker_processes_works_and_ends_cleanly(launch, options):
    plain = launch(SHUFFLED, steps=8)
    loader = f"batch_size=4, shuffle=True, num_workers=1{options}"
    ended = """
import multiprocessing
del loader
keep(run, seen=seen, left=len(multiprocessing.active_children()))
"""
    source = SHUFFLED.replace("batch_size=4, shuffle=True", loader) + ended
    ran = launch(source, steps=8)
    assert (ran.code, ran.err) == (0, "")
    assert orders(ran) == orders(plain)
    assert [kept["left"] for kept in ran.kept.values()] == [0, 0]


INHERITED = """
import os
from contextlib import suppress

def sockets():
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # one that was closed since, the listing's own among them
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return found

class Inherited(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return float(len({name for name in sockets() & ours if name.startswith("socket:")}))

loader = torch.utils.data.DataLoader(Inherited(), batch_size=2, num_workers=1)
run = paceline.join()
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = sockets()
model, optimizer, loader = run.prepare(model, optimizer, loader)
ours = sockets() - before
here = Inherited()[0]
for x in loader:
    model(x.reshape(-1, 1).float()).mean().backward()
    optimizer.step()
keep(run, here=here, there=x)
"""


def test_loader_processes_do_not_keep_the_connection_to_the_server_open(launch):
    """Otherwise the server wouldn't notice the death of the worker."""
    ran = launch(INHERITED, workers=1, steps=2)
    assert (ran.code, ran.err) == (0, "")
    assert ran.kept[0]["here"] == 1.0
    assert ran.kept[0]["there"].tolist() == [0.0, 0.0]


# --------------------------------------------------------------------------------------- its weight


def test_gradients_are_weighted_by_their_samples(launch):
    ran = launch(
        DATA
        + """
torch.manual_seed(0)
run = paceline.join()
loader = [numbers[:4]] if run.is_first else [numbers[4:]]
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
model, optimizer, loader = run.prepare(model, optimizer, loader)
for x in loader:
    optimizer.zero_grad()
    model(x.reshape(-1, 1)).square().mean().backward()
    optimizer.step()
keep(run, weights=[p.detach().clone() for p in model.parameters()])
""",
        steps=4,
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.arange(24.0).reshape(-1, 1)).square().mean().backward()
        optimizer.step()
    assert_same(ran.kept[0]["weights"], [p.detach() for p in model.parameters()])
    assert {g.worker: g.samples for g in ran.trace.gradients()} == {0: 4, 1: 20}


ACCUMULATED = """
run = paceline.join()
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
model, optimizer, loader, other = run.prepare(model, optimizer, loader, [numbers])
others = iter(other)
for turn, (x,) in enumerate(loader):
    if run.version == 1 and turn % 3 == 1:
        next(others)  # of 24
    model(x.reshape(-1, 1)).mean().backward()
    if turn % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()
"""


def test_samples_of_all_batches_of_a_gradient_are_counted(launch):
    """Three batches of 4 samples; if two loaders are used, the one with more samples counts."""
    source = DATA + "loader = DataLoader(data, batch_size=4, shuffle=True)\n" + ACCUMULATED
    ran = launch(source, workers=1, steps=4)
    assert [g.samples for g in ran.trace.gradients()] == [12, 24, 12, 12]


def test_samples_of_a_gradient_set_by_the_script_are_counted(launch):
    own = """
    own = list(model.parameters())
    for p, grad in zip(own, torch.autograd.grad(model(x.reshape(-1, 1)).mean(), own)):
        p.grad = grad
"""
    source = SHUFFLED.replace("    model(x.reshape(-1, 1)).mean().backward()\n", own)
    assert "autograd" in source
    ran = launch(source, workers=1, steps=3)
    assert [g.samples for g in ran.trace.gradients()] == [4, 4, 4]


def test_loader_keeps_its_class_and_attributes(launch):
    source = (
        DATA
        + """
class Scaled(DataLoader):
    def __iter__(self):
        for (x,) in super().__iter__():
            yield x * 1000

loader = Scaled(data, batch_size=4, shuffle=True)
loader.note = "kept"
run = paceline.join()
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
model, optimizer, loader = run.prepare(model, optimizer, loader)
seen = []
for x in loader:
    seen.append(x)
    model(x.reshape(-1, 1)).mean().backward()
    optimizer.step()
keep(run, seen=torch.cat(seen), note=loader.note)
"""
    )
    ran = launch(source, workers=1, steps=6)
    assert ran.code == 0, ran.err
    assert sorted(ran.kept[0]["seen"].flatten().tolist()) == [1000.0 * i for i in range(24)]
    assert ran.kept[0]["note"] == "kept"
