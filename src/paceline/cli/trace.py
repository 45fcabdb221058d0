# SPDX-License-Identifier: BSD-3-Clause
"""`paceline trace`: look into traces."""

from pathlib import Path

from paceline.cli.inputs import trace_file
from paceline.cli.report import report_lines
from paceline.cli.show import human_seconds, print_json
from paceline.watch.audit import audit
from paceline.watch.summary import Restoration, Summary, summarize
from paceline.watch.trace import read_trace

__all__ = ["check", "show"]


def check(file: Path, as_json: bool) -> None:
    """Say whether a trace is sound, and what it holds."""
    path = trace_file(file)
    trace = read_trace(path)
    audit(trace, str(path))
    summary = summarize(trace)
    if as_json:
        print_json(summary)
        return
    how_far = "" if summary.ended == "finished" else f", as far as it goes ({summary.ended})"
    fates = ", ".join(f"{count} {fate}" for fate, count in summary.fates.items())
    print(
        f"{path} is sound{how_far}: {trace.header.source} of {summary.policy}, "
        f"{summary.workers} workers, {summary.updates} updates in "
        f"{human_seconds(summary.seconds)}{_lost(summary)}; gradients: {fates}."
    )


def _lost(summary: Summary) -> str:
    """What restorations of the server cost."""
    found = summary.restorations
    if not found:
        return ""
    which = ", ".join(_range(r) for r in found if r.lost)
    lost = f"updates {which} lost" if which else "nothing lost"
    return f"; the server was restored {len(found)} x, {lost}"


def _range(restoration: Restoration) -> str:
    first, last = restoration.version + 1, restoration.version + restoration.lost
    return f"{first}" if first == last else f"{first}-{last}"


def show(file: Path) -> None:
    """Tell a run in plain words."""
    path = trace_file(file)
    print("\n".join(report_lines(read_trace(path), path)))
