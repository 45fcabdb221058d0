# SPDX-License-Identifier: BSD-3-Clause
"""What is printed when a run ends: its report, and the planner's advice."""

import shutil
from dataclasses import replace
from pathlib import Path
from textwrap import fill

from paceline.cli.simulation_inputs import batch_of, convergence_of
from paceline.core.policies import Backup, Sync, parse_policy
from paceline.errors import PacelineError, SpecError, TraceError
from paceline.sim.cluster import Cluster
from paceline.sim.pilot import study
from paceline.sim.planner import FLAT, FLAT_WORDS, Option, Plan, plan
from paceline.sim.recorded_times import Recording
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.trace.schema import Header, Trace
from paceline.watch.report import report
from paceline.watch.summary import split

__all__ = ["print_report", "report_lines"]

LARGE_BYTES = 100_000_000  # a larger trace takes too long to read unasked

# Limits that keep planning fast:
RECENT = 20_000  # plan from this many records at the end of the trace
MOST_WORKERS = 100

UPDATES = 1000.0  # to a hypothetical target; only ratios are printed


def print_report(trace_path: Path) -> None:
    """Print the report of a run that has ended, or one line that says why there is none."""
    if trace_path.is_file() and trace_path.stat().st_size > LARGE_BYTES:
        print(f"The trace is large. For a report: paceline trace show {trace_path}")
        return
    try:
        trace = read_trace(trace_path)
    except TraceError as error:
        print(f"No report: {error}.")
        return
    print("\n".join(report_lines(trace, trace_path)))


def report_lines(trace: Trace, path: Path) -> list[str]:
    """Return the lines of the report and of the planner's advice; `path` is the trace's file."""
    width = shutil.get_terminal_size().columns
    lines = [*report(trace), *_planned(trace, path)]
    # Never wrap the row of a table: only such a row has two spaces in a row.
    return [line if "  " in line else _wrapped(line, width) for line in lines]


def _wrapped(line: str, width: int) -> str:
    """Wrap a line, but keep options and paths whole."""
    return fill(line, width, break_long_words=False, break_on_hyphens=False)


def _planned(trace: Trace, path: Path) -> list[str]:
    """Return the planner's advice, or why there is none."""
    header = split(trace)[-1].header
    if header.workers < 2:
        return []
    if header.workers > MOST_WORKERS:
        return [f"To find the best b: paceline plan --trace {path}"]
    try:
        pilot = study(_recent(trace, header), header.seed)
        recording = pilot.recording
        workers = len(recording.times)
        spec = RunSpec(workers=workers, late=header.late, seed=header.seed)
        batch = batch_of(trace)
        cluster = replace(Cluster.parse("0s", batch=batch), times=recording.model())
        convergence = convergence_of(trace, batch, workers, UPDATES)
        result = plan(cluster, spec, convergence, most=recording.finished)
    except PacelineError as error:
        return [f"No advice on the number of backups: {error}."]
    return [
        f"{_choice(header, result)} {_caveat(recording, result)} "
        f"Details: paceline plan --trace {path}"
    ]


def _recent(trace: Trace, header: Header) -> Trace:
    """Return only the end of the trace."""
    return Trace(header, trace.records[-RECENT:])


def _choice(header: Header, result: Plan) -> str:
    """Recommend a rule, compared with the one that ran if the planner knows it."""
    was, best = _as_run(header, result) or result.baseline, result.best
    gain = best.gain_over(was)
    if best is was or gain.most <= 1 + FLAT:
        reason = (
            result.why_not_more()
            if was is result.baseline
            else f"no other is certain to save more than {FLAT_WORDS} of the time"
        )
        return f"Judging by these times, the best number of backups is {was.backups}: {reason}."
    condition = ", depending on the noise scale" if gain.is_range else ""
    return (
        f"Judging by these times, {best.rule} (waiting for {best.needed} of {best.machines} "
        f"workers) would reach the same target {gain.words()} times as fast as {was.rule}"
        f"{condition}."
    )


def _as_run(header: Header, result: Plan) -> Option | None:
    """Return the planner's option for the rule that ran, or None if it has none."""
    try:
        policy = parse_policy(header.policy)
    except SpecError:
        return None
    if not isinstance(policy, Sync | Backup):
        return None
    needed = header.workers - (policy.b if isinstance(policy, Backup) else 0)
    return next((option for option in result.options if option.needed == needed), None)


def _caveat(recording: Recording, result: Plan) -> str:
    """Return the assumption behind the advice, in short."""
    assumed = f"Assumed: {result.assumptions[0].partition(';')[0]}"
    guessed = recording.drawn + recording.bounds
    if guessed:
        assumed += f"; {guessed:,} of {recording.total:,} times were cut short and are estimates"
    return f"{assumed}."
