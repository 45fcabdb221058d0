# SPDX-License-Identifier: BSD-3-Clause
"""Run one process of a run on behalf of a launcher that is on another machine.

A host has a fork server of its own, so a process that is restarted finds torch loaded, and all that
the process has started ends with it. The launcher asks for reports again and again. The host keeps
what the process needs from the launcher's machine in a private folder: the token, the address of
the head, the settings.

Nothing here knows who calls it, from where. Every method may be called from any thread.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from signal import SIGKILL
from socket import socket
from threading import Lock
from time import monotonic
from typing import NamedTuple

import msgspec

from paceline.errors import PacelineError, SpecError
from paceline.run.cores import available_cores
from paceline.run.launch.child import ChildPipes, Task
from paceline.run.launch.environment import Identity, identity, variables
from paceline.run.launch.forkserver import ForkServer
from paceline.run.launch.stack_dump import Stack
from paceline.run.net.address import bind, of_socket
from paceline.run.system import SYSTEM

__all__ = ["Luggage", "RemoteHost", "Report", "Started"]

CHUNK = 1 << 16  # bytes of one stream in a report
ABANDONED_S = 10.0  # without a request from the launcher, a server away from it is killed


@dataclass(frozen=True)
class Luggage:
    """What the processes of a run need from the launcher's machine."""

    token: str
    settings: bytes  # the content of spec.json
    run_dir: Path  # servers need it itself, at the same path
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files that replace the script of this name, and what it needs next to it."""


class Started(NamedTuple):
    """The process was started, or couldn't be."""

    address: str = ""  # of a head
    error: str = ""  # "": it was started
    code: int = 0  # exit code for the error


class Report(NamedTuple):
    """What a process did since the last report."""

    streams: tuple[bytes, bytes, bytes]  # its standard output and error, and its failure
    code: int | None = None  # not None iff it has exited
    state: str = "S"  # as in `ProcessStatus`
    cpu_s: float = 0.0  # of the process and those that it has started
    stack: str = ""  # since it was asked for one


class RemoteHost:
    """One process, and its successors if it is restarted."""

    def __init__(
        self,
        luggage: Luggage,
        ip: str,
        threads: int | None,
        *,
        is_away: bool,
        forkserver: ForkServer | None = None,
    ) -> None:
        """`ip`: of this host. `threads`: for the process; None: a server, which gets all cores.

        `is_away`: the launcher is on another host, which may lose sight of this one. `forkserver`:
        one that is used by others, too; None: start one.
        """
        self._luggage, self._ip, self._is_away = luggage, ip, is_away
        self._threads = int(available_cores()) if threads is None else threads
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-"))
        self._lock = Lock()
        self._selector = DefaultSelector()
        self._forkserver = forkserver
        self._owns_forkserver = forkserver is None
        self._listening: socket | None = None  # a head's, across its restarts
        self._pid: int | None = None
        self._code: int | None = None  # of the last exit, until it is reported
        self._pipes: list[int] = []
        self._stack: Stack | None = None
        self._asked_at = monotonic()
        self._is_head = False
        for name, content in luggage.files.items():
            (self._folder / name).write_bytes(content)
        token = os.open(self._folder / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(token, "w", encoding="ascii") as file:
            file.write(luggage.token)
        (self._folder / "spec.json").write_bytes(luggage.settings)
        self._moved = -1
        self.move_head("", 0)

    def move_head(self, address: str, number: int) -> None:
        """Note where the head is after this number of moves; "": it is being moved."""
        with self._lock:
            if number <= self._moved:  # calls may overtake each other
                return
            self._moved = number
            self._write_address(address)

    def _write_address(self, address: str) -> None:
        new = self._folder / "address.new"
        new.write_text(address, encoding="ascii")
        new.replace(self._folder / "address")

    def start(self, task: Task) -> Started:
        """Start the process."""
        try:
            with self._lock:
                return self._start(task)
        except PacelineError as error:
            return Started(error=str(error), code=error.exit_code)
        except OSError as error:
            return Started(error=f"cannot start a process: {error}", code=PacelineError.exit_code)

    def report(self, wait_s: float) -> Report:
        """Wait for something to report, at most this long, and return it."""
        self._asked_at = monotonic()
        self._selector.select(wait_s)
        with self._lock:
            self._notice_exit()
            streams = [self._read(fd) for fd in self._pipes] or [b""] * 3
            report = self._status()._replace(streams=(streams[0], streams[1], streams[2]))
            if self._code is None or any(streams):
                return report
            code, self._code, self._pid = self._code, None, None
            self._close_pipes()
            return report._replace(code=code)

    def signal(self, number: int) -> None:
        """Send a signal to the process, if there is one."""
        with self._lock:
            if self._forkserver is not None and self._pid is not None and self._code is None:
                self._forkserver.signal(self._pid, number)

    def ask_stack(self) -> None:
        """Ask the process where it is; a later report has the answer."""
        with self._lock:
            if self._forkserver is not None and self._pid is not None:
                self._stack = self._forkserver.ask_stack(self._pid)

    def read_file(self, name: str) -> bytes | None:
        """Return a file that the process has left next to the files it was given."""
        path = self._folder / name
        return path.read_bytes() if path.exists() else None

    def kill_if_abandoned(self) -> None:
        """Kill a head that its launcher has lost, because there may be another by now."""
        if self._is_head and self._is_away and monotonic() > self._asked_at + ABANDONED_S:
            self.signal(SIGKILL)

    def close(self) -> None:
        """End the process, and remove what it was given."""
        with self._lock:
            if self._forkserver is not None:
                with suppress(KeyError, ValueError):
                    self._selector.unregister(self._forkserver)
                if self._pid is not None:
                    self._forkserver.signal(self._pid, SIGKILL)
                if self._owns_forkserver:
                    self._forkserver.close()
            self._close_pipes()
            if self._listening is not None:
                self._listening.close()
            self._forkserver = self._listening = None
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, task: Task) -> Started:
        assert self._pid is None
        who = identity(task.variables)
        assert who is not None
        if Path(task.script).name in self._luggage.files:
            task = msgspec.structs.replace(task, script=str(self._folder / Path(task.script).name))
        folder = task.folder if Path(task.folder).is_dir() else str(self._folder)
        if not Path(task.script).is_file():
            raise SpecError(
                f"there is no script {task.script} on {self._ip}; it must be at the same path on "
                "all nodes, for example on a file system that they share"
            )
        self._open_forkserver(Path(task.script))
        who = self._placed(who)
        task = msgspec.structs.replace(
            task, variables=variables(who), folder=folder, threads=self._threads
        )
        self._pid = self._fork(task)
        return Started(who.address if who.is_head else "")

    def _open_forkserver(self, script: Path) -> None:
        """Start the fork server, and listen to it, unless that was done before."""
        if self._forkserver is None:
            self._forkserver = ForkServer(script)
        self._forkserver.start()
        while not self._forkserver.wait_ready(1.0):
            pass
        with suppress(KeyError):  # it is registered
            self._selector.register(self._forkserver, EVENT_READ)

    def _placed(self, who: Identity) -> Identity:
        """Return the identity of a process, with what it has on this host."""
        has_run_dir = self._has_run_dir()
        address = who.address
        self._is_head = who.is_head
        if who.is_head:
            if not has_run_dir:
                raise SpecError(
                    f"the folder of the run, {self._luggage.run_dir}, isn't there on {self._ip}; "
                    "choose one with --out that is on a file system which all nodes for servers "
                    "share, or leave out --server-label"
                )
            if self._listening is None:
                self._listening = bind(f"tcp:{self._ip}:0")
            address = of_socket(self._listening, f"tcp:{self._ip}:0")
            self._write_address(address)
        return replace(
            who,
            address=address,
            token_file=self._folder / "token",
            run_dir=self._luggage.run_dir if has_run_dir else self._folder,
            listen=f"tcp:{self._ip}:0",
            address_file=self._folder / "address",
        )

    def _has_run_dir(self) -> bool:
        """Return whether the folder of the run is the same here as at the launcher."""
        with suppress(OSError):
            own = (self._luggage.run_dir / "token").read_text(encoding="ascii")
            return own == self._luggage.token
        return False

    def _fork(self, task: Task) -> int:
        assert self._forkserver is not None
        pairs = [os.pipe() for _ in range(3)]
        listening = self._listening if self._is_head else None
        try:
            pipes = ChildPipes(*(theirs for _, theirs in pairs))
            if listening is not None:
                pipes = msgspec.structs.replace(pipes, listening=listening.fileno())
                task = msgspec.structs.replace(task, gets_socket=True)
            pid = self._forkserver.fork(task, pipes)
        except BaseException:
            for ours, _ in pairs:
                os.close(ours)
            raise
        finally:
            for _, theirs in pairs:
                os.close(theirs)
        for fd, _ in pairs:
            os.set_blocking(fd, False)
            self._selector.register(fd, EVENT_READ)
            self._pipes.append(fd)
        return pid

    def _notice_exit(self) -> None:
        if self._forkserver is not None:
            for exited in self._forkserver.take_exited():
                if exited.pid == self._pid:
                    self._code = exited.code

    def _status(self) -> Report:
        if self._pid is None:
            return Report((b"", b"", b""))
        found = [SYSTEM.status(pid) for pid in (self._pid, *SYSTEM.descendants(self._pid))]
        state = found[0].state if found[0] is not None else "S"
        stack = "" if self._stack is None else self._stack.read()
        cpu_s = sum(status.cpu_s for status in found if status is not None)
        return Report((b"", b"", b""), None, state, cpu_s, stack)

    def _close_pipes(self) -> None:
        for fd in self._pipes:
            with suppress(KeyError):
                self._selector.unregister(fd)
            os.close(fd)
        self._pipes.clear()
        self._stack = None

    def _read(self, fd: int) -> bytes:
        """Return what there is to read; nothing if the other end is closed."""
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return b""
        if not data:
            with suppress(KeyError):
                self._selector.unregister(fd)
        return data
