# SPDX-License-Identifier: BSD-3-Clause
"""What `simulate`, `plan` and the report share: the cluster, the spec, and facts from a trace."""

from dataclasses import dataclass, replace
from pathlib import Path

from paceline.cli.verb_options import PlanOptions, SimulateOptions
from paceline.errors import SpecError, TraceError
from paceline.sim.arrivals import is_arrivals, read_arrivals
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
    trace: Trace | None = None  # where the computation times come from, unless from a table
    recording: Recording | None = None  # those times; None iff they come from --latency
    pilot: Pilot | None = None  # not None if they can be compared with the run's own updates

    @property
    def most_needed(self) -> int | None:
        """The largest N that the times say something about; None: all N."""
        recording = self.recording
        if recording is None or recording.finished is None:
            return None
        unknown = len(recording.times) - recording.finished  # in most versions
        return max(1, self.spec.workers - unknown)

    def origin(self) -> list[str]:
        """Return sentences on where the computation times come from."""
        lines = []
        if self.recording is not None:
            lines.append(f"Recording: {self.recording.left_to_chance()}.")
        if self.pilot is not None:
            lines.append(f"Check: {self.pilot.agreement()}.")
        return lines


def read_inputs(
    options: SimulateOptions | PlanOptions, trace: Path | None, *, in_order: bool
) -> Inputs:
    """Build the cluster and the spec from the options, and from a trace if one is given.

    With `in_order` the computation times of the trace are used one after the other; otherwise they
    are drawn at random.
    """
    latency = options.latency
    if trace is not None and latency is not None:
        raise SpecError("give --latency or a trace, not both")
    cluster = Cluster.parse(
        DEFAULT_LATENCY if latency is None else latency,
        options.network,
        options.faults,
        DEFAULT_BATCH if options.batch is None else options.batch,
    )
    spec = RunSpec(
        workers=DEFAULT_WORKERS if options.workers is None else options.workers,
        late=options.late,
        seed=options.seed,
    )
    if trace is None:
        return Inputs(cluster, spec)
    if not in_order and is_arrivals(trace):
        inputs = _from_arrivals(trace, cluster, spec)
    else:
        inputs = _from_trace(read_trace(trace_file(trace)), cluster, spec, in_order=in_order)
    if options.workers is None and inputs.recording is not None:
        return replace(inputs, spec=replace(spec, workers=len(inputs.recording.times)))
    return inputs


def _from_arrivals(path: Path, cluster: Cluster, spec: RunSpec) -> Inputs:
    if cluster.network is not None:
        raise SpecError("arrivals include the time on the network; leave --network out")
    recording = read_arrivals(path, spec.seed)
    return Inputs(replace(cluster, times=recording.model()), spec, recording=recording)


def _from_trace(trace: Trace, cluster: Cluster, spec: RunSpec, *, in_order: bool) -> Inputs:
    has_network = cluster.network is not None
    if in_order or has_network:
        pilot = None
        recording = recorded_times(trace, spec.seed, with_travel=not has_network)
    else:
        pilot = study(trace, spec.seed)
        recording = pilot.recording
    times = Replayed(recording) if in_order else recording.model()
    return Inputs(replace(cluster, times=times), spec, trace, recording, pilot)


def batch_of(trace: Trace) -> int:
    """Return the mean number of samples in a gradient of the trace."""
    seen = [g.samples for g in trace.gradients() if g.samples]
    return round(sum(seen) / len(seen)) if seen else DEFAULT_BATCH


def convergence_of(trace: Trace, batch: int, workers: int, updates: float) -> Convergence:
    """Limit how many updates each N needs, from the gradient norms in the trace if any."""
    try:
        samples = estimate_noise_scale(without_lost(trace))
    except TraceError:
        samples = 0.0
    # Gradients always have noise. An estimate of none means that the norms can't be used.
    if not samples:
        return every_gradient_counts(workers, updates)
    return at_least(samples, batch, workers, updates)
