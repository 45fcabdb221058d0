# SPDX-License-Identifier: BSD-3-Clause
"""Choose the samples of each mini-batch, and the random numbers for their augmentation.

Both follow from the seed and the draw alone, never from earlier or simultaneous draws: any
mini-batch can be made again, at any time, in any process.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import SpecError
from paceline.lab.problem import Draw

__all__ = ["Shares", "augmentation_rng", "sample_indices"]


class Shares:
    """The samples that each worker holds, if workers don't all hold the same ones."""

    def __init__(self, pools: Sequence[Tensor]) -> None:
        """`pools`: for each worker, the indices of the samples that it draws from."""
        empty = [worker for worker, pool in enumerate(pools) if not len(pool)]
        if empty:
            raise SpecError(f"every worker must have samples, worker {empty[0]} has none")
        self._pools = [pool.numpy() for pool in pools]

    @classmethod
    def reserved(
        cls, labels: Tensor, workers: int, owners: Mapping[int, Sequence[int]]
    ) -> "Shares":
        """Give every worker all samples, except those of labels reserved for their owners.

        `owners` maps each reserved label to the workers that hold its samples.
        """
        pools = []
        for worker in range(workers):
            excluded = [label for label, having in owners.items() if worker not in having]
            is_excluded = torch.isin(labels, torch.tensor(excluded, dtype=labels.dtype))
            pools.append((~is_excluded).nonzero().flatten())
        return cls(pools)

    def of(self, worker: int) -> NDArray[np.int64]:
        """Return the indices of the samples that this worker draws from."""
        if worker >= len(self._pools):
            raise SpecError(
                f"there are shares for {len(self._pools)} workers, got worker id {worker}"
            )
        return self._pools[worker]


def sample_indices(seed: int, draws: Sequence[Draw], batch: int, samples: int | Shares) -> Tensor:
    """Return the indices of `batch` samples for each draw, in order.

    Samples are drawn with replacement from all `samples`, or from the worker's share.
    """
    return torch.from_numpy(np.concatenate([_draw(seed, draw, batch, samples) for draw in draws]))


def augmentation_rng(seed: int, draw: Draw) -> np.random.Generator:
    """Return the generator that augments a draw; a different one chooses its samples."""
    return np.random.default_rng([seed, draw.worker, draw.number, 1])


def _draw(seed: int, draw: Draw, batch: int, samples: int | Shares) -> NDArray[np.int64]:
    numbers = np.random.default_rng([seed, draw.worker, draw.number])
    if isinstance(samples, Shares):
        pool = samples.of(draw.worker)
        return pool[numbers.integers(len(pool), size=batch)]
    return numbers.integers(samples, size=batch)
