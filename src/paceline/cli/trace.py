# SPDX-License-Identifier: BSD-3-Clause
"""`paceline trace`: inspect the trace of a run."""

import zlib
from pathlib import Path

from paceline.cli.end_of_run import report_lines
from paceline.cli.own_rules import import_rules, rule_folders
from paceline.cli.printing import human_seconds, print_json
from paceline.errors import TraceError
from paceline.run.launch.run_folder import finished_at, is_locked
from paceline.run.server.checkpoint_file import SavedTrace, saved_trace
from paceline.trace.reader import read_trace, trace_file
from paceline.trace.schema import FINISHED, NAME, Trace
from paceline.watch.audit import audit
from paceline.watch.facts import gather_facts
from paceline.watch.gaps import check_complete
from paceline.watch.segments import split
from paceline.watch.summary import RUNNING, Restoration, Summary, outcomes, summarize

__all__ = ["check", "show"]


def check(file: Path, as_json: bool) -> None:
    """Check that a trace is consistent, and print what it contains."""
    path = trace_file(file)
    # Before the trace is read: a run in progress may make another checkpoint.
    is_in_its_folder = path.name == NAME
    saved = saved_trace(path.parent / "checkpoints") if is_in_its_folder else None
    trace = _read(path)
    audit(trace, str(path), rule_folders(path))
    check_complete(trace, str(path), finished_at(path.parent) if is_in_its_folder else None)
    if saved is not None:
        _compare(path, trace, saved)
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
        f"{summary.workers} workers, {summary.updates}{_goal(trace, summary)} updates in "
        f"{human_seconds(summary.seconds)}{_restorations(summary)}; gradients: {fates}."
    )


def _goal(trace: Trace, summary: Summary) -> str:
    """Say how many updates the run should make, if it hasn't made them."""
    steps = split(trace)[-1].header.steps
    return "" if steps is None or steps <= summary.updates else f" of {steps}"


def _compare(path: Path, trace: Trace, saved: SavedTrace) -> None:
    """Raise `TraceError` if the trace has lost what it had at the newest checkpoint."""
    with path.open("rb") as file:
        text = file.read(saved.size_bytes)
    last = max((update.update for update in trace.updates()), default=0)
    if last < saved.version or zlib.crc32(text) != saved.checksum:
        raise TraceError(
            f"{path} is missing records that it had at the checkpoint of version "
            f"{saved.version:,}, or they were changed; its last update is {last:,}"
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
