# SPDX-License-Identifier: BSD-3-Clause
"""Unpacked data kept for the next time, for what takes seconds to unpack.

What is kept is mapped, not read: processes that train on the same data share its memory. Whatever
is wrong with a folder for it, the data is unpacked as if there were none.
"""

import hashlib
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from paceline.files import written_whole

__all__ = ["remembered"]

REVISION = 1
"""Raised when files are unpacked in another way, so that none is taken from before."""


def remembered(
    cache: Path | None, name: str, source: Path, unpack: Callable[[], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """What `unpack` makes of the file `source`, from the folder `cache` if it was kept there.

    Several processes may come here at once: what one of them keeps is whole, or is not there.
    """
    if cache is None:
        return dict(unpack())
    place = cache / f"{name}-{_fingerprint(source)}.pt"
    with suppress(OSError, EOFError, RuntimeError, pickle.UnpicklingError):
        return dict(torch.load(place, mmap=True, weights_only=True))
    tensors = dict(unpack())
    # RuntimeError: torch's own writer, at a full disk.
    with suppress(OSError, RuntimeError):
        cache.mkdir(parents=True, exist_ok=True)
        with written_whole(place, alone=False) as partial:
            torch.save(tensors, partial)
    return tensors


def _fingerprint(source: Path) -> str:
    """Another for every other file, without reading it."""
    status = source.stat()
    known = f"{REVISION} {source.resolve()} {status.st_size} {status.st_mtime_ns}"
    return hashlib.sha256(known.encode()).hexdigest()[:16]
