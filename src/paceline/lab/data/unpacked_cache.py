# SPDX-License-Identifier: BSD-3-Clause
"""Cache unpacked data sets that take seconds to unpack.

Cached tensors are memory-mapped, so processes that train on the same data share its memory. If the
cache can't be read or written, the data is unpacked again.
"""

import hashlib
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from paceline.files import atomic_write

__all__ = ["cached"]

REVISION = 1
"""Raise this when files are unpacked differently, so that old cache entries aren't used."""


def cached(
    cache: Path | None, name: str, source: Path, unpack: Callable[[], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Return what `unpack` makes of the file `source`, from the folder `cache` if it is there.

    Several processes may call this at once: an entry is either complete or missing.
    """
    if cache is None:
        return dict(unpack())
    entry = cache / f"{name}-{_fingerprint(source)}.pt"
    with suppress(OSError, EOFError, RuntimeError, pickle.UnpicklingError):
        return dict(torch.load(entry, mmap=True, weights_only=True))
    tensors = dict(unpack())
    # torch's writer raises RuntimeError when the disk is full.
    with suppress(OSError, RuntimeError):
        cache.mkdir(parents=True, exist_ok=True)
        with atomic_write(entry, alone=False) as file:
            torch.save(tensors, file)
    return tensors


def _fingerprint(source: Path) -> str:
    """Return a key that changes with the file, without reading it."""
    status = source.stat()
    known = f"{REVISION} {source.resolve()} {status.st_size} {status.st_mtime_ns}"
    return hashlib.sha256(known.encode()).hexdigest()[:16]
