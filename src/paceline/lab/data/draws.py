# SPDX-License-Identifier: BSD-3-Clause
"""Which samples a mini-batch has, and the random numbers that change them.

Both follow from the seed and the draw alone, never from what was drawn before or is drawn with it:
any mini-batch can be made again, at any time, in any process.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import SpecError
from paceline.lab.problem import Draw

__all__ = ["Shares", "indices", "rng"]


class Shares:
    """Which samples each worker has, where not all of them have all."""

    def __init__(self, pools: Sequence[Tensor]) -> None:
        """`pools`: for each worker the indices of the samples that it draws from."""
        empty = [worker for worker, pool in enumerate(pools) if not len(pool)]
        if empty:
            raise SpecError(f"every worker must have samples, worker {empty[0]} has none")
        self._pools = [pool.numpy() for pool in pools]

    @classmethod
    def reserved(
        cls, labels: Tensor, workers: int, owners: Mapping[int, Sequence[int]]
    ) -> "Shares":
        """Everyone has everything, but samples of some labels have only the workers named here."""
        pools = []
        for worker in range(workers):
            others = [label for label, having in owners.items() if worker not in having]
            is_other = torch.isin(labels, torch.tensor(others, dtype=labels.dtype))
            pools.append((~is_other).nonzero().flatten())
        return cls(pools)

    def of(self, worker: int) -> NDArray[np.int64]:
        """What this worker draws from."""
        if worker >= len(self._pools):
            raise SpecError(f"there are shares for {len(self._pools)} workers, none for {worker}")
        return self._pools[worker]


def indices(seed: int, draws: Sequence[Draw], batch: int, samples: int | Shares) -> Tensor:
    """The samples of these draws, `batch` of each, in their order.

    Every sample is drawn from all that there are, or that the worker has: one may come twice.
    """
    return torch.from_numpy(np.concatenate([_draw(seed, draw, batch, samples) for draw in draws]))


def rng(seed: int, draw: Draw) -> np.random.Generator:
    """The random numbers to change a draw's samples with; not those that chose the samples."""
    return np.random.default_rng([seed, draw.worker, draw.number, 1])


def _draw(seed: int, draw: Draw, batch: int, samples: int | Shares) -> NDArray[np.int64]:
    numbers = np.random.default_rng([seed, draw.worker, draw.number])
    if isinstance(samples, Shares):
        pool = samples.of(draw.worker)
        return pool[numbers.integers(len(pool), size=batch)]
    return numbers.integers(samples, size=batch)
