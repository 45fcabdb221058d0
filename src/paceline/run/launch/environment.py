# SPDX-License-Identifier: BSD-3-Clause
"""The identity of a process in a run, which it gets through environment variables.

Only this module reads and writes these variables. The token is in a file that only its owner can
read; the environment has the path of that file, and the paths of TLS files.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import SpecError
from paceline.run.net.address import is_loopback
from paceline.run.net.tls import TlsFiles

__all__ = [
    "SERVER_LOST",
    "Identity",
    "adopt",
    "check_listening",
    "check_private",
    "identity",
    "large_pages",
    "threads",
    "variables",
]

SERVER_LOST = 75
"""Exit code of a head that has lost another server: start it again."""

TOKEN_MIN = 32  # characters; an eavesdropper can try short ones without asking the server

_ROLE = "PACELINE_ROLE"
_ADDRESS = "PACELINE_ADDRESS"
_TOKEN_FILE = "PACELINE_TOKEN_FILE"
_WORKER = "PACELINE_WORKER"
_RUN_DIR = "PACELINE_RUN_DIR"
_LISTENING_FD = "PACELINE_LISTENING_FD"
_SERVER = "PACELINE_SERVER"
_LISTEN = "PACELINE_LISTEN"
_WORKERS = "PACELINE_WORKERS"
_SEAT = "PACELINE_SEAT"
_TLS = {"cert": "PACELINE_TLS_CERT", "key": "PACELINE_TLS_KEY", "ca": "PACELINE_TLS_CA"}
_THREADS = "PACELINE_THREADS"
_LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # read by torch


@dataclass(frozen=True)
class Identity:
    """One process of a run."""

    address: str  # of the server; if there are several, of the head
    token_file: Path
    run_dir: Path
    worker: int | None  # None: it is a server
    listening_fd: int | None = None  # the server's socket; None: it opens one at its address
    tls: TlsFiles | None = None  # for TCP connections; None: they aren't encrypted
    server: int = 0  # which server it is, if it is one; 0: the head
    listen: str = "tcp:127.0.0.1:0"  # where a server that isn't the head, or an agent, listens
    workers: int | None = None  # of the run; None: the settings in the run's folder have it
    seat: bytes = b""  # for which a launcher has reserved the number of this worker
    is_agent: bool = False  # it serves the workers of a host, and is no server of the run

    @property
    def is_head(self) -> bool:
        """Whether it is the only server, or the first of several."""
        return self.worker is None and self.server == 0 and not self.is_agent

    @property
    def role(self) -> str:
        """What it does in the run."""
        if self.is_agent:
            return "agent"
        return "server" if self.worker is None else "worker"

    def token(self) -> str:
        """Read the token of the run; raise SpecError if it can't be read."""
        return _read_token(self.token_file)


def check_listening(address: str, token_file: Path) -> None:
    """Raise SpecError if a server must not listen at this address with this token.

    If other hosts can reach the address, the token must be long, and other users must not be able
    to read its file.
    """
    if is_loopback(address):
        return
    what = f"to listen at {address}, where other hosts can connect,"
    try:
        check_private(token_file)
    except OSError as error:
        raise SpecError(
            f"{what} the run needs a token, but {token_file} can't be used: {error.strerror}; "
            f"create one with: (umask 077; openssl rand -hex 32 > {token_file})"
        ) from None
    if len(_read_token(token_file)) < TOKEN_MIN:
        raise SpecError(f"{what} the token in {token_file} must have at least {TOKEN_MIN} letters")


def check_private(token_file: Path) -> None:
    """Raise SpecError if other users have access to this file, OSError if it can't be found."""
    found = token_file.stat()
    # A group may read a file of root: that is how containers get their secrets.
    others = stat.S_IRWXO if found.st_uid == 0 else stat.S_IRWXG | stat.S_IRWXO
    if found.st_mode & others:
        raise SpecError(
            f"only you may have access to the token in {token_file}, but its mode is "
            f"{stat.filemode(found.st_mode)}; use: chmod 600 {token_file}"
        )


def _read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"cannot read the token in {path}: {error}") from None
    if not token:
        raise SpecError(f"the token file {path} is empty; start the run again")
    return token


def variables(who: Identity) -> dict[str, str]:
    """Return the environment variables that give a process this identity."""
    found = {
        _ROLE: who.role,
        _ADDRESS: who.address,
        _TOKEN_FILE: str(who.token_file),
        _RUN_DIR: str(who.run_dir),
    }
    if who.worker is not None:
        found[_WORKER] = str(who.worker)
    if who.listening_fd is not None:
        found[_LISTENING_FD] = str(who.listening_fd)
    if who.worker is None and who.server:
        found |= {_SERVER: str(who.server), _LISTEN: who.listen}
    if who.is_agent:
        found[_LISTEN] = who.listen
    if who.workers is not None:
        found[_WORKERS] = str(who.workers)
    if who.seat:
        found[_SEAT] = who.seat.hex()
    if who.tls is not None:
        paths = {name: getattr(who.tls, field) for field, name in _TLS.items()}
        found |= {name: path for name, path in paths.items() if path}
    return found


def adopt(who: Identity, threads: int) -> None:
    """Give this process an identity, and a number of threads for its tensor operations."""
    others = _SERVER, _LISTEN, _WORKERS, _SEAT
    for name in (*_TLS.values(), *others):  # those of the launcher's own environment
        os.environ.pop(name, None)
    os.environ.update(variables(who))
    os.environ[_THREADS] = str(threads)


@contextmanager
def large_pages() -> Iterator[None]:
    """Make torch use large pages in processes started inside the context, unless the user chose."""
    if _LARGE_PAGES in os.environ:
        yield
        return
    os.environ[_LARGE_PAGES] = "1"
    try:
        yield
    finally:
        del os.environ[_LARGE_PAGES]


def threads() -> int | None:
    """Return how many threads this process should use; None: not specified."""
    text = os.environ.get(_THREADS, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def identity(environ: Mapping[str, str] | None = None) -> Identity | None:
    """Return the identity of this process; None: it was not started by a launcher."""
    environ = os.environ if environ is None else environ
    role = environ.get(_ROLE)
    if role is None:
        return None
    if role not in ("server", "worker", "agent"):
        raise SpecError(f"{_ROLE} must be 'server' or 'worker', got {role!r}")
    server = environ.get(_SERVER, "0") if role == "server" else "0"
    if not server.isdecimal():
        raise SpecError(f"{_SERVER} must be the number of a server, got {server!r}")
    needs_folder = role == "server" and int(server) == 0
    needed = [_ADDRESS, _TOKEN_FILE] + [_WORKER] * (role == "worker") + [_RUN_DIR] * needs_folder
    missing = [name for name in needed if not environ.get(name)]
    if missing:
        raise SpecError(f"{_ROLE} is {role!r}, but {', '.join(missing)} is not set")
    worker = listening_fd = None
    if role == "server" and environ.get(_LISTENING_FD, "").isdecimal():
        listening_fd = int(environ[_LISTENING_FD])
    if role == "worker":
        if not environ[_WORKER].isdecimal():
            raise SpecError(f"{_WORKER} must be the number of a worker, got {environ[_WORKER]!r}")
        worker = int(environ[_WORKER])
    workers = environ.get(_WORKERS, "")
    run_dir = Path(environ.get(_RUN_DIR, "."))
    paths = {field: environ.get(name, "") for field, name in _TLS.items()}
    tls = TlsFiles(**paths) if any(paths.values()) else None
    token_file = Path(environ[_TOKEN_FILE])
    return Identity(
        environ[_ADDRESS],
        token_file,
        run_dir,
        worker,
        listening_fd,
        tls,
        int(server),
        environ.get(_LISTEN, Identity.listen),
        int(workers) if workers.isdecimal() else None,
        _bytes(environ.get(_SEAT, "")),
        role == "agent",
    )


def _bytes(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise SpecError(f"{_SEAT} must be hexadecimal, got {text!r}") from None
