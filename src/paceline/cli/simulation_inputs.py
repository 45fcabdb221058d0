# SPDX-License-Identifier: BSD-3-Clause
"""What `simulate`, `plan` and the report share: the cluster, the spec, and facts from a trace."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.cli.own_rules import import_rules
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
from paceline.sim.planner import Plan, plan
from paceline.sim.recorded_times import Recording, Replayed, recorded_times
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace, trace_file
from paceline.trace.schema import Trace
from paceline.watch.segments import split, without_lost

__all__ = [
    "DEFAULT_BATCH",
    "Inputs",
    "batch_of",
    "inputs_from",
    "read_inputs",
]

UPDATES = 1000.0  # to a hypothetical target: ratios don't depend on it
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

    def plan(
        self,
        convergence: Convergence | None = None,
        on_progress: Callable[[float], None] = lambda done: None,
    ) -> Plan:
        """Compare every N; `convergence` is by default what is known from the trace."""
        convergence = convergence or self.convergence(UPDATES)
        return plan(
            self.cluster, self.spec, convergence, on_progress, self._most_needed, self._ran_needed
        )

    def convergence(self, updates: float) -> Convergence:
        """Limit how many updates each N needs, from the gradient norms in the trace if any."""
        workers = self.spec.workers
        try:
            samples = estimate_noise_scale(without_lost(self.trace)) if self.trace else 0.0
        except TraceError:
            samples = 0.0
        # Gradients always have noise. An estimate of none means that the norms can't be used.
        if not samples:
            return every_gradient_counts(workers, updates)
        return at_least(samples, self.cluster.batch, workers, updates)

    @property
    def _most_needed(self) -> int | None:
        """The largest N that the times say something about; None: all N."""
        recording = self.recording
        if recording is None or recording.finished is None:
            return None
        unknown = len(recording.times) - recording.finished  # in most versions
        return max(1, self.spec.workers - unknown)

    @property
    def _ran_needed(self) -> int | None:
        """The N of the recorded rule; None: unknown, or it ran with more workers."""
        is_same = self.pilot and self.pilot.trace.header.workers == self.spec.workers
        return self.pilot.needed if self.pilot and is_same else None

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
        raise SpecError("give --latency or --trace, not both")
    cluster = Cluster.parse(
        DEFAULT_LATENCY if latency is None else latency,
        options.network,
        options.faults,
        DEFAULT_BATCH if options.batch is None else options.batch,
    )
    spec = RunSpec(
        workers=DEFAULT_WORKERS if options.workers is None else options.workers,
        late=options.late or "cancel",
        seed=options.seed,
    )
    inputs = Inputs(cluster, spec)
    if trace is None:
        return inputs
    if in_order:
        inputs = _replayed(read_trace(trace_file(trace)), cluster, spec)
    elif is_arrivals(trace):
        inputs = _from_arrivals(trace, cluster, spec)
    else:
        source = read_trace(trace_file(trace))
        import_rules(source, trace_file(trace))
        inputs = inputs_from(source, cluster, spec.seed)
    if options.batch is not None:
        inputs = replace(inputs, cluster=replace(inputs.cluster, batch=options.batch))
    workers = inputs.spec.workers if options.workers is None else options.workers
    late = inputs.spec.late if options.late is None else options.late
    return replace(inputs, spec=replace(inputs.spec, workers=workers, late=late))


def inputs_from(trace: Trace, cluster: Cluster | None = None, seed: int = 0) -> Inputs:
    """Plan for the same workers, batches and late work as in the recorded run.

    `cluster` has the network and the faults; by default, the times include the recorded network.
    Raises `SpecError` if the recorded run can't be relied on.
    """
    cluster = cluster or Cluster.parse("0s")
    pilot = study(trace, seed)
    recording = pilot.recording
    if cluster.network is not None:
        recording = recorded_times(pilot.trace, seed, with_travel=False)
    spec = RunSpec(workers=len(recording.times), late=pilot.trace.header.late, seed=seed)
    cluster = replace(cluster, times=recording.model(), batch=batch_of(trace))
    return Inputs(cluster, spec, trace, recording, pilot)


def _replayed(trace: Trace, cluster: Cluster, spec: RunSpec) -> Inputs:
    recording = recorded_times(trace, spec.seed, with_travel=cluster.network is None)
    late = split(trace)[-1].header.late
    spec = replace(spec, workers=len(recording.times), late=late)
    cluster = replace(cluster, times=Replayed(recording), batch=batch_of(trace))
    return Inputs(cluster, spec, trace, recording)


def _from_arrivals(path: Path, cluster: Cluster, spec: RunSpec) -> Inputs:
    if cluster.network is not None:
        raise SpecError("arrivals include the time on the network; leave --network out")
    recording = read_arrivals(path, spec.seed)
    spec = replace(spec, workers=len(recording.times))
    return Inputs(replace(cluster, times=recording.model()), spec, recording=recording)


def batch_of(trace: Trace) -> int:
    """Return the mean number of samples in a gradient of the trace."""
    seen = [g.samples for g in trace.gradients() if g.samples]
    return round(sum(seen) / len(seen)) if seen else DEFAULT_BATCH
