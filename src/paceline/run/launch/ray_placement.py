# SPDX-License-Identifier: BSD-3-Clause
"""Where on a Ray cluster the processes of a run may run, and what they reserve there.

This module must not import ray: the command line reads it before it knows whether Ray is there.
"""

from dataclasses import dataclass
from math import inf

from paceline.errors import SpecError
from paceline.run.launch.environment import Identity

__all__ = ["Placement"]

CPUS_PER_SERVER = 1.0
NODE_ID = "ray.io/node-id"  # a label that Ray gives every node


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The resources of the processes, and the nodes for the servers."""

    cpus_per_worker: float = 1.0
    gpus_per_worker: float = 0.0
    server_label: str = ""
    """Servers run only on nodes with this label, KEY=VALUE; "": the head on the launcher's node."""

    def __post_init__(self) -> None:
        if not 0 < self.cpus_per_worker < inf:
            raise SpecError(f"cpus_per_worker must be > 0, got {self.cpus_per_worker}")
        if not 0 <= self.gpus_per_worker < inf:
            raise SpecError(f"gpus_per_worker must be >= 0, got {self.gpus_per_worker}")
        key, equals, value = self.server_label.partition("=")
        if self.server_label and not (key and equals and value):
            raise SpecError(
                f"server_label must be KEY=VALUE, such as market=on-demand, or KEY=!VALUE for all "
                f"other values, got {self.server_label!r}"
            )

    def bundle(self, who: Identity) -> dict[str, float]:
        """Return what a process reserves."""
        if who.worker is None:
            return {"CPU": CPUS_PER_SERVER}
        gpus = {"GPU": self.gpus_per_worker} if self.gpus_per_worker else {}
        return {"CPU": self.cpus_per_worker, **gpus}

    def total(self, workers: int, servers: int) -> dict[str, float]:
        """Return what a whole run reserves."""
        return {
            "CPU": workers * self.cpus_per_worker + servers * CPUS_PER_SERVER,
            "GPU": workers * self.gpus_per_worker,
        }

    def selector(self, who: Identity, launcher_node: str) -> dict[str, str]:
        """Return the labels that a node for this process must have."""
        if who.worker is not None:
            return {}
        if self.server_label:
            key, _, value = self.server_label.partition("=")
            return {key: value}
        return {NODE_ID: launcher_node} if who.is_head else {}

    def threads(self, who: Identity) -> int | None:
        """Return how many threads a process computes with; None: one for each core."""
        return None if who.worker is None else max(1, int(self.cpus_per_worker))

    def describe_lack(self, who: Identity) -> str:
        """Return the reason why a process has no place."""
        amounts = {name: f"{amount:g} {name}" for name, amount in self.bundle(who).items()}
        label = f" and the label {self.server_label}" if self.selector(who, "") else ""
        if who.is_head and not self.server_label:
            return f"waiting until this node of the Ray cluster has {amounts['CPU']} free"
        return f"no node of the Ray cluster has {' and '.join(amounts.values())} free{label}"
