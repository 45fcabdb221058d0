# SPDX-License-Identifier: BSD-3-Clause
"""A mini-batch follows from the seed and the draw alone, and each worker draws from what it has."""

import pytest
import torch

from paceline.errors import SpecError
from paceline.lab.data.draws import Shares, indices, rng
from paceline.lab.problem import Draw

DRAWS = [Draw(3, 0), Draw(0, 7), Draw(3, 1)]


def quarters() -> Shares:
    return Shares(torch.randperm(1000, generator=torch.Generator().manual_seed(0)).split(250))


def test_a_draw_has_the_same_samples_alone_and_together() -> None:
    together = indices(5, DRAWS, 32, 60_000).view(3, 32)
    for place, draw in enumerate(DRAWS):
        assert torch.equal(indices(5, [draw], 32, 60_000), together[place])


def test_the_samples_stay_the_same_from_release_to_release() -> None:
    """Or outcomes that were kept would not be those of their trials any more."""
    assert indices(0, [Draw(1, 2)], 4, 1000).tolist() == [555, 881, 293, 289]
    assert rng(0, Draw(1, 2)).integers(1000, size=4).tolist() == [409, 560, 463, 865]


def test_other_seeds_workers_and_numbers_give_other_samples() -> None:
    draws = [(0, Draw(0, 0)), (1, Draw(0, 0)), (0, Draw(1, 0)), (0, Draw(0, 1)), (1, Draw(1, 1))]
    rows = {tuple(indices(seed, [draw], 8, 1_000_000).tolist()) for seed, draw in draws}
    assert len(rows) == len(draws)


def test_samples_are_drawn_evenly() -> None:
    seen = indices(1, [Draw(worker, 0) for worker in range(100)], 100, 10).bincount()
    assert len(seen) == 10
    assert 850 < int(seen.min()) <= int(seen.max()) < 1150


def test_what_chose_the_samples_does_not_change_them() -> None:
    chosen = indices(0, [Draw(0, 0)], 8, 1000).tolist()
    assert rng(0, Draw(0, 0)).integers(1000, size=8).tolist() != chosen


def test_every_worker_draws_from_its_share_only() -> None:
    shares = quarters()
    drawn = indices(0, [Draw(worker, 5) for worker in range(4)], 2000, shares).view(4, -1)
    for worker in range(4):
        assert set(drawn[worker].tolist()) <= set(shares.of(worker).tolist())
        assert len(drawn[worker].unique()) > 240  # of the 250 that it has


def test_a_draw_from_shares_has_the_same_samples_alone_and_together() -> None:
    shares = quarters()
    together = indices(5, DRAWS, 32, shares).view(3, 32)
    for place, draw in enumerate(DRAWS):
        assert torch.equal(indices(5, [draw], 32, shares), together[place])


def test_reserved_labels_are_drawn_by_their_owners_only() -> None:
    labels = torch.arange(100) % 10
    shares = Shares.reserved(labels, 4, {3: [2], 7: [1, 2]})
    having = [set(labels[shares.of(worker)].tolist()) for worker in range(4)]
    everyone = set(range(10)) - {3, 7}
    assert having == [everyone, everyone | {7}, everyone | {3, 7}, everyone]
    assert len(shares.of(2)) == 100


def test_with_nothing_reserved_everyone_has_everything() -> None:
    shares = Shares.reserved(torch.arange(10), 2, {})
    assert shares.of(1).tolist() == list(range(10))


def test_a_worker_without_samples_is_refused() -> None:
    with pytest.raises(SpecError, match="every worker must have samples, worker 1 has none"):
        Shares.reserved(torch.zeros(5, dtype=torch.int64), 2, {0: [0]})


def test_a_worker_beyond_the_shares_is_refused() -> None:
    with pytest.raises(SpecError, match="there are shares for 4 workers, none for 4"):
        indices(0, [Draw(4, 0)], 1, quarters())
