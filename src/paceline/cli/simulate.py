# SPDX-License-Identifier: BSD-3-Clause
"""`paceline simulate`: one rule or several on one simulated cluster."""

import sys
from dataclasses import replace
from typing import Any, TypeGuard

from paceline.cli.show import (
    Patience,
    human_bytes,
    human_seconds,
    percent,
    print_json,
    print_table,
)
from paceline.core.events import Fate
from paceline.errors import SpecError
from paceline.sim.cluster import Cluster
from paceline.sim.recording import Recording, Replayed, recorded_times
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec, parse_seconds
from paceline.watch.figures import check_ending, draw_comparison
from paceline.watch.summary import Summary, summarize
from paceline.watch.trace import Ended, Record, Trace, read_trace, write_trace

__all__ = ["comparison_rows", "run"]

STALLED = 1
SHOWN_WORKERS = 40

COLUMNS = [
    "policy",
    "updates/s",
    "step mean",
    "p50",
    "p99",
    "staleness",
    "accepted",
    "idle",
    "wasted",
]
TRAFFIC_COLUMNS = ["sent/update", "in vain"]


def run(policy: list[str] | None, **options: Any) -> None:
    """Simulate, print, write what was asked for."""
    recording = None
    if options["replay"] is not None:
        recorded = read_trace(options["replay"])
        recording = recorded_times(recorded, options["seed"], with_travel=not options["network"])
    cluster, spec = _cluster_and_spec(recording, options)
    policies = policy or _round_of_policies(spec.workers)
    if options["trace"] is not None and len(policies) > 1:
        raise SpecError("--trace writes one trace; give one --policy with it")
    check_ending(options["plot"])
    until = parse_seconds(options["until"], "--until") if options["until"] else None
    traces = [_simulate(each, cluster, spec, until) for each in policies]
    if options["trace"] is not None:
        write_trace(traces[0], options["trace"])
    alive = [trace for trace in traces if any(trace.updates())]
    if options["plot"] is not None and alive:
        draw_comparison(alive, options["plot"])
    summaries = [summarize(trace) for trace in alive]
    if options["as_json"]:
        print_json(summaries)
    elif alive:
        _print(summaries, cluster, recording)
    _exit_if_stalled(traces)


def _exit_if_stalled(traces: list[Trace]) -> None:
    stalled = [(t.header.policy, t.records[-1]) for t in traces]
    words = [f"{policy}: {end.reason}" for policy, end in stalled if _has_stalled(end)]
    if words:
        print(f"paceline: {'; '.join(words)}", file=sys.stderr)
        sys.exit(STALLED)


def _has_stalled(end: Record) -> TypeGuard[Ended]:
    return isinstance(end, Ended) and end.reason.startswith("stalled")


def _cluster_and_spec(
    recording: Recording | None, options: dict[str, Any]
) -> tuple[Cluster, RunSpec]:
    cluster = Cluster.parse(
        options["latency"], options["network"], options["faults"], options["batch"]
    )
    workers = options["workers"]
    if recording is not None:
        cluster = replace(cluster, times=Replayed(recording))
        workers = len(recording.times)
    spec = RunSpec(
        workers=workers,
        steps=options["steps"],
        min_workers=options["min_workers"],
        late=options["late"],
        seed=options["seed"],
    )
    return cluster, spec


def _round_of_policies(workers: int) -> list[str]:
    """The rules side by side, with settings that make sense for so many workers."""
    some = max(1, workers // 8)
    return [
        "sync",
        f"backup:{min(some, workers - 1)}",
        f"batchsync:{workers}",
        "deadline",
        "ssp:3",
        "delayed:1",
        f"softsync:{max(1, workers // 2)}",
        "async",
    ]


def _simulate(policy: str, cluster: Cluster, spec: RunSpec, until: float | None) -> Trace:
    with Patience(f"simulating {policy}") as patience:
        steps = spec.steps or 1
        return simulate(
            policy, cluster, spec, until=until, on_update=lambda u: patience.show(u / steps)
        )


def _print(summaries: list[Summary], cluster: Cluster, recording: Recording | None) -> None:
    first = summaries[0]
    title = f"{first.workers} workers, {cluster.times}"
    traffic = cluster.network is not None
    columns = COLUMNS + (TRAFFIC_COLUMNS if traffic else [])
    print_table(title, columns, comparison_rows(summaries, traffic))
    if len(summaries) == 1 and first.workers <= SHOWN_WORKERS:
        _print_workers(first)
    if any(s.staleness_mean > 0 for s in summaries):
        print("Updates a second are not progress: a stale gradient is worth less than a fresh one.")
    if recording is not None:
        print(f"Replayed: {recording.left_to_chance()}; beyond the recording, drawn from it.")


def comparison_rows(summaries: list[Summary], traffic: bool = False) -> list[list[str]]:
    """One row for each run."""
    rows = []
    for s in summaries:
        accepted = s.fates.get(Fate.ACCEPTED, 0) / sum(s.fates.values())
        row = [
            s.policy,
            f"{s.updates_per_s:.3g}",
            human_seconds(s.step_s.mean),
            human_seconds(s.step_s.p50),
            human_seconds(s.step_s.p99),
            f"{s.staleness_mean:.2f}",
            percent(accepted),
            percent(s.idle_share),
            percent(s.wasted_share),
        ]
        if traffic:
            row += [human_bytes(s.sent_bytes_per_update), human_bytes(s.vain_bytes_per_update)]
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
