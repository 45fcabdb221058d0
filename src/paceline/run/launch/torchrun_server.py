# SPDX-License-Identifier: BSD-3-Clause
"""The server of a run whose workers torchrun has started: worker 0 starts it.

Its address and token are in torchrun's store. They are still there when torchrun has started its
processes again: the new worker 0 resumes the run, at the same address if it is free.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from torch.distributed.distributed_c10d import Store

from paceline.errors import SpecError
from paceline.run.launch.environment import Identity
from paceline.run.launch.outer_launcher import given_options, given_token_file
from paceline.run.launch.serving_child import ServingChild
from paceline.run.net.address import bind, is_loopback
from paceline.run.system import SYSTEM, System

__all__ = ["ServerPlace", "StoredServer", "start_server"]

KEY = "paceline/server"
FREE_S = 10.0  # for the processes of a killed server to exit


class StoredServer(msgspec.Struct, frozen=True):
    """What worker 0 tells the others about the server."""

    address: str = ""
    address_there: str = ""  # on its own host; only at this address can memory be shared
    token: str = ""  # "": all processes were given a file with it
    run_dir: str = ""
    tls: tuple[str, str, str] | None = None  # paths of the server's files
    is_over: bool = False  # the run is finished, so there is no server any more

    def write(self, store: Store) -> None:
        """Tell the others."""
        store.set(KEY, msgspec.json.encode(self).decode())

    @classmethod
    def wait(cls, store: Store) -> "StoredServer":
        """Wait until worker 0 has told us; raises RuntimeError if it never does."""
        return msgspec.json.decode(store.get(KEY), type=cls)

    @classmethod
    def find(cls, store: Store) -> "StoredServer | None":
        """Return what a worker 0 has told us, if there was one."""
        return cls.wait(store) if store.check([KEY]) else None


@dataclass(frozen=True, kw_only=True)
class ServerPlace:
    """Where the server runs."""

    workers: int
    own_host: str  # the address of this host in the network of the workers
    known_host: str  # how torchrun's workers find the first host
    is_only_host: bool  # whether all workers are on it
    may_restart: bool  # whether torchrun will start all processes again if one fails

    @property
    def host(self) -> str:
        """Where to listen."""
        if self.is_only_host:
            return "127.0.0.1"
        # The name of a host is often its own loopback address, while others find another one.
        return "0.0.0.0" if is_loopback(f"tcp:{self.own_host}:0") else self.own_host


def start_server(
    place: ServerPlace, store: Store, command: Sequence[str], system: System = SYSTEM
) -> ServingChild:
    """Start the server, or resume the run that an earlier worker 0 has begun; tell the others.

    `command`: the script and its arguments. Raises SystemExit if the server can't be started,
    because the options are wrong, which was said, or if the run has already finished.
    """
    before, token_file = StoredServer.find(store), given_token_file()
    words = ["--workers", str(place.workers)]
    if token_file is not None:
        words += ["--token-file", str(token_file)]
    if before is None:
        words += ["--listen", f"{place.host}:0", *_checked(given_options()), "--", *command]
    else:
        words += _words_to_resume(before, place.host, system)
    child = ServingChild(words, saves=not place.may_restart)
    listening = child.wait_listening()
    if listening is None:
        code = child.wait()
        if code == 0:
            run_dir = before.run_dir if before else ""
            StoredServer(is_over=True, run_dir=run_dir).write(store)
        raise SystemExit(code)
    _stored(listening, place, has_token_file=token_file is not None).write(store)
    return child


def _stored(listening: Identity, place: ServerPlace, *, has_token_file: bool) -> StoredServer:
    address, tls = listening.address, listening.tls
    if address.startswith("tcp:0.0.0.0:"):
        address = address.replace("0.0.0.0", place.known_host, 1)
    return StoredServer(
        address=address,
        address_there=listening.address,
        token="" if has_token_file else listening.token(),
        run_dir=str(listening.run_dir),
        tls=None if tls is None else (tls.cert, tls.key, tls.ca),
    )


def _checked(options: list[str]) -> list[str]:
    """Return the options of the run; raise SpecError if torchrun decides one of them."""
    for word in options:
        if word.startswith("--workers") or (word.startswith("-w") and not word.startswith("--")):
            raise SpecError(
                "PACELINE_OPTIONS must not have --workers: each process that torchrun starts "
                "(--nproc-per-node, --nnodes) is a worker"
            )
    return options


def _words_to_resume(before: StoredServer, host: str, system: System) -> list[str]:
    """Return the options of a run that goes on: all others are in its folder."""
    if not (Path(before.run_dir) / "spec.json").exists():
        raise SpecError(
            f"the folder of the run, {before.run_dir}, is not on this host: worker 0 was on "
            "another one; set PACELINE_OPTIONS to --out and a folder that all hosts share"
        )
    port = before.address.rpartition(":")[2]
    until = system.monotonic() + FREE_S
    while not _is_free(host, port):
        if system.monotonic() > until:
            port = "0"  # the others look for the new one
            break
        system.sleep(0.05)
    return ["--listen", f"{host}:{port}", "--resume", before.run_dir]


def _is_free(host: str, port: str) -> bool:
    try:
        bind(f"tcp:{host}:{port}").close()
    except SpecError:
        return False
    return True
