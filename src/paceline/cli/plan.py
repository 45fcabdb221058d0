# SPDX-License-Identifier: BSD-3-Clause
"""`paceline plan`: how many of the workers should be backups, and what that would gain."""

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from paceline.cli.show import Patience, human_seconds, print_json, print_table
from paceline.cli.simulate import COLUMNS, comparison_rows
from paceline.core.policies import POLICIES, Backup, parse_policy
from paceline.core.policy import Policy
from paceline.errors import SpecError, TraceError
from paceline.latency import Recorded
from paceline.sim.cluster import Cluster
from paceline.sim.convergence import (
    Convergence,
    estimate_noise_scale,
    every_gradient_counts,
    measured,
    noise_scale,
    read_table,
)
from paceline.sim.fast import draw_times
from paceline.sim.planner import Plan, plan
from paceline.sim.recording import recorded_times
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.watch.figures import check_ending, draw_plan
from paceline.watch.summary import Summary, summarize
from paceline.watch.trace import Trace, read_trace

__all__ = ["run"]

DEFAULT_WORKERS = 8
DEFAULT_BATCH = 32
COMPARED_STEPS = 500
ALL_ROWS = 24  # up to so many N are all shown


def run(workers: int | None, latency: str, trace: Path | None, **options: Any) -> None:
    """Plan, print, draw what was asked for."""
    pilot = None if trace is None else read_trace(trace)
    options["batch"] = _batch(pilot) if options["batch"] is None else options["batch"]
    cluster = Cluster.parse(latency, options["network"], options["faults"], options["batch"])
    notes: list[str] = []
    if pilot is not None:
        recording = recorded_times(pilot, options["seed"], with_travel=not options["network"])
        cluster = replace(cluster, times=Recorded(recording.times))
        notes.append(f"recording: {recording.left_to_chance()}")
        workers = len(recording.times) if workers is None else workers
    workers = DEFAULT_WORKERS if workers is None else workers
    spec = RunSpec(workers=workers, late=options["late"], seed=options["seed"])
    convergence = _convergence(pilot, spec.workers, options)
    compared = _compared(options["policies"], spec)
    check_ending(options["plot"])
    with Patience("planning") as patience:
        result = plan(cluster, spec, convergence, patience.show)
    summaries = [
        _compare(each, result, cluster, replace(spec, steps=COMPARED_STEPS)) for each in compared
    ]
    if options["plot"] is not None:
        _draw(result, cluster, spec, options["plot"])
    if options["as_json"]:
        print_json({"plan": result, "sentence": result.sentence(), "policies": summaries})
    else:
        _print(result, summaries, notes)


def _batch(pilot: Trace | None) -> int:
    """Samples in a gradient of the pilot run, on average."""
    seen = [g.samples for g in pilot.gradients() if g.samples] if pilot else []
    return round(sum(seen) / len(seen)) if seen else DEFAULT_BATCH


def _convergence(pilot: Trace | None, workers: int, options: dict[str, Any]) -> Convergence:
    """How many updates are needed, from the best that is known."""
    samples, table = options["noise_scale"], options["updates_table"]
    batch, updates = options["batch"], options["updates"]
    if not 0 < updates < inf:
        raise SpecError(f"--updates must be > 0 and finite, got {updates:g}")
    if samples is not None and table is not None:
        raise SpecError("give --noise-scale or --updates-table, not both")
    if table is not None:
        return measured(read_table(table))
    if samples is None and pilot is not None:
        try:
            samples = estimate_noise_scale(pilot)
        except TraceError:
            samples = None
    if samples is not None:
        return noise_scale(samples, batch, workers, updates)
    return every_gradient_counts(workers, updates)


def _compared(text: str, spec: RunSpec) -> list[str]:
    """The rules to compare, known to be possible before any time is spent."""
    policies = split_policies(text)
    for each in policies:
        if each != Backup.name:
            parse_policy(each).validate(spec)
    return policies


def split_policies(text: str) -> list[str]:
    """Split at commas, but not at those inside a policy: "softsync:4,lr=constant,async" is two."""
    policies: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if part.partition(":")[0] in POLICIES or not policies:
            policies.append(part)
        else:
            policies[-1] += f",{part}"
    return policies


def _compare(name: str, result: Plan, cluster: Cluster, spec: RunSpec) -> Summary:
    """Simulate a rule; a bare "backup" has the b that was planned."""
    policy: Policy = Backup(result.best.backups) if name == Backup.name else parse_policy(name)
    return summarize(simulate(policy, cluster, spec))


def _print(result: Plan, summaries: list[Summary], notes: list[str]) -> None:
    workers = result.best.machines
    shown = [o for o in result.options if _is_shown(o.backups, result)]
    rows = [
        [
            f"{o.needed}{' *' if o is result.best else ''}",
            f"{o.backups}",
            human_seconds(o.step_s["cancel"]),
            human_seconds(o.step_s["finish"]),
            f"{o.updates:,.0f}",
            human_seconds(o.seconds),
            f"{result.sync.seconds / o.seconds:.2f}",
            f"{o.machine_hours:.3g}",
        ]
        for o in reversed(shown)
    ]
    columns = ["N", "b", "update, late work cancelled", "finished", "updates", "to target"]
    print_table(f"{workers} workers", [*columns, "x sync", "machine-hours"], rows)
    print(result.sentence())
    cheap = result.cheapest
    if cheap.machines < workers:
        share = 1 - cheap.machine_hours / result.sync.machine_hours
        print(
            f"Cheapest that is no slower than sync: keep the {cheap.machines} fastest machines, "
            f"backup:{cheap.backups}, {cheap.machine_hours:.3g} machine-hours ({share:.0%} fewer)."
        )
    for assumption in (*result.assumptions, *notes):
        print(f"Assumed: {assumption}.")
    if summaries:
        print_table(f"throughput, {COMPARED_STEPS} updates", COLUMNS, comparison_rows(summaries))
        if any(s.staleness_mean > 0 for s in summaries):
            print(
                "Warning: throughput is not convergence; rules with staleness above 0 need more "
                "updates, or end at a worse model."
            )


def _is_shown(backups: int, result: Plan) -> bool:
    """Everything for few workers; otherwise around the best, around sync, and some beyond."""
    workers = result.best.machines
    if workers <= ALL_ROWS or backups <= 2 or abs(backups - result.best.backups) <= 4:
        return True
    return backups % max(1, workers // 10) == 0 or backups == workers - 1


def _draw(result: Plan, cluster: Cluster, spec: RunSpec, path: Path) -> None:
    arrivals = (
        draw_times(cluster.times, spec.workers, 256, spec.seed).ravel()
        if cluster.times.is_stationary
        else None
    )
    draw_plan(
        needed=[o.needed for o in result.options],
        step_s={late: [o.step_s[late] for o in result.options] for late in result.sync.step_s},
        seconds=[o.seconds for o in result.options],
        intervals=[(o.interval.low, o.interval.high) for o in result.options if o.interval],
        arrivals=arrivals,
        path=path,
    )
