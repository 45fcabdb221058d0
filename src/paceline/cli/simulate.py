# SPDX-License-Identifier: BSD-3-Clause
"""`paceline simulate`: one or several rules on a simulated cluster."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from paceline.cli import EXIT_FAILED
from paceline.cli.printing import (
    DelayedProgressBar,
    human_seconds,
    percent,
    print_json,
    print_table,
    three_digits,
)
from paceline.cli.simulation_inputs import Inputs, read_inputs
from paceline.cli.verb_options import SimulateOptions
from paceline.core.policy import Policy
from paceline.errors import SpecError
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec, parse_seconds
from paceline.trace.schema import Ended, Trace, write_trace
from paceline.watch.figures import check_ending, draw_comparison
from paceline.watch.summary import Summary, summarize
from paceline.watch.traffic import traffic_cells

__all__ = ["COLUMNS", "comparison_rows", "run", "simulate_all"]

DEFAULT_STEPS = 1000
SHOWN_WORKERS = 40

COLUMNS = ["rule", "updates/s", "step", "p99", "staleness", "accepted", "idle", "wasted"]
TRAFFIC_COLUMNS = ["pulled/update", "pushed/update", "unused/update"]


def run(options: SimulateOptions) -> None:
    """Simulate each rule, print the comparison, write the requested files."""
    inputs = _read_inputs(options)
    policies = options.policy or _default_policies(inputs.spec.workers)
    if options.out is not None and len(policies) > 1:
        raise SpecError(
            f"--out writes the trace of one rule, but there are {len(policies)}; give one --policy"
        )
    check_ending(options.plot)
    until = parse_seconds(options.until, "--until") if options.until else None
    traces = simulate_all(policies, inputs.cluster, inputs.spec, until)
    if options.out is not None:
        write_trace(traces[0], options.out)
    moved = [trace for trace in traces if any(trace.updates())]
    if options.plot is not None and moved:
        draw_comparison(moved, options.plot)
    summaries = [summarize(trace) for trace in moved]
    if options.as_json:
        print_json(summaries)
    elif moved:
        _print(summaries, inputs)
    if inputs.recording is not None:
        times = inputs.recording.left_to_chance()
        note = f"Replayed: {times}; after the last recorded time, times are drawn at random."
        print(note, file=sys.stderr if options.as_json else sys.stdout)
    _exit_if_failed(traces)


def _read_inputs(options: SimulateOptions) -> Inputs:
    inputs = read_inputs(options, options.trace, in_order=True)
    steps = DEFAULT_STEPS if options.steps is None and not options.until else options.steps
    spec = replace(inputs.spec, steps=steps, min_workers=options.min_workers)
    return replace(inputs, spec=spec)


def simulate_all(
    policies: Sequence[str | Policy], cluster: Cluster, spec: RunSpec, until: float | None = None
) -> list[Trace]:
    """Simulate the rules one after the other, with one progress bar for all of them."""
    traces = []
    with DelayedProgressBar() as bar:
        for number, policy in enumerate(policies):
            show = partial(bar.show_part, f"simulating {policy}", number, len(policies))
            traces.append(simulate(policy, cluster, spec, until=until, on_progress=show))
    return traces


def _default_policies(workers: int) -> list[str]:
    """Return one rule of each kind, with settings that suit this number of workers."""
    return [
        "sync",
        f"backup:{min(max(1, workers // 8), workers - 1)}",
        f"batchsync:{workers}",
        "deadline",
        "ssp:3",
        "delayed:1",
        f"softsync:{max(1, workers // 2)}",
        "async",
    ]


def _exit_if_failed(traces: list[Trace]) -> None:
    """Report runs that did not finish on standard error and exit."""
    failures = []
    for trace in traces:
        end = trace.records[-1]
        if isinstance(end, Ended) and end.reason != "finished":
            failures.append(f"{trace.header.policy}: {end.reason}")
        elif not any(trace.updates()):
            failures.append(f"{trace.header.policy}: ended before its first update")
    if failures:
        print(f"paceline: {'; '.join(failures)}", file=sys.stderr)
        sys.exit(EXIT_FAILED)


def _print(summaries: list[Summary], inputs: Inputs) -> None:
    first, traffic = summaries[0], inputs.cluster.network is not None
    title = f"{first.workers} workers, {inputs.cluster.times}"
    columns = COLUMNS + (TRAFFIC_COLUMNS if traffic else [])
    print_table(title, columns, comparison_rows(summaries, traffic))
    if len(summaries) == 1 and first.workers <= SHOWN_WORKERS:
        _print_workers(first)
    if any(s.staleness_mean > 0 for s in summaries):
        print(
            "More updates per second are not more progress: a stale gradient is worth less than a "
            "fresh one."
        )


def comparison_rows(summaries: list[Summary], traffic: bool = False) -> list[list[str]]:
    """Return one table row per run."""
    rows = []
    for s in summaries:
        row = [
            s.policy,
            "-" if s.updates_per_s is None else three_digits(s.updates_per_s),
            human_seconds(s.step_s.mean) if s.step_s else "-",
            human_seconds(s.step_s.p99) if s.step_s else "-",
            f"{s.staleness_mean:.2f}",
            percent(s.acceptance),
            percent(s.idle_share),
            percent(s.wasted_share),
        ]
        if traffic:
            row += traffic_cells(s.traffic_per_update)
        rows.append(row)
    return rows


def _print_workers(summary: Summary) -> None:
    rows = [
        [
            f"{w.worker}",
            f"{sum(w.fates.values())}",
            percent(w.acceptance),
            human_seconds(w.compute_s.mean) if w.compute_s else "-",
            human_seconds(w.compute_s.p99) if w.compute_s else "-",
            percent(w.idle_share),
            percent(w.wasted_share),
        ]
        for w in summary.by_worker
    ]
    columns = ["worker", "gradients", "accepted", "computes", "p99", "idle", "wasted"]
    print_table("by worker", columns, rows)
