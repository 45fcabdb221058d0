# SPDX-License-Identifier: BSD-3-Clause
"""The actor that runs a process of a run on a node of a Ray cluster: a thin wrapper."""

from threading import Event, Thread
from typing import Any

import ray

from paceline.run.launch.child import Task
from paceline.run.launch.remote_host import Luggage, RemoteHost, Report, Started

__all__ = ["RayActor"]

WATCH_S = 1.0  # between checks of whether the launcher still asks


class _Actor:
    """A remote host. Its methods run in several threads: a report must not delay a signal."""

    def __init__(self, luggage: Luggage, threads: int | None, launcher_node: str) -> None:
        self._node = ray.get_runtime_context().get_node_id()
        self._ip = ray.util.get_node_ip_address()
        is_away = self._node != launcher_node
        self._host = RemoteHost(luggage, self._ip, threads, is_away=is_away)
        self._is_closed = Event()
        if is_away:
            Thread(target=self._watch, name="watch", daemon=True).start()

    def where(self) -> tuple[str, str]:
        """Return the node and its IP address."""
        return self._node, self._ip

    def move_head(self, address: str, number: int) -> None:
        """Note where the head is."""
        self._host.move_head(address, number)

    def start(self, task: Task) -> Started:
        """Start the process."""
        return self._host.start(task)

    def report(self, wait_s: float) -> Report:
        """Return what the process did."""
        return self._host.report(wait_s)

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        self._host.signal(number)

    def ask_stack(self) -> None:
        """Ask the process where it is."""
        self._host.ask_stack()

    def read_file(self, name: str) -> bytes | None:
        """Return a file that the process has left."""
        return self._host.read_file(name)

    def close(self) -> None:
        """End the process."""
        self._is_closed.set()
        self._host.close()

    def _watch(self) -> None:
        while not self._is_closed.wait(WATCH_S):
            self._host.kill_if_abandoned()


RayActor: Any = ray.remote(_Actor)
