# SPDX-License-Identifier: BSD-3-Clause
"""`paceline trace`: look into traces."""

from pathlib import Path

from paceline.cli.show import human_seconds, print_json
from paceline.watch.audit import audit
from paceline.watch.summary import summarize
from paceline.watch.trace import read_trace

__all__ = ["check"]


def check(file: Path, as_json: bool) -> None:
    """Say whether a trace is sound, and what it holds."""
    trace = read_trace(file)
    audit(trace, str(file))
    summary = summarize(trace)
    if as_json:
        print_json(summary)
        return
    how_far = "" if summary.ended == "finished" else f", as far as it goes ({summary.ended})"
    fates = ", ".join(f"{count} {fate}" for fate, count in summary.fates.items())
    print(
        f"{file} is sound{how_far}: {trace.header.source} of {summary.policy}, "
        f"{summary.workers} workers, {summary.updates} updates in "
        f"{human_seconds(summary.seconds)}; gradients: {fates}."
    )
