# SPDX-License-Identifier: BSD-3-Clause
"""What verbs have in common: the cluster and the spec from options, and what a trace tells."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import SpecError, TraceError
from paceline.latency import Recorded
from paceline.sim.cluster import Cluster
from paceline.sim.convergence import (
    Convergence,
    estimate_noise_scale,
    every_gradient_counts,
    noise_scale,
)
from paceline.sim.recording import Recording, Replayed, recorded_times
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace, trace_file
from paceline.trace.schema import Trace
from paceline.watch.summary import without_lost

__all__ = [
    "DEFAULT_BATCH",
    "Inputs",
    "batch_of",
    "convergence_of",
    "read_inputs",
]

DEFAULT_BATCH = 32
DEFAULT_WORKERS = 8
DEFAULT_LATENCY = "50ms + 5% exp:500ms"


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is simulated."""

    cluster: Cluster
    spec: RunSpec
    trace: Trace | None  # that the computation times come from
    recording: Recording | None  # these times; None iff there is no trace


def read_inputs(options: dict[str, Any], trace: Path | None, *, in_order: bool) -> Inputs:
    """The inputs of a verb, whose computation times come from a trace if one is given.

    `in_order`: the very times of the trace, one after the other; otherwise drawn from them.
    """
    workers, latency = options["workers"], options["latency"]
    if trace is not None and latency is not None:
        raise SpecError("give --latency or a trace, not both")
    cluster = Cluster.parse(
        DEFAULT_LATENCY if latency is None else latency,
        options["network"],
        options["faults"],
        options["batch"],
    )
    source = recording = None
    if trace is not None:
        source = read_trace(trace_file(trace))
        recording = recorded_times(source, options["seed"], with_travel=not options["network"])
        times = Replayed(recording) if in_order else Recorded(recording.times)
        cluster = replace(cluster, times=times)
        workers = len(recording.times) if workers is None else workers
    spec = RunSpec(
        workers=DEFAULT_WORKERS if workers is None else workers,
        steps=options.get("steps"),
        min_workers=options.get("min_workers", 1),
        late=options["late"],
        seed=options["seed"],
    )
    return Inputs(cluster, spec, source, recording)


def batch_of(trace: Trace) -> int:
    """Samples in a gradient of the trace, on average."""
    seen = [g.samples for g in trace.gradients() if g.samples]
    return round(sum(seen) / len(seen)) if seen else DEFAULT_BATCH


def convergence_of(trace: Trace, batch: int, workers: int, updates: float) -> Convergence:
    """How many updates are needed, by the gradient norms in the trace if it has any."""
    try:
        samples = estimate_noise_scale(without_lost(trace))
    except TraceError:
        return every_gradient_counts(workers, updates)
    return noise_scale(samples, batch, workers, updates)
