# SPDX-License-Identifier: BSD-3-Clause
"""`paceline trace`: inspect the trace of a run."""

from pathlib import Path

from paceline.cli.end_of_run import report_lines
from paceline.cli.own_rules import import_rules, rule_folders
from paceline.cli.printing import human_seconds, print_json
from paceline.run.launch.run_folder import is_locked
from paceline.trace.reader import read_trace, trace_file
from paceline.trace.schema import FINISHED, Trace
from paceline.watch.audit import audit
from paceline.watch.facts import gather_facts
from paceline.watch.summary import RUNNING, Restoration, Summary, outcomes, summarize

__all__ = ["check", "show"]


def check(file: Path, as_json: bool) -> None:
    """Check that a trace is consistent, and print what it contains."""
    path = trace_file(file)
    trace = _read(path)
    audit(trace, str(path), rule_folders(path))
    if trace.is_growing and not any(trace.updates()):
        if as_json:
            print_json(None)
            return
        print(f"{path} is consistent so far ({RUNNING}): no update yet.")
        return
    summary = summarize(trace)
    if as_json:
        print_json(summary)
        return
    so_far = "" if summary.ended == FINISHED else f" so far ({summary.ended})"
    fates = ", ".join(f"{count} {fate}" for fate, count in outcomes(summary).items())
    print(
        f"{path} is consistent{so_far}: {trace.header.source} of {summary.policy}, "
        f"{summary.workers} workers, {summary.updates} updates in "
        f"{human_seconds(summary.seconds)}{_restorations(summary)}; gradients: {fates}."
    )


def _read(path: Path) -> Trace:
    """Read a trace, or the part written so far if its run is still in progress."""
    return read_trace(path, is_growing=is_locked(path.parent))


def _restorations(summary: Summary) -> str:
    """Say how often the run continued from an earlier version, and which updates that cost."""
    resumed = [r for r in summary.restorations if r.resumed]
    restored = [r for r in summary.restorations if not r.resumed]
    return _lost("the run was resumed", resumed) + _lost("the server was restored", restored)


def _lost(what: str, found: list[Restoration]) -> str:
    if not found:
        return ""
    which = ", ".join(_range(r) for r in found if r.lost)
    lost = f"updates {which} lost" if which else "nothing lost"
    return f"; {what} {len(found)} x, {lost}"


def _range(restoration: Restoration) -> str:
    first, last = restoration.version + 1, restoration.version + restoration.lost
    return f"{first}" if first == last else f"{first}-{last}"


def show(file: Path, as_json: bool) -> None:
    """Describe a run in words, or print the facts behind them."""
    path = trace_file(file)
    trace = _read(path)
    import_rules(trace, path)
    lines = report_lines(trace, path)
    if as_json:
        print_json(gather_facts(trace, [line.replace("\n", " ") for line in lines]))
    else:
        print("\n".join(lines))
