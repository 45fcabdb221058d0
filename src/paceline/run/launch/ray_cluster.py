# SPDX-License-Identifier: BSD-3-Clause
"""Start the processes of a run in actors on a Ray cluster, and notice when they exit.

Ray places, the supervisor restarts. Each process has a placement group of one bundle, so a run
begins with the nodes that there are, and Ray finds a place for the rest when nodes join. Ray also
finds a new place when a node is lost. An actor isn't restarted by Ray itself, because the
supervisor decides whether and when that makes sense; then the process gets a new actor in its
placement group.

All calls are asynchronous. Their results are handled in `take_exited`, on the launcher's thread.
Parameters and gradients don't travel through Ray.
"""

import os
import signal
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.errors import PacelineError
from paceline.run.launch.child import ChildPipes, Task, encode_failure
from paceline.run.launch.environment import Identity, identity
from paceline.run.launch.fork_loop import ChildExited
from paceline.run.launch.ray_actor import RayActor
from paceline.run.launch.ray_placement import Placement
from paceline.run.launch.remote_host import Luggage, Report, Started
from paceline.run.launch.run_folder import settings_of
from paceline.run.launch.stack_dump import Stack
from paceline.run.process_status import ProcessStatus
from paceline.run.system import SYSTEM, System

__all__ = ["RayCluster"]

REPORT_S = 0.5  # how long an actor waits for something to report
PLACE_S = 10.0  # without a place, the run begins without a worker, and the user is told
THREADS = 8  # for the methods of an actor
CLOSE_S = 5.0  # for the actors to remove what they were given

NEW = ProcessStatus("S", 0.0)


@dataclass(eq=False)
class _Process:
    """A process in an actor."""

    pid: int
    key: str  # the same across restarts
    who: Identity
    task: Task
    pipes: list[int]  # our ends, which are those of the process on its own machine
    began: float
    unwritten: list[bytearray] = field(default_factory=lambda: [bytearray() for _ in range(3)])
    is_placed: bool = False
    is_started: bool = False
    is_asked: bool = False  # for a report
    exit: ChildExited | None = None  # until all of its output is passed on
    status: ProcessStatus = NEW
    stack: str = ""


@dataclass(frozen=True)
class _RemoteStack(Stack):
    process: _Process

    def read(self) -> str:
        return self.process.stack


class RayCluster:
    """Has the interface of `spawner.RemoteSpawner`. This process must be connected to Ray."""

    def __init__(self, placement: Placement, files: dict[str, bytes] | None = None) -> None:
        """`files`: see `Luggage`."""
        self._placement = placement
        self._files = files or {}
        self._node = ray.get_runtime_context().get_node_id()
        self._luggage: Luggage | None = None
        self._say: Callable[[str], None] = print
        self._now = SYSTEM.monotonic
        self._address, self._moves = "", 0
        self._events: deque[tuple[Callable[[Any], None], Future[Any]]] = deque()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._processes: dict[int, _Process] = {}
        self._started = 0
        self._groups: dict[str, Any] = {}
        self._actors: dict[str, Any] = {}
        self._ips: dict[str, tuple[str, str]] = {}  # node and IP address of each actor
        self._is_wait_said = False

    def serve(self, head: Identity, say: Callable[[str], None]) -> Identity:
        """Prepare to start the processes of this run; return the identity of its head."""
        settings = msgspec.json.encode(settings_of(head.run_dir))
        self._luggage = Luggage(head.token(), settings, head.run_dir, self._files)
        self._say = say
        self._address = ""
        return replace(head, address_file=head.run_dir / "address")

    def system(self, system: System) -> System:
        """Return a system that knows what these processes do."""
        return replace(
            system,
            status=self._status,
            is_stopped=lambda pid: (found := self._status(pid)) is not None and found.is_stopped,
            descendants=lambda _: [],
        )

    def start(self) -> None:
        """Do nothing: Ray is ready."""

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is an event."""
        return self._woken.fileno()

    def wait_ready(self, seconds: float) -> bool:
        """Return True: Ray is ready."""
        del seconds
        return True

    def fork(self, task: Task, pipes: ChildPipes) -> int:
        """Start a process, as soon as a node has room for it; return its number."""
        who = identity(task.variables)
        assert who is not None
        self._started += 1
        key = f"server {who.server}" if who.worker is None else f"worker {who.worker}"
        ours = [os.dup(fd) for fd in (pipes.out, pipes.err, pipes.failure)]
        for fd in ours:
            os.set_blocking(fd, False)
        process = _Process(self._started, key, who, task, ours, self._now())
        self._processes[process.pid] = process
        if key not in self._actors:
            self._actors[key] = self._new_actor(key, who)
        self._call(process, "where", self._on_placed)
        return process.pid

    def take_exited(self) -> list[ChildExited]:
        """Handle what the actors have answered; return the processes that exited."""
        with suppress(BlockingIOError):
            self._woken.recv(4096)
        while self._events:
            handle, future = self._events.popleft()
            handle(future)
        found = []
        for process in list(self._processes.values()):
            self._write(process)
            self._ask(process)
            if process.exit is not None and not any(process.unwritten):
                found.append(process.exit)
                self._forget(process)
        self._say_waiting()
        return found

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a process; one that waits for a node ends with any signal."""
        process = self._processes.get(pid)
        if process is None or process.exit is not None:
            return
        if process.is_started:
            self._actors[process.key].signal.remote(number)
        else:
            self._drop_actor(process.key)
            process.exit = ChildExited(pid, -number)

    def ask_stack(self, pid: int) -> Stack | None:
        """Ask a process where it is; None: it hasn't started."""
        process = self._processes.get(pid)
        if process is None or not process.is_started:
            return None
        process.stack = ""
        self._actors[process.key].ask_stack.remote()
        return _RemoteStack(process)

    def waiting(self) -> dict[int, str]:
        """Return the processes for which no node has had room for a while, and why."""
        overdue = [
            process
            for process in self._processes.values()
            if not process.is_placed and self._now() >= process.began + PLACE_S
        ]
        return {process.pid: self._placement.describe_lack(process.who) for process in overdue}

    def read_file(self, key: str, name: str) -> bytes | None:
        """Return a file that a process has left next to the files it was given."""
        if key not in self._actors:
            return None
        with suppress(ray.exceptions.RayError):
            found: bytes | None = ray.get(self._actors[key].read_file.remote(name))
            return found
        return None

    def close(self) -> None:
        """End all processes, and give their places back."""
        closed = [actor.close.remote() for key, actor in self._actors.items() if key in self._ips]
        if closed:
            ray.wait(closed, num_returns=len(closed), timeout=CLOSE_S)
        for key in list(self._actors):
            self._drop_actor(key)
        for group in self._groups.values():
            remove_placement_group(group)
        self._groups.clear()
        for process in list(self._processes.values()):
            self._forget(process)
        self._waker.close()
        self._woken.close()

    # ------------------------------------------------------------------------------- the actors

    def _new_actor(self, key: str, who: Identity) -> Any:
        bundle = self._placement.bundle(who)
        if key not in self._groups:
            self._groups[key] = placement_group(
                [bundle],
                strategy="SPREAD",
                bundle_label_selector=[self._placement.selector(who, self._node)],
            )
        options = RayActor.options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            max_restarts=0,  # the supervisor decides
            max_concurrency=THREADS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._groups[key], 0),
        )
        return options.remote(self._luggage, self._placement.threads(who), self._node)

    def _drop_actor(self, key: str) -> None:
        self._ips.pop(key, None)
        if (actor := self._actors.pop(key, None)) is not None:
            ray.kill(actor)

    def _call(
        self,
        process: _Process,
        method: str,
        handle: Callable[[_Process, Any], None],
        *arguments: Any,
    ) -> None:
        """Call a method of the actor of a process, and handle its result later."""

        def on_done(future: Future[Any]) -> None:  # on a thread of Ray
            self._events.append((on_event, future))
            with suppress(OSError):  # it is full, or closed
                self._waker.send(b"!")

        def on_event(future: Future[Any]) -> None:
            if self._processes.get(process.pid) is not process or process.exit is not None:
                return
            if (error := future.exception()) is not None:
                self._on_lost(process, error)
            else:
                handle(process, future.result())

        actor = self._actors[process.key]
        getattr(actor, method).remote(*arguments).future().add_done_callback(on_done)

    def _on_placed(self, process: _Process, where: tuple[str, str]) -> None:
        process.is_placed = True
        self._ips[process.key] = where
        if process.who.is_head:
            self._call(process, "start", self._on_started, process.task)
        else:  # it must know where the head is
            self._call(process, "move_head", self._on_told, self._address, self._moves)

    def _on_told(self, process: _Process, _: None) -> None:
        self._call(process, "start", self._on_started, process.task)

    def _on_started(self, process: _Process, started: Started) -> None:
        if started.error:
            process.unwritten[2] += encode_failure(f"{started.error}\n", started.code)
            process.exit = ChildExited(process.pid, started.code)
            return
        process.is_started = True
        if process.who.is_head:
            self._move_head(started.address)

    def _on_report(self, process: _Process, report: Report) -> None:
        for unwritten, data in zip(process.unwritten, report.streams, strict=True):
            unwritten.extend(data)
        process.status = ProcessStatus(report.state, report.cpu_s)
        process.stack = report.stack or process.stack
        process.is_asked = False
        if report.code is not None:
            process.exit = ChildExited(process.pid, report.code)

    def _ask(self, process: _Process) -> None:
        """Ask for a report, when all of the last one is passed on."""
        is_due = process.is_started and not process.is_asked and process.exit is None
        if is_due and not any(process.unwritten):
            process.is_asked = True
            self._call(process, "report", self._on_report, REPORT_S)

    def _on_lost(self, process: _Process, error: BaseException) -> None:
        node, ip = self._ips.get(process.key, ("", ""))
        is_node_alive = any(found["NodeID"] == node and found["Alive"] for found in ray.nodes())
        self._drop_actor(process.key)
        if isinstance(error, ray.exceptions.RayTaskError):
            why = f"failed in its Ray actor: {error.cause}"
        elif node and not is_node_alive:
            why = f"was lost with its node {ip}"
        elif isinstance(error, ray.exceptions.ActorUnavailableError):
            why = f"was lost: its node {ip} doesn't answer"
        else:
            where = f" on {ip}" if ip else ""
            why = f"was lost with its Ray actor{where}: {str(error).splitlines()[0]}"
        process.exit = ChildExited(process.pid, -signal.SIGKILL, why)
        if process.who.is_head:
            self._move_head("")

    def _move_head(self, address: str) -> None:
        """Tell all others where the head is."""
        assert self._luggage is not None
        if address == self._address:
            return
        self._address = address
        self._moves += 1
        path = self._luggage.run_dir / "address"
        new = Path(f"{path}.new")
        try:
            new.write_text(address, encoding="ascii")
            new.replace(path)
        except OSError as error:
            raise PacelineError(f"cannot write {path}: {error.strerror}") from None
        for key, actor in self._actors.items():
            if key in self._ips and key != "server 0":
                actor.move_head.remote(address, self._moves)

    # ---------------------------------------------------------------------------- the processes

    def _write(self, process: _Process) -> None:
        """Pass on as much of the output as the launcher's pipes take."""
        for fd, unwritten in zip(process.pipes, process.unwritten, strict=True):
            with suppress(BlockingIOError):
                while unwritten:
                    del unwritten[: os.write(fd, unwritten)]

    def _forget(self, process: _Process) -> None:
        for fd in process.pipes:
            os.close(fd)
        del self._processes[process.pid]

    def _status(self, pid: int) -> ProcessStatus | None:
        process = self._processes.get(pid)
        return None if process is None else process.status

    def _say_waiting(self) -> None:
        """Say once that a server has no place; the server itself says it of workers."""
        for process in self._processes.values():
            is_overdue = self._now() >= process.began + PLACE_S and not process.is_placed
            if is_overdue and process.who.worker is None and not self._is_wait_said:
                self._is_wait_said = True
                self._say(f"{process.key}: {self._placement.describe_lack(process.who)}")
