# SPDX-License-Identifier: BSD-3-Clause
"""The random numbers of the workers of a run."""

import random
import sys

import torch

__all__ = ["seed_apart"]


def seed_apart(worker: int) -> None:
    """Give each worker different random numbers, although the script seeds all processes alike.

    Otherwise dropout and random augmentation would be the same in every worker.
    """
    torch.manual_seed(torch.initial_seed() + worker)
    random.seed(f"{random.getrandbits(64)} {worker}")
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        numpy.random.seed((int(numpy.random.randint(2**31)) + worker) % 2**32)
