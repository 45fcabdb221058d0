# SPDX-License-Identifier: BSD-3-Clause
"""The folder of a run on this machine: making it, holding it, and what the launcher writes there.

A run that is resumed has the folder that it had before; the address and the token are new.
"""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from paceline.errors import SpecError
from paceline.run.channel import new_token
from paceline.run.environment import Identity
from paceline.run.settings import Settings

__all__ = ["fill", "hold", "new_run_dir"]


def new_run_dir(wanted: Path | None, script: Path) -> Path:
    """Make the folder of a run: the one that is wanted, or the next free number."""
    try:
        if wanted is not None:
            wanted.mkdir(parents=True, exist_ok=True)
            if any(wanted.iterdir()):
                raise SpecError(
                    f"the folder {wanted} is not empty; give the run one of its own, or use "
                    "--resume if the run in it is to go on"
                )
            return wanted
        for number in count(1):
            path = Path("runs") / f"{script.stem}-{number}"
            with suppress(FileExistsError):
                path.mkdir(parents=True)
                return path
    except OSError as error:
        raise SpecError(f"cannot make a folder for the run: {error}") from None
    raise AssertionError


@contextmanager
def hold(run_dir: Path) -> Iterator[None]:
    """Be the only launcher in this folder; raises SpecError if there is one already."""
    try:
        fd = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise SpecError(f"cannot write to the folder of the run: {error}") from None
    try:
        with suppress(OSError):  # of a file system that knows no locks
            _lock(fd, run_dir)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, run_dir: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SpecError(
            f"a run is going on in {run_dir}; wait for its end, or stop it before you resume it"
        ) from None


def fill(run_dir: Path, settings: Settings) -> Identity:
    """Write what the processes of a run must know, and return who the server is."""
    settings.write(run_dir / "spec.json")
    address = f"unix:@paceline-{secrets.token_hex(16)}"
    token_file = run_dir / "token"
    try:
        token_file.touch(mode=0o600)
        token_file.write_text(new_token(), encoding="ascii")
        (run_dir / "address").write_text(address, encoding="ascii")
        for partial in (run_dir / "checkpoints").glob("*.partial"):  # of a run that was killed
            partial.unlink()
    except OSError as error:
        raise SpecError(f"cannot write to the folder of the run: {error}") from None
    return Identity(address, token_file, run_dir, None)
