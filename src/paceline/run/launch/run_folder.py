# SPDX-License-Identifier: BSD-3-Clause
"""The folder of a run on this machine: create it, lock it, and write the launcher's files to it.

A resumed run keeps its folder, with a new address and token. New settings are pending until the
server has accepted them, so a resume that fails leaves the old settings in place.
"""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import msgspec

from paceline.errors import SpecError
from paceline.files import DISK, Disk, atomic_write
from paceline.run.launch.environment import Identity
from paceline.run.net.handshake import new_token
from paceline.run.net.tls import TlsFiles
from paceline.run.settings import Settings

__all__ = [
    "commit_spec",
    "discard_pending_spec",
    "finished_at",
    "is_locked",
    "is_resumed",
    "lock",
    "mark_finished",
    "new_address",
    "new_run_dir",
    "script_folders",
    "settings_of",
    "tls_files",
    "write_run_files",
    "write_token",
]

SPEC = "spec.json"
NEXT_SPEC = "spec.next.json"  # the pending settings of a resumed run
FINISHED = "finished"


def new_run_dir(wanted: Path | None, script: Path) -> Path:
    """Create the folder of a run: the given one, or runs/SCRIPT-N with the next free number."""
    try:
        if wanted is not None:
            wanted.mkdir(parents=True, exist_ok=True)
            if any(wanted.iterdir()):
                raise SpecError(
                    f"the folder {wanted} is not empty; choose another one, or use --resume to "
                    "continue the run in it"
                )
            return wanted
        for number in count(1):
            path = Path("runs") / f"{script.stem}-{number}"
            with suppress(FileExistsError):
                path.mkdir(parents=True)
                return path
    except OSError as error:
        raise SpecError(f"cannot create the run folder: {error}") from None
    raise AssertionError


@contextmanager
def lock(run_dir: Path) -> Iterator[None]:
    """Hold the lock of this folder; raise SpecError if another launcher holds it."""
    try:
        fd = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise SpecError(f"cannot write to the run folder: {error}") from None
    try:
        with suppress(OSError):  # the file system has no locks
            _lock(fd, run_dir)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, run_dir: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SpecError(
            f"another run is active in {run_dir}; wait until it ends, or stop it before resuming it"
        ) from None


def is_locked(run_dir: Path) -> bool:
    """Return whether a launcher is active in this folder."""
    try:
        with (run_dir / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no lock file, or the file system has no locks
        return False
    return False


def new_address(settings: Settings) -> str:
    """Return an address for the server of a run on this machine; for TCP, with any free port."""
    if settings.transport == "tcp" or settings.servers > 1:
        return "tcp:127.0.0.1:0"
    return f"unix:@paceline-{secrets.token_hex(16)}"


def tls_files(settings: Settings) -> TlsFiles | None:
    """Return the TLS files of a run; None: its connections aren't encrypted."""
    if not settings.tls_cert:
        return None
    return TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_ca)


def write_run_files(
    run_dir: Path,
    settings: Settings,
    address: str,
    token_file: Path | None = None,
    disk: Disk = DISK,
) -> Identity:
    """Write what the processes of a run need; return the identity of the server.

    `token_file`: an existing one; None: make a new token.
    """
    settings.write(run_dir / (NEXT_SPEC if (run_dir / SPEC).exists() else SPEC), disk)
    try:
        if token_file is None:
            token_file = run_dir / "token"
            disk.unlink(token_file)  # others may have permission to read an older one
            write_token(token_file, disk)
        with disk.open(run_dir / "address", "wb") as file:
            file.write(address.encode("ascii"))
        for unfinished in (run_dir / "checkpoints").glob("*.partial"):  # of a killed run
            disk.unlink(unfinished)
    except OSError as error:
        raise SpecError(f"cannot write to the run folder: {error}") from None
    return Identity(address, token_file, run_dir, None, tls=tls_files(settings))


def write_token(path: Path, disk: Disk = DISK) -> None:
    """Write a new token to a file that doesn't exist yet and that only its owner can read."""
    with disk.open(path, "xb", permissions=0o600) as file:
        file.write(new_token().encode("ascii"))


def settings_of(run_dir: Path) -> Settings:
    """Return the settings of the run in this folder, pending ones if there are any."""
    newer = run_dir / NEXT_SPEC
    if newer.exists():
        try:
            return Settings.read(newer)
        except SpecError:
            if newer.exists():  # otherwise the server has just accepted them
                raise
    return Settings.read(run_dir / SPEC)


class _Origin(msgspec.Struct):
    """The settings that say where the modules of a run are; the others may be invalid."""

    script: str = ""
    folder: str = ""


def script_folders(run_dir: Path) -> list[Path]:
    """Return the folders with the modules of a run's script; none if it isn't the folder of a run.

    These are the folder of the script and its working directory.
    """
    try:
        found = msgspec.json.decode((run_dir / SPEC).read_bytes(), type=_Origin)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return []
    return [Path(found.script).parent, Path(found.folder)]


def is_resumed(run_dir: Path) -> bool:
    """Return whether the run was resumed and no server has accepted its settings yet."""
    return (run_dir / NEXT_SPEC).exists()


def commit_spec(run_dir: Path, disk: Disk = DISK) -> None:
    """Make the pending settings those of the run, because its server has accepted them."""
    try:
        disk.unlink(run_dir / FINISHED)
        with suppress(FileNotFoundError):  # a new run, or a restarted server
            disk.replace(run_dir / NEXT_SPEC, run_dir / SPEC)
    except OSError as error:
        raise SpecError(f"cannot write {run_dir / SPEC}: {error.strerror}") from None


def discard_pending_spec(run_dir: Path, disk: Disk = DISK) -> None:
    """Remove settings that no server has accepted; the run is over."""
    with suppress(OSError):
        disk.unlink(run_dir / NEXT_SPEC)


def mark_finished(run_dir: Path, version: int, disk: Disk = DISK) -> None:
    """Note that the run is complete, so that a resume has nothing to do; ignore a full disk."""
    with suppress(OSError), atomic_write(run_dir / FINISHED, disk=disk) as file:
        file.write(f"{version}\n".encode("ascii"))


def finished_at(run_dir: Path) -> int | None:
    """Return the number of updates of the completed run in this folder; None: it isn't complete."""
    try:
        return int((run_dir / FINISHED).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
