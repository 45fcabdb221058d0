# SPDX-License-Identifier: BSD-3-Clause
"""The machines of a simulated run: computation times, network and faults."""

from dataclasses import dataclass

from paceline.errors import SpecError
from paceline.latency import Latency, TimeModel, parse_latency
from paceline.sim.faults import Fault, parse_faults
from paceline.sim.network import Network, parse_network
from paceline.sim.recorded_times import recorded_times
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace, trace_file

__all__ = ["Cluster", "parse_times"]


def parse_times(text: str, *, with_travel: bool) -> TimeModel:
    """Parse a latency string, or "trace:FILE" to resample the times of a recorded run in blocks.

    `with_travel`: include the time that the recorded network added.
    """
    kind, _, path = text.partition(":")
    if kind.strip() == "trace":
        if not path.strip():
            raise SpecError("a latency from a trace must name its file, as in trace:run.jsonl")
        trace = read_trace(trace_file(path.strip()))
        recording = recorded_times(trace, seed=0, with_travel=with_travel)
        return recording.model()
    return parse_latency(text)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines that a policy is simulated on."""

    times: TimeModel
    network: Network | None = None  # None: messages and bytes take no time
    faults: tuple[Fault, ...] = ()
    batch: int = 32  # samples in a gradient

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise SpecError(f"batch must be >= 1, got {self.batch}")

    def validate(self, spec: RunSpec) -> None:
        """Raise `SpecError` if it names workers that the run doesn't have."""
        if isinstance(self.times, Latency):
            self.times.validate(spec)
        if self.network is not None:
            self.network.validate(spec)
        for fault in self.faults:
            if fault.kind == "stall" and self.network is None:
                raise SpecError(f"'{fault}' needs a network whose link can stall; give --network")
            if fault.worker is not None and fault.worker >= spec.workers:
                raise SpecError(
                    f"'{fault}' names worker {fault.worker}; the workers are 0 to "
                    f"{spec.workers - 1}"
                )

    @classmethod
    def parse(cls, latency: str, network: str = "", faults: str = "", batch: int = 32) -> "Cluster":
        """Parse the strings of the command line; an empty `network` or `faults` means none."""
        return cls(
            times=parse_times(latency, with_travel=not network),
            network=parse_network(network) if network else None,
            faults=parse_faults(faults),
            batch=batch,
        )
