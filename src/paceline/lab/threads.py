# SPDX-License-Identifier: BSD-3-Clause
"""Limit torch to one thread: tensors as small as the lab's gain nothing from a second one."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["one_thread"]


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread inside the block, and restore the number afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
