# SPDX-License-Identifier: BSD-3-Clause
"""Processes that torchrun has started: each of them is a worker of one run.

Theory of operation
    worker 0                        the store of torchrun               other workers
    starts the server
    address and token        ->     paceline/server             ->      connect to the server

    The number of a worker is its RANK. The server is a child of worker 0, on its host. It gets its
    options from the environment, and ends with worker 0.

    If one of its processes fails, torchrun starts all those of the node again, and sometimes those
    of the other nodes. A new worker 0 finds in the store what the last one has written, and resumes
    the run in its folder. Workers of other nodes wait for that: they look into the store again
    whenever they can't connect.
"""

import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from paceline.errors import PeerLost, SpecError
from paceline.run.launch.environment import Identity, variables
from paceline.run.launch.outer_launcher import given_token_file
from paceline.run.launch.script_end import ScriptEnd
from paceline.run.launch.serving_child import ServingChild
from paceline.run.launch.torchrun_server import ServerPlace, StoredServer, start_server
from paceline.run.net.tls import TlsFiles

__all__ = ["Place", "TorchrunWorker", "join_torchrun"]

JOIN_S = 600.0  # long, because the script of worker 0 may load a large data set before it joins
REACH_S = 60.0  # for the store to answer

_RUN_ID = "TORCHELASTIC_RUN_ID"
_NUMBERS = {
    "RANK": "rank",
    "WORLD_SIZE": "workers",
    "LOCAL_WORLD_SIZE": "workers_here",
    "MASTER_PORT": "port",
    "GROUP_RANK": "host_number",
}
_STALE = f"{_RUN_ID} is set, as in a process that torchrun has started"
_HOW_TO_RUN_ALONE = f"to run the script by itself: env -u {_RUN_ID} python ..."

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of this process among those that torchrun has started."""

    rank: int
    workers: int
    workers_here: int  # on this host
    host_number: int  # 0: the host of worker 0
    host: str  # of the store
    port: int
    shares_store: bool = True  # whether torchrun's own store is used
    may_restart: bool = False  # whether torchrun will start all processes again if one fails

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> "Place | None":
        """Return the place that the environment describes; None: torchrun hasn't started us."""
        if _RUN_ID not in environ:
            return None
        if missing := [name for name in (*_NUMBERS, "MASTER_ADDR") if not environ.get(name)]:
            raise SpecError(f"{_STALE}, but {', '.join(missing)} is not set; {_HOW_TO_RUN_ALONE}")
        for name in _NUMBERS:
            if not environ[name].isdecimal():
                raise SpecError(f"{name} must be a number, got {environ[name]!r}")
        restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "")
        most = environ.get("TORCHELASTIC_MAX_RESTARTS", "")
        return cls(
            host=environ["MASTER_ADDR"],
            shares_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            may_restart=restarts.isdecimal() and most.isdecimal() and int(restarts) < int(most),
            **{field: int(environ[name]) for name, field in _NUMBERS.items()},
        )


def join_torchrun() -> "TorchrunWorker | None":
    """Return this worker if torchrun has started this process; worker 0 starts the server.

    Raises SpecError if the environment is that of torchrun, but torchrun isn't there.
    """
    place = Place.read(os.environ)
    if place is None:
        return None
    command = [_script(), *sys.argv[1:]]
    server_place = ServerPlace(
        workers=place.workers,
        own_host=_own_host(place),
        known_host=place.host,
        is_only_host=place.workers_here == place.workers,
        may_restart=place.may_restart,
    )
    store = _connect(place)
    child = start_server(server_place, store, command) if place.rank == 0 else None
    worker = TorchrunWorker(place, store, child)
    os.environ.update(variables(worker.identity))  # for processes that the script starts
    return worker


class TorchrunWorker:
    """This process as a worker of the run."""

    def __init__(self, place: Place, store: Store, child: ServingChild | None) -> None:
        """`child`: the server, if this is worker 0. Waits until the server's address is known."""
        self._place = place
        self._store = store
        self._child = child
        self._token = ""
        self._token_file = given_token_file()
        self.identity = self._find()

    def renewing(
        self, make_dialer: Callable[[Identity, T], Callable[[], S]]
    ) -> Callable[[Identity, T], Callable[[], S]]:
        """Return a maker of dialers that look for the server again when they can't reach it."""

        def make(who: Identity, spec: T) -> Callable[[], S]:
            dial = make_dialer(who, spec)

            def dial_or_renew() -> S:
                nonlocal dial
                try:
                    return dial()
                except PeerLost:
                    dial = make_dialer(self._find_again(), spec)
                    raise

            return dial_or_renew

        return make

    def watch_end(self, disconnect: Callable[[], None]) -> None:
        """Do what is due when the script ends; `disconnect` leaves the run."""

        def finish(has_failed: bool) -> int:
            disconnect()
            if self._child is None:
                return 0
            return self._child.stop() if has_failed else self._child.wait()

        if self._child is not None:
            self._child.stop_first(disconnect)
        ScriptEnd(sys.argv[0], finish).watch()

    def _find(self) -> Identity:
        """Return who this worker is and where its server; wait until worker 0 tells us that."""
        try:
            server = StoredServer.wait(self._store)
        except RuntimeError as error:
            raise PeerLost(
                f"worker {self._place.rank} has heard nothing from worker 0, which starts the "
                f"server; do all processes call paceline.join()? ({_first_line(error)})"
            ) from None
        if server.is_over:
            print(f"the run in {server.run_dir} has already finished", file=sys.stderr, flush=True)
            raise SystemExit(0)
        run_dir = Path(server.run_dir)
        return Identity(
            server.address if self._place.host_number else server.address_there,
            self._file_of(server.token),
            run_dir if _is_here(run_dir, server.address) else Path(sys.argv[0]).parent,
            self._place.rank,
            tls=server.tls and TlsFiles(*server.tls),
            workers=self._place.workers,
        )

    def _find_again(self) -> Identity:
        if self._child is not None and self._child.has_exited:
            raise SystemExit(self._child.wait() or 1)
        with suppress(PeerLost):  # torchrun has ended on the first node; the server may still run
            self.identity = self._find()
        return self.identity

    def _file_of(self, token: str) -> Path:
        """Return a file with the token: one in memory, so that it is never left behind."""
        if token and token != self._token:
            fd = os.memfd_create("paceline-token")
            os.fchmod(fd, 0o600)
            os.write(fd, token.encode("ascii"))
            self._token, self._token_file = token, Path(f"/proc/{os.getpid()}/fd/{fd}")
        if self._token_file is None:
            raise SpecError(
                f"worker 0 was given PACELINE_TOKEN_FILE, but worker {self._place.rank} was not; "
                "give a copy of the file to all processes"
            )
        return self._token_file


def _own_host(place: Place) -> str:
    """Return the address of this host in the network of the store.

    Raises SpecError if there is no store: torchrun's own one exists before its workers do.
    """
    if not place.shares_store:
        return place.host
    try:
        with socket.create_connection((place.host, place.port), REACH_S) as sock:
            host = str(sock.getsockname()[0])
    except OSError as error:
        raise SpecError(
            f"{_STALE}, but it can't be reached at {place.host}:{place.port} (MASTER_ADDR and "
            f"MASTER_PORT): {error.strerror or error}; {_HOW_TO_RUN_ALONE}"
        ) from None
    return f"[{host}]" if ":" in host else host


def _connect(place: Place) -> Store:
    """Return the store that all processes of torchrun share."""
    try:
        found = rendezvous("env://", timeout=timedelta(seconds=JOIN_S))
        store: Store = next(found)[0]
    except (RuntimeError, ValueError) as error:
        raise PeerLost(
            f"no answer from torchrun at {place.host}:{place.port}: {_first_line(error)}"
        ) from None
    return store


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _script() -> str:
    """Return the path of this process's script, as it was given."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or getattr(main, "__spec__", None) is not None:
        raise SpecError("the server executes your script, too: start it by its file, without -m")
    given = Path(sys.argv[0])
    return str(given if given.is_file() and given.samefile(path) else path)


def _is_here(run_dir: Path, address: str) -> bool:
    """Return whether this is the folder of the run with this address, and not of another host."""
    with suppress(OSError):
        text = (run_dir / "address").read_text(encoding="ascii")
        return text.rpartition(":")[2] == address.rpartition(":")[2]
    return False
