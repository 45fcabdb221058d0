# SPDX-License-Identifier: BSD-3-Clause
"""`torch.save` in the processes of a run, all of which may save to the same path.

A file that `torch.save` writes appears at once and complete: several workers that save to one path
replace each other's files, and a reader never sees a part of one. If two workers have saved to the
same path, the script is told once how to save in one worker only. It is told this for open files,
too, but those can't be replaced: `open()` has already emptied the file.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from paceline.run.launch.environment import Identity

__all__ = ["make_saves_atomic"]

FOLDER = "saves"  # in the run's folder: which worker saved to a path first
PATHS_MAX = 20  # that each process looks at; if workers save to the same paths, the first ones show


def make_saves_atomic(who: Identity) -> None:
    """Replace `torch.save` in this process."""
    plain, registry = torch.save, _SavedPaths(who)

    @wraps(plain)
    def save(obj: object, f: Any, *arguments: Any, **options: Any) -> None:
        path = _replaceable(f)
        if path is None:
            opened = _opened(f)
            if opened is not None:
                registry.note(opened, is_open=True)
            plain(obj, f, *arguments, **options)
            return
        registry.note(path)
        _save_beside(path, lambda partial: plain(obj, partial, *arguments, **options))

    torch.save = torch.serialization.save = save


def _replaceable(f: Any) -> Path | None:
    """Return the path of a file that can be replaced; None for anything else, such as a device."""
    if not isinstance(f, str | os.PathLike):
        return None
    path = Path(os.path.realpath(f))  # replace what a link points to, not the link
    return path if path.is_file() or not path.exists() else None


def _opened(f: Any) -> Path | None:
    """Return the path of an open file; None for anything else, such as memory or a pipe."""
    try:
        path = Path(os.path.realpath(f.name))
        is_there = path.is_file() and os.path.samestat(path.stat(), os.fstat(f.fileno()))
    except (AttributeError, OSError, TypeError, ValueError):
        return None
    return path if is_there else None


def _save_beside(path: Path, save: Callable[[Path], None]) -> None:
    """Save to a file of this name in a new folder, and move it to its place."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError:  # there is no such folder, or it can't be written: torch knows what to say
        save(path)
        return
    try:
        partial = folder / path.name  # torch writes the name into the file, too
        save(partial)
        with suppress(OSError):
            shutil.copymode(path, partial)
        partial.replace(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _SavedPaths:
    """Notices if two workers of a run save to the same path."""

    def __init__(self, who: Identity) -> None:
        self._folder = who.run_dir / FOLDER
        self._is_on = (who.run_dir / "spec.json").exists()
        self._name = "the server" if who.worker is None else f"worker {who.worker}"
        self._noted: set[Path] = set()

    def note(self, path: Path, *, is_open: bool = False) -> None:
        """Note that this process saves to this path; if another one has, tell the script once."""
        if path in self._noted or len(self._noted) == PATHS_MAX or not self._is_on:
            return
        self._noted.add(path)
        with suppress(OSError):  # a full disk, say: the script isn't told
            self._folder.mkdir(exist_ok=True)
            claim = self._folder / sha256(os.fsencode(path)).hexdigest()
            if self._claim(claim):
                return
            first = claim.read_text(encoding="ascii")
            if first != self._name and self._claim(self._folder / "told"):
                print(self._advice(first, path, is_open), file=sys.stderr, flush=True)

    def _advice(self, first: str, path: Path, is_open: bool) -> str:
        if is_open:
            return (
                f"{first} and {self._name} have both opened {path} and saved to it, so it may be "
                "corrupt; to save in one worker only, write: if run.is_first:, and then open() and "
                "torch.save() inside it"
            )
        return (
            f"{first} and {self._name} have both saved to {path}; to save in one worker only, "
            "write: if run.is_first: torch.save(...)"
        )

    def _claim(self, claim: Path) -> bool:
        """Write the name of this process to a file; return whether it is the first to do so."""
        if claim.exists():
            return False
        own = claim.with_suffix(f".{os.getpid()}")
        own.write_text(self._name, encoding="ascii")
        try:
            claim.hardlink_to(own)  # it appears with its content
        except FileExistsError:
            return False
        finally:
            own.unlink()
        return True
