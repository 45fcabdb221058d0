# SPDX-License-Identifier: BSD-3-Clause
"""What `simulate`, `plan` and the report share: the cluster, the spec, and facts from a trace."""

from dataclasses import dataclass, replace
from pathlib import Path

from paceline.cli.verb_options import PlanOptions, SimulateOptions
from paceline.errors import SpecError, TraceError
from paceline.sim.cluster import Cluster
from paceline.sim.convergence import (
    Convergence,
    at_least,
    estimate_noise_scale,
    every_gradient_counts,
)
from paceline.sim.pilot import Pilot, study
from paceline.sim.recorded_times import Recording, Replayed, recorded_times
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
DEFAULT_WORKERS = 4
DEFAULT_LATENCY = "50ms + 5% exp:500ms"


@dataclass(frozen=True, slots=True)
class Inputs:
    """What to simulate."""

    cluster: Cluster
    spec: RunSpec
    trace: Trace | None  # where the computation times come from
    recording: Recording | None  # those times; None iff there is no trace
    pilot: Pilot | None = None  # not None if they can be compared with the run's own updates

    @property
    def most_needed(self) -> int | None:
        """The largest N that the times say something about; None: all N."""
        if self.recording is None or self.spec.workers != len(self.recording.times):
            return None
        return self.recording.finished


def read_inputs(
    options: SimulateOptions | PlanOptions, trace: Path | None, *, in_order: bool
) -> Inputs:
    """Build the cluster and the spec from the options, and from a trace if one is given.

    With `in_order` the computation times of the trace are used one after the other; otherwise they
    are drawn at random.
    """
    workers, latency = options.workers, options.latency
    if trace is not None and latency is not None:
        raise SpecError("give --latency or a trace, not both")
    cluster = Cluster.parse(
        DEFAULT_LATENCY if latency is None else latency,
        options.network,
        options.faults,
        DEFAULT_BATCH if options.batch is None else options.batch,
    )
    source = recording = pilot = None
    if trace is not None:
        source = read_trace(trace_file(trace))
        if not in_order and not options.network:
            pilot = study(source, options.seed)
            recording = pilot.recording
        else:
            recording = recorded_times(source, options.seed, with_travel=not options.network)
        times = Replayed(recording) if in_order else recording.model()
        cluster = replace(cluster, times=times)
        workers = len(recording.times) if workers is None else workers
    spec = RunSpec(
        workers=DEFAULT_WORKERS if workers is None else workers,
        late=options.late,
        seed=options.seed,
    )
    return Inputs(cluster, spec, source, recording, pilot)


def batch_of(trace: Trace) -> int:
    """Return the mean number of samples in a gradient of the trace."""
    seen = [g.samples for g in trace.gradients() if g.samples]
    return round(sum(seen) / len(seen)) if seen else DEFAULT_BATCH


def convergence_of(trace: Trace, batch: int, workers: int, updates: float) -> Convergence:
    """Limit how many updates each N needs, from the gradient norms in the trace if any."""
    try:
        samples = estimate_noise_scale(without_lost(trace))
    except TraceError:
        return every_gradient_counts(workers, updates)
    return at_least(samples, batch, workers, updates)
