# SPDX-License-Identifier: BSD-3-Clause
"""A real file system that is small enough to fill."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["SmallDisk", "small_disk"]


class SmallDisk:
    """A small file system in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def remount(self, options: str) -> None:
        """Change its size, or make it read-only."""
        subprocess.run(["mount", "-o", f"remount,{options}", self.path], check=True)


@contextmanager
def small_disk(path: Path, size: str = "2m") -> Iterator[SmallDisk]:
    """Mount a small file system at this path; skip the test if that isn't allowed."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", path], check=True)
