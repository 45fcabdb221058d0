# SPDX-License-Identifier: BSD-3-Clause
"""Streams in real runs: their end, their order, and the samples that they count."""

import pytest
import torch

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
seen, passes = [], []
while not run.finished:
    passes.append([])
    for batch in loader:
        x = batch[0] if isinstance(batch, (list, tuple)) else batch
        seen.append(x.flatten().tolist())
        passes[-1].append(x.flatten().tolist())
        optimizer.zero_grad()
        model(x.reshape(-1, 1)).mean().backward()
        optimizer.step()
keep(run, seen=seen, passes=passes, version=run.version, finished=run.finished)
"""

SHUFFLED = DATA + "loader = DataLoader(data, batch_size=4, shuffle=True)\n" + LOOP


COUNTED = LOOP.replace(
    """while not run.finished:
    passes.append([])
    for batch in loader:
""",
    """for epoch in range(3):
    passes.append([])
    batches = iter(loader)
    for i in range(len(batches)):
        batch = next(batches)
""",
)


# ------------------------------------------------------------------------------------------ its end


@pytest.mark.parametrize("policy", ["sync", "backup:1", "async"])
def test_loop_that_counts_its_batches_gets_as_many_as_it_expects(launch, policy):
    latency = "5ms; worker 0 x4"  # an epoch ends long before worker 0 has had its share
    loader = "loader = DataLoader(data, batch_size=2, shuffle=True)\n"
    ran = launch(DATA + loader + COUNTED, workers=3, policy=policy, steps=None, latency=latency)
    assert ran.code == 0, ran.err
    assert "Traceback" not in ran.err
    share = 6 if policy == "backup:1" else 4  # of 12 batches
    assert [len(one) for one in ran.kept[0]["passes"]] == [share] * 3


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


# ---------------------------------------------------------------------------------------- its order


def orders(ran):
    """Return the samples that each worker saw, in order."""
    return [[x for batch in ran.kept[w]["seen"] for x in batch] for w in sorted(ran.kept)]


def in_turns(ran):
    """Return the samples of all workers, in the order of the batches, under `sync`."""
    turns = zip(*(ran.kept[w]["seen"] for w in sorted(ran.kept)), strict=True)
    return [x for turn in turns for batch in turn for x in batch]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_share_one_order_that_depends_only_on_the_seed(launch, workers):
    """Neither the script's own seed nor the number of workers matters."""
    ran = launch(f"torch.manual_seed({workers})\n{SHUFFLED}", workers=workers, steps=12, seed=1)
    order = in_turns(ran)
    epochs = [order[i : i + SIZE] for i in range(0, len(order), SIZE)]
    assert len(epochs) == 2 * workers
    for epoch in epochs:
        assert sorted(epoch) == list(range(SIZE))
    assert epochs[0] != epochs[1]
    alone = in_turns(launch(SHUFFLED, workers=1, steps=12, seed=1))
    assert order[: 2 * SIZE] == alone
    assert in_turns(launch(SHUFFLED, workers=1, steps=1, seed=2)) != alone[:4]


def test_pass_of_each_worker_is_its_share_of_an_epoch(launch):
    ran = launch(SHUFFLED, workers=3, steps=6)
    for kept in ran.kept.values():
        assert [len(found) for found in kept["passes"]] == [2, 2, 2]


def test_without_shuffling_workers_take_turns(launch):
    ran = launch(SHUFFLED.replace("shuffle=True", "shuffle=False"), workers=3, steps=4)
    assert in_turns(ran) == [float(i) for i in range(SIZE)] * 2


def test_last_batch_may_be_smaller_or_dropped(launch):
    for options, size in (("", SIZE), (", drop_last=True", 20)):
        source = SHUFFLED.replace("batch_size=4, ", f"batch_size=5{options}, ")
        order = in_turns(launch(source, workers=1, steps=12))
        assert len(set(order[:size])) == size
        assert len(set(order[size : 2 * size])) == size


def test_collate_fn_is_used(launch):
    collate = "collate_fn=lambda items: torch.stack([x for x, in items]) + 100"
    ran = launch(SHUFFLED.replace("shuffle=True", f"shuffle=True, {collate}"), steps=3)
    assert sorted(in_turns(ran)) == [100.0 + i for i in range(SIZE)]


KEPT = {
    "a sampler": "DataLoader(data, batch_size=2, sampler=SubsetRandomSampler([5]))",
    "a batch sampler": "DataLoader(data, batch_sampler=[[3, 1], [2]])",
    "a sampler with replacement": (
        "DataLoader(data, 2, sampler=RandomSampler(data, replacement=True, num_samples=2))"
    ),
    "an endless data set": "DataLoader(Counting(), batch_size=2)",
    "weights": "DataLoader(data, 2, sampler=WeightedRandomSampler([0.0, 1.0] * 12, 24))",
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
        if kind == "weights":
            assert all(x % 2 for batch in kept["seen"] for x in batch)


def test_batches_of_a_list_are_shared(launch):
    ran = launch(f"{DATA}loader = list(numbers.split(5))\n{LOOP}", steps=5)
    assert in_turns(ran) == [float(i) for i in range(SIZE)] * 2
    assert [len(found) for found in ran.kept[0]["passes"]] == [3, 2]


def test_pass_over_an_iterable_data_set_is_the_loaders_own(launch):
    ran = launch(f"{DATA}{COUNTING}loader = DataLoader(Counting(), 2)\n{LOOP}", steps=6)
    for kept in ran.kept.values():
        assert kept["passes"] == [[[0.0, 1.0], [2.0]]] * 3


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


def test_stream_has_its_share_of_the_length_and_the_data_set_of_its_loader(launch):
    sizes = "keep(run, sizes=(len(loader), loader.batch_size, len(loader.dataset)))\n"
    ran = launch(SHUFFLED + sizes, workers=2, steps=1)
    assert ran.kept[1]["sizes"] == (3, 4, SIZE)


@pytest.mark.parametrize(
    ("policy", "share"), [("sync", 2), ("backup:1", 3), ("backup:2", 6), ("async", 2)]
)
def test_backups_have_no_share_of_the_length(launch, policy, share):
    ran = launch(SHUFFLED + "keep(run, size=len(loader))\n", workers=3, steps=1, policy=policy)
    assert ran.kept[0]["size"] == share


@pytest.mark.parametrize("options", ["", ", persistent_workers=True", ", prefetch_factor=4"])
def test_loader_with_worker_processes_works_and_ends_cleanly(launch, options):
    plain = launch(SHUFFLED, steps=8)
    loader = f"batch_size=4, shuffle=True, num_workers=2{options}"
    ended = """
import multiprocessing
del loader
keep(run, seen=seen, left=len(multiprocessing.active_children()))
"""
    source = SHUFFLED.replace("batch_size=4, shuffle=True", loader) + ended
    ran = launch(source, steps=8)
    assert (ran.code, ran.err) == (0, "")
    assert orders(ran)[0][:4] == orders(plain)[0][:4]
    used = sorted(number for g in ran.trace.gradients() for number in g.uses[0].numbers)
    # Each worker holds batches that its processes load ahead.
    assert used[:6] == list(range(6))
    assert len(set(used)) == len(used) == 16
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
loader = [numbers[:4], numbers[4:]]
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
model, optimizer, loader = run.prepare(model, optimizer, loader)
for _ in range(4):
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
for _ in range(2):
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
    source = SHUFFLED.replace("        model(x.reshape(-1, 1)).mean().backward()\n", own)
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
