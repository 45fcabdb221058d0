# SPDX-License-Identifier: BSD-3-Clause
"""A Ray cluster of several nodes on this machine, in a process of its own.

Ray starts threads, changes the environment and leaves resources open, so it stays out of the
process of the tests. Everything listens on loopback only.
"""

import json
import os
import secrets
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

__all__ = ["RayNodes", "environment", "wait_for"]

HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}
"""A node that is gone is noticed within seconds instead of half a minute."""

NODE: dict[str, Any] = {
    "node_ip_address": "127.0.0.1",
    "object_store_memory": 80 * 2**20,
    "include_dashboard": False,
}


def environment() -> dict[str, str]:
    """Return the environment for programs that start Ray or connect to it."""
    return {
        **os.environ,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # it believes that 127.0.0.1 is its address
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # or Ray would keep one in the home directory
    }


def wait_for(path: Path, process: "subprocess.Popen[str]") -> None:
    """Wait until a process of the run has written this file, without using the processor."""
    while not path.exists():
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
            raise AssertionError(f"the run has ended before it wrote {path}")


class RayNodes:
    """The cluster. Its first node, where tests start runs, has room for `cpus`."""

    def __init__(self, cpus: int) -> None:
        self.env = {
            **environment(),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(),
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(cpus)],
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.address: str = self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()  # it ends the cluster
        self._process.wait()
        self._process.stdout.close()

    def add(self, cpus: int, **labels: str) -> int:
        """Add a node; return its number."""
        number: int = self._ask("add", cpus, labels)
        return number

    def remove(self, number: int) -> None:
        """Kill a node and all that runs on it, as if the machine had lost its power."""
        self._ask("remove", number)

    def _ask(self, *command: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def main(cpus: int) -> None:
    """Be the process of the cluster until the tests close its input."""
    from ray.cluster_utils import Cluster

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints
    first = {**NODE, "num_cpus": cpus, "_system_config": HEALTH}
    cluster = Cluster(initialize_head=True, head_node_args=first)
    nodes: list[Any] = []

    def answer(value: object) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    answer(cluster.address)
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        if verb == "add":
            amount, labels = arguments
            nodes.append(cluster.add_node(**NODE, num_cpus=amount, labels=labels))
            answer(len(nodes) - 1)
        else:
            cluster.remove_node(nodes[arguments[0]], allow_graceful=False)
            answer(None)
    with suppress(Exception):
        cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
