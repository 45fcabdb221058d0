# SPDX-License-Identifier: BSD-3-Clause
"""What is printed when a run ends: its report, and the planner's advice."""

import shutil
from pathlib import Path
from textwrap import fill
from traceback import print_exc

from paceline.cli.simulation_inputs import inputs_from
from paceline.errors import PacelineError
from paceline.sim.planner import Plan
from paceline.sim.recorded_times import Recording
from paceline.trace.reader import read_trace
from paceline.trace.schema import Trace
from paceline.watch.report import report
from paceline.watch.segments import split

__all__ = ["print_report", "report_lines"]

LARGE_BYTES = 100_000_000  # a larger trace takes too long to read unasked

MOST_WORKERS = 100  # with more, planning takes too long to do unasked


def print_report(trace_path: Path) -> None:
    """Print the report of a run that has ended, or one line that says why there is none."""
    if trace_path.is_file() and trace_path.stat().st_size > LARGE_BYTES:
        print(f"The trace is large. For a report: paceline trace show {trace_path}")
        return
    try:
        lines = report_lines(read_trace(trace_path), trace_path)
    except PacelineError as error:
        lines = [f"No report: {error}."]
    except Exception as error:  # the run has ended, and keeps its exit code
        print_exc()
        lines = [f"No report, because of a bug in Paceline: {error!r}."]
    print("\n".join(lines))


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
        inputs = inputs_from(trace)
        result = inputs.plan()
    except PacelineError as error:
        return [f"No advice on the number of backups: {error}."]
    return [
        f"Judging by these times, {result.in_short()}. {_caveat(inputs.recording, result)} "
        f"Details: paceline plan --trace {path}"
    ]


def _caveat(recording: Recording | None, result: Plan) -> str:
    """Return the assumption behind the advice, in short."""
    assumed = f"Assumed: {result.assumptions[0].partition(';')[0]}"
    guessed = recording.drawn + recording.bounds if recording else 0
    if recording and guessed:
        assumed += f"; {guessed:,} of {recording.total:,} times were cut short and are estimates"
    return f"{assumed}."
