# SPDX-License-Identifier: BSD-3-Clause
"""How many threads compute: one, because small tensors gain nothing from a second."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["one_thread"]


@contextmanager
def one_thread() -> Iterator[None]:
    """Meanwhile torch computes with one thread, whatever it did before and does afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
