# SPDX-License-Identifier: BSD-3-Clause
"""How a checkpoint file begins: a magic line, the sizes of its parts, and their checksums.

This module doesn't import torch, so that `paceline trace check` can look up what the newest
checkpoint says about the trace.
"""

import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import msgspec

__all__ = ["MAGIC", "SIZES", "SavedTrace", "checkpoint_files", "saved_trace"]

MAGIC = b"paceline checkpoint 1\n"
SIZES = struct.Struct("<QQQII")  # bytes of tree, positions, tensors; checksums of the two, tensors


class SavedTrace(NamedTuple):
    """What a checkpoint says about the trace of its run."""

    version: int  # of the checkpoint; the trace has its update
    size_bytes: int  # the trace had at least these bytes
    checksum: int  # CRC-32 of them


class _Tree(msgspec.Struct):
    """The part of a checkpoint that this module reads."""

    version: int
    trace: tuple[int, int] = (0, 0)


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the checkpoint files in a folder, newest first."""
    found = [path for path in folder.glob("*.ckpt") if path.stem.isdecimal()]
    return sorted(found, key=lambda path: int(path.stem), reverse=True)


def saved_trace(folder: Path) -> SavedTrace | None:
    """Return what the newest checkpoint in a folder says about the trace; None: there is none.

    Damaged checkpoints are left out, as they are when a run continues.
    """
    for path in checkpoint_files(folder):
        try:
            with path.open("rb") as file:
                head = file.read(len(MAGIC) + SIZES.size)
                tree_bytes, positions_bytes, _, plain, _ = SIZES.unpack(head[len(MAGIC) :])
                tree, positions = file.read(tree_bytes), file.read(positions_bytes)
            if head.startswith(MAGIC) and zlib.crc32(tree + positions) == plain:
                found = msgspec.msgpack.decode(tree, type=_Tree)
                return SavedTrace(found.version, *found.trace)
        except (OSError, OverflowError, MemoryError, struct.error, msgspec.MsgspecError):
            continue
    return None
