# SPDX-License-Identifier: BSD-3-Clause
"""Workers whose scripts seed them alike draw different numbers, the same ones in each run."""

import random
from collections.abc import Iterator

import numpy
import pytest
import torch

from paceline.run.worker.seeds import seed_apart


@pytest.fixture(autouse=True)
def _own_generators() -> Iterator[None]:
    before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    numpy.random.set_state(before[1])
    torch.set_rng_state(before[2])


def drawn(worker: int) -> tuple[float, float, float]:
    """Return a number of each generator in a worker whose script uses the seed 0."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    seed_apart(worker)
    return random.random(), float(numpy.random.random()), float(torch.rand(()))


def test_each_worker_has_numbers_of_its_own() -> None:
    numbers = [drawn(worker) for worker in (1, 2, 3)]
    for generator in zip(*numbers, strict=True):
        assert len(set(generator)) == 3


def test_a_worker_has_the_same_numbers_in_each_run() -> None:
    assert drawn(2) == drawn(2)
