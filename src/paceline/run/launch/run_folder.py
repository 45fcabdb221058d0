# SPDX-License-Identifier: BSD-3-Clause
"""The folder of a run on this machine: making it, holding it, and what the launcher writes there.

A run that is resumed has the folder that it had before; the address and the token are new. Its
settings are what they were until the server has taken the run up with others.
"""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from paceline.errors import SpecError
from paceline.run.launch.environment import Identity
from paceline.run.net.channel import new_token
from paceline.run.settings import Settings

__all__ = [
    "commit_spec",
    "discard_pending_spec",
    "finished_at",
    "is_locked",
    "is_resumed",
    "lock",
    "mark_finished",
    "new_run_dir",
    "settings_of",
    "write_run_files",
]

SPEC = "spec.json"
NEXT_SPEC = "spec.next.json"  # of a run that is resumed, until the server has taken it up
FINISHED = "finished"


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
def lock(run_dir: Path) -> Iterator[None]:
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


def is_locked(run_dir: Path) -> bool:
    """Whether there is a launcher in this folder."""
    try:
        with (run_dir / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it has no lock, or is on a file system that knows none
        return False
    return False


def write_run_files(run_dir: Path, settings: Settings) -> Identity:
    """Write what the processes of a run must know, and return who the server is."""
    settings.write(run_dir / (NEXT_SPEC if (run_dir / SPEC).exists() else SPEC))
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


def settings_of(run_dir: Path) -> Settings:
    """What the run in this folder is told, which nobody may have accepted yet."""
    newer = run_dir / NEXT_SPEC
    return Settings.read(newer if newer.exists() else run_dir / SPEC)


def is_resumed(run_dir: Path) -> bool:
    """Whether somebody has resumed the run, and no server has taken it up yet."""
    return (run_dir / NEXT_SPEC).exists()


def commit_spec(run_dir: Path) -> None:
    """The server has taken the run up: from now on these are the settings of the run."""
    try:
        (run_dir / FINISHED).unlink(missing_ok=True)
        with suppress(FileNotFoundError):  # of a new run; or this is not its first server
            (run_dir / NEXT_SPEC).replace(run_dir / SPEC)
    except OSError as error:
        raise SpecError(f"cannot write {run_dir / SPEC}: {error.strerror}") from None


def discard_pending_spec(run_dir: Path) -> None:
    """Nobody runs here any more: settings that nobody has accepted are forgotten."""
    with suppress(OSError):
        (run_dir / NEXT_SPEC).unlink(missing_ok=True)


def mark_finished(run_dir: Path, version: int) -> None:
    """Nothing is left to do here, for whoever resumes the run; a full disk does not matter."""
    with suppress(OSError):
        (run_dir / FINISHED).write_text(f"{version}\n", encoding="ascii")


def finished_at(run_dir: Path) -> int | None:
    """How many updates the run has made that has come to its end here; None: there is none."""
    try:
        return int((run_dir / FINISHED).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
