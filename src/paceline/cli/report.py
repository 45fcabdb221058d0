# SPDX-License-Identifier: BSD-3-Clause
"""What is printed of a run when it is over: its report, and what the planner makes of it."""

import shutil
from collections import deque
from dataclasses import replace
from pathlib import Path
from statistics import median
from textwrap import fill

from paceline.cli.inputs import batch_of, convergence_of
from paceline.core.policies import Backup, Sync, parse_policy
from paceline.errors import PacelineError, SpecError, TraceError
from paceline.latency import Recorded
from paceline.sim.cluster import Cluster
from paceline.sim.planner import FLAT, Option, Plan, plan
from paceline.sim.recording import Recording, recorded_times
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.trace.schema import Gradient, Header, Trace
from paceline.watch.report import report
from paceline.watch.summary import split

__all__ = ["print_report", "report_lines"]

LARGE_BYTES = 100_000_000  # a trace that takes longer to read than anybody likes to wait

# Planning must not keep anybody waiting:
RECENT = 20_000  # gradients at the end of the trace that are planned from
MOST_WORKERS = 100
LEAST_GRADIENTS = 20  # of a worker; from fewer nothing can be planned

UPDATES = 1000.0  # to an imagined target; only ratios are told


def print_report(trace_path: Path) -> None:
    """Print the report of a run that is over; where that cannot be, one line says why."""
    if trace_path.is_file() and trace_path.stat().st_size > LARGE_BYTES:
        print(f"The trace is large; for a report: paceline trace show {trace_path}")
        return
    try:
        trace = read_trace(trace_path)
    except TraceError as error:
        print(f"No report: {error}.")
        return
    print("\n".join(report_lines(trace, trace_path)))


def report_lines(trace: Trace, path: Path) -> list[str]:
    """The report, and what the planner makes of it; `path` is where the trace is."""
    width = shutil.get_terminal_size().columns
    lines = [*report(trace), *_planned(trace, path)]
    # A row of a table, which has more than one space in it, is never broken.
    return [line if "  " in line else _wrapped(line, width) for line in lines]


def _wrapped(line: str, width: int) -> str:
    """The line in several; options and paths stay whole."""
    return fill(line, width, break_long_words=False, break_on_hyphens=False)


def _planned(trace: Trace, path: Path) -> list[str]:
    """What b the planner would choose; nothing where it cannot know."""
    header = split(trace)[-1].header
    try:
        recording = recorded_times(_recent(trace), header.seed, with_travel=True)
        workers = len(recording.times)
        short = median(map(len, recording.times.values())) < LEAST_GRADIENTS
        if workers < 2 or short:
            return []
        if workers > MOST_WORKERS:
            return [f"What b would be best: paceline plan --trace {path}"]
        spec = RunSpec(workers=workers, late=header.late, seed=header.seed)
        batch = batch_of(trace)
        cluster = replace(Cluster.parse("0s", batch=batch), times=Recorded(recording.times))
        result = plan(cluster, spec, convergence_of(trace, batch, workers, UPDATES))
    except PacelineError:
        return []
    return [
        f"{_choice(header, result)} {_caveat(recording, result)} More: paceline plan --trace {path}"
    ]


def _recent(trace: Trace) -> Trace:
    """The last gradients of the trace."""
    records: deque[Gradient] = deque(trace.gradients(), maxlen=RECENT)
    return Trace(trace.header, list(records))


def _choice(header: Header, result: Plan) -> str:
    """What to choose, against what was run if the planner knows it, otherwise against sync."""
    ran = _as_run(header, result)
    name = header.policy if ran is not None else "sync"
    was = result.sync if ran is None else ran
    best = result.best
    gain = was.seconds / best.seconds
    if gain <= 1 + FLAT:
        flat = f"{100 * FLAT:.0f} %"
        return f"Planned from these times, no b is better than {name} by more than {flat}."
    rule = f"backup:{best.backups}" if best.backups else "sync"
    return (
        f"Planned from these times, {rule} (waiting for {best.needed} of {best.machines} workers) "
        f"would reach the same target {gain:.2f} times as soon as {name}."
    )


def _as_run(header: Header, result: Plan) -> Option | None:
    """The option that was run; None: another rule, or other workers."""
    try:
        policy = parse_policy(header.policy)
    except SpecError:
        return None
    if not isinstance(policy, Sync | Backup):
        return None
    needed = header.workers - (policy.b if isinstance(policy, Backup) else 0)
    return next((option for option in result.options if option.needed == needed), None)


def _caveat(recording: Recording, result: Plan) -> str:
    """What the choice rests on, in short."""
    assumed = f"Assumed: {result.assumptions[0].partition(';')[0]}"
    guessed = recording.drawn + recording.bounds
    if guessed:
        assumed += f"; {guessed:,} of {recording.total:,} times were cut short, and are guesses"
    return f"{assumed}."
