# SPDX-License-Identifier: BSD-3-Clause
"""A mini-batch follows from the seed and the draw alone, and respects shares."""

import pytest
import torch

from paceline.errors import SpecError
from paceline.lab.data.sampling import Shares, augmentation_rng, sample_indices
from paceline.lab.problem import Draw

DRAWS = [Draw(3, 0), Draw(0, 7), Draw(3, 1)]


def quarters() -> Shares:
    return Shares(torch.randperm(1000, generator=torch.Generator().manual_seed(0)).split(250))


def test_samples_are_the_same_alone_and_together() -> None:
    together = sample_indices(5, DRAWS, 32, 60_000).view(3, 32)
    for index, draw in enumerate(DRAWS):
        assert torch.equal(sample_indices(5, [draw], 32, 60_000), together[index])


def test_samples_never_change_between_releases() -> None:
    """Otherwise stored results would no longer belong to their trials."""
    assert sample_indices(0, [Draw(1, 2)], 4, 1000).tolist() == [555, 881, 293, 289]
    assert augmentation_rng(0, Draw(1, 2)).integers(1000, size=4).tolist() == [409, 560, 463, 865]


def test_samples_differ_by_seed_worker_and_number() -> None:
    draws = [(0, Draw(0, 0)), (1, Draw(0, 0)), (0, Draw(1, 0)), (0, Draw(0, 1)), (1, Draw(1, 1))]
    rows = {tuple(sample_indices(seed, [draw], 8, 1_000_000).tolist()) for seed, draw in draws}
    assert len(rows) == len(draws)


def test_samples_are_drawn_evenly() -> None:
    seen = sample_indices(1, [Draw(worker, 0) for worker in range(100)], 100, 10).bincount()
    assert len(seen) == 10
    assert 850 < int(seen.min()) <= int(seen.max()) < 1150


def test_augmentation_has_other_random_numbers_than_sampling() -> None:
    chosen = sample_indices(0, [Draw(0, 0)], 8, 1000).tolist()
    assert augmentation_rng(0, Draw(0, 0)).integers(1000, size=8).tolist() != chosen


def test_workers_draw_from_their_share_only() -> None:
    shares = quarters()
    drawn = sample_indices(0, [Draw(worker, 5) for worker in range(4)], 2000, shares).view(4, -1)
    for worker in range(4):
        assert set(drawn[worker].tolist()) <= set(shares.of(worker).tolist())
        assert len(drawn[worker].unique()) > 240  # of its 250


def test_samples_from_shares_are_the_same_alone_and_together() -> None:
    shares = quarters()
    together = sample_indices(5, DRAWS, 32, shares).view(3, 32)
    for index, draw in enumerate(DRAWS):
        assert torch.equal(sample_indices(5, [draw], 32, shares), together[index])


def test_only_owners_have_reserved_labels() -> None:
    labels = torch.arange(100) % 10
    shares = Shares.reserved(labels, 4, {3: [2], 7: [1, 2]})
    having = [set(labels[shares.of(worker)].tolist()) for worker in range(4)]
    everyone = set(range(10)) - {3, 7}
    assert having == [everyone, everyone | {7}, everyone | {3, 7}, everyone]
    assert len(shares.of(2)) == 100


def test_without_reserved_labels_all_workers_have_all_samples() -> None:
    shares = Shares.reserved(torch.arange(10), 2, {})
    assert shares.of(1).tolist() == list(range(10))


def test_worker_without_samples_is_refused() -> None:
    with pytest.raises(SpecError, match="every worker must have samples, worker 1 has none"):
        Shares.reserved(torch.zeros(5, dtype=torch.int64), 2, {0: [0]})


def test_worker_beyond_the_shares_is_refused() -> None:
    with pytest.raises(SpecError, match="there are shares for 4 workers, got worker id 4"):
        sample_indices(0, [Draw(4, 0)], 1, quarters())
