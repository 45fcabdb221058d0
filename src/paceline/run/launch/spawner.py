# SPDX-License-Identifier: BSD-3-Clause
"""What starts the processes of a run: a fork server on this machine, or actors on a Ray cluster.

The processes have numbers, such as the pids of this machine. The launcher gives each of them three
pipes on this machine, wherever the process runs.
"""

from collections.abc import Callable
from typing import Protocol

from paceline.run.launch.child import ChildPipes, Task
from paceline.run.launch.environment import Identity
from paceline.run.launch.fork_loop import ChildExited
from paceline.run.launch.stack_dump import Stack
from paceline.run.system import System

__all__ = ["RemoteSpawner", "Spawner"]


class Spawner(Protocol):
    """Starts processes, and notices when they exit."""

    def start(self) -> None:
        """Prepare to start processes; call it before all else, and as often as you like."""

    def fileno(self) -> int:
        """Return the descriptor that is readable when `take_exited` has something to do."""

    def wait_ready(self, seconds: float) -> bool:
        """Wait until it is ready, at most this long; raise PeerLost if it never will be."""

    def fork(self, task: Task, pipes: ChildPipes) -> int:
        """Start a process that does this task and writes to these pipes; return its number."""

    def take_exited(self) -> list[ChildExited]:
        """Return the processes that exited since the last call."""

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a process; one that has exited gets none."""

    def ask_stack(self, pid: int) -> Stack | None:
        """Ask a process where it is; None: it can't tell."""

    def waiting(self) -> dict[int, str]:
        """Return what processes have been waiting for before they start, by number."""

    def close(self) -> None:
        """End all processes."""


class RemoteSpawner(Spawner, Protocol):
    """Starts processes on other machines, too."""

    def serve(self, head: Identity, say: Callable[[str], None]) -> Identity:
        """Prepare to start the processes of this run; return the identity of its head.

        `say` shows a line to the user.
        """

    def system(self, system: System) -> System:
        """Return a system that knows what these processes do, besides all that this one knows."""
