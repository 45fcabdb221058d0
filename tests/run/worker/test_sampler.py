# SPDX-License-Identifier: BSD-3-Clause
"""The order in which a worker draws samples."""

from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from paceline.run.worker.position import Bookmark
from paceline.run.worker.sampler import has_own_order, start_at, with_own_order


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("workers", [1, 3, 20])
def test_every_worker_sees_every_sample_once_per_pass(shuffle, workers):
    firsts = set()
    for worker in range(workers):
        loader = with_own_order(DataLoader(range(12), 4, shuffle=shuffle), 0, worker, workers)
        batches = iter(loader)
        for _ in range(2):
            seen = torch.cat([next(batches) for _ in range(3)])
            assert sorted(seen.tolist()) == list(range(12))
        firsts.add(tuple(seen.tolist()))
    assert len(firsts) == (workers if shuffle else min(workers, 12))


def test_order_depends_on_the_seed_and_the_worker():
    def order(seed, worker):
        loader = with_own_order(DataLoader(range(50), 50, shuffle=True), seed, worker, 4)
        return tuple(next(iter(loader)).tolist())

    assert order(1, 2) == order(1, 2)
    assert len({order(seed, worker) for seed in range(5) for worker in range(5)}) == 25


@pytest.mark.parametrize(
    "loader",
    [
        [1, 2],
        DataLoader(range(4), batch_size=None),
        DataLoader(range(4), sampler=RandomSampler(range(4), replacement=True)),
        DataLoader(range(4), sampler=DistributedSampler(range(4), 2, 0)),
        DataLoader(range(4), batch_sampler=[[0, 1], [2, 3]]),
    ],
    ids=["a list", "no batches", "with replacement", "its own sampler", "its own batches"],
)
def test_loader_with_its_own_sampler_is_unchanged(loader):
    assert with_own_order(loader, 0, 0, 2) is loader
    assert not has_own_order(loader)


def test_loader_starts_at_a_bookmark_with_the_batches_to_hand_out_again():
    loader = with_own_order(DataLoader(range(12), 4, shuffle=True), 0, 1, 3)
    assert has_own_order(loader)
    batches = {}
    for loop in (0, 1):
        start_at(loader, Bookmark(loop, 0))
        batches[loop] = [batch.tolist() for batch in islice(loader, 6)]
    assert batches[0] != batches[1]
    start_at(loader, Bookmark(1, 4, ((0, 5), (1, 2))))
    found = [batch.tolist() for batch in islice(loader, 4)]
    assert found == [batches[0][5], batches[1][2], batches[1][4], batches[1][5]]


def test_loader_of_the_script_keeps_its_own_order():
    plain = DataLoader(range(12), 4)
    with_own_order(plain, 0, 1, 3)
    assert [batch.tolist() for batch in plain] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
