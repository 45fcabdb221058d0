# SPDX-License-Identifier: BSD-3-Clause
"""`paceline plan`: how many workers should be backups, and how much time that saves."""

from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from typing import Any

from paceline.cli.printing import (
    DelayedProgressBar,
    human_seconds,
    print_json,
    print_table,
    three_digits,
)
from paceline.cli.simulate import COLUMNS, comparison_rows, simulate_all
from paceline.cli.simulation_inputs import Inputs, read_inputs
from paceline.cli.verb_options import PlanOptions
from paceline.core.policies import Backup, parse_policy
from paceline.errors import SpecError
from paceline.sim.cluster import Cluster
from paceline.sim.convergence import Convergence, measured, noise_scale, read_table
from paceline.sim.fast import draw_times
from paceline.sim.planner import Option, Plan
from paceline.spec import Late, RunSpec
from paceline.watch.figures import PlannedTimes, check_ending, draw_plan
from paceline.watch.summary import Summary, summarize

__all__ = ["run"]

COMPARED_STEPS = 500
LATES: tuple[Late, Late] = ("cancel", "finish")
ALL_ROWS = 24  # with at most this many workers, show every N


def run(options: PlanOptions) -> None:
    """Plan, print the result, draw the requested figure."""
    # Complain about options before reading a trace, which may be long.
    check_ending(options.plot)
    compared = options.policy or []
    rules = {each: parse_policy(each) for each in compared if each != Backup.name}
    inputs = read_inputs(options, options.trace, in_order=False)
    cluster, spec = inputs.cluster, inputs.spec
    convergence = _convergence(inputs, options)
    for rule in rules.values():
        rule.validate(spec)
    with DelayedProgressBar("planning") as bar:
        result = inputs.plan(convergence, bar.show)
    long_spec = replace(spec, steps=COMPARED_STEPS)
    # A bare "backup" uses the planned b.
    all_rules = [rules.get(each, Backup(result.best.backups)) for each in compared]
    summaries = [summarize(trace) for trace in simulate_all(all_rules, cluster, long_spec)]
    if options.plot is not None:
        _draw(result, cluster, spec, options.plot)
    if options.as_json:
        print_json(_for_json(result, inputs, summaries))
    else:
        _print(result, inputs, summaries)


def _convergence(inputs: Inputs, options: PlanOptions) -> Convergence:
    """Choose the best available estimate of how many updates each N needs."""
    samples, table, updates = options.noise_scale, options.updates_table, options.updates
    if not 0 < updates < inf:
        raise SpecError(f"--updates must be > 0 and finite, got {updates:g}")
    if samples is not None and table is not None:
        raise SpecError("give --noise-scale or --updates-table, not both")
    if table is not None:
        return measured(read_table(table))
    if samples is not None:
        return noise_scale(samples, inputs.cluster.batch, inputs.spec.workers, updates)
    return inputs.convergence(updates)


def _for_json(result: Plan, inputs: Inputs, summaries: list[Summary]) -> dict[str, Any]:
    """Return the whole plan, including derived numbers."""
    options = [_option_for_json(option) for option in result.options]
    chosen = {"best": result.best, "baseline": result.baseline, "cheapest": result.cheapest}
    return {
        "sentence": result.sentence(),
        "plan": asdict(result)
        | {"gain": result.gain._asdict(), "options": options, "origin": inputs.origin()}
        | {name: option and _option_for_json(option) for name, option in chosen.items()},
        "policies": summaries,
    }


def _option_for_json(option: Option) -> dict[str, Any]:
    return asdict(option) | {
        "backups": option.backups,
        "rule": option.rule,
        "machine_hours": option.machine_hours,
    }


def _print(result: Plan, inputs: Inputs, summaries: list[Summary]) -> None:
    workers = result.best.machines
    shown = [o for o in result.options if _is_shown(o.backups, result)]
    rows = [
        [
            f"{o.needed}{' *' if o is result.best else ''}",
            f"{o.backups}",
            *(human_seconds(o.step_s[late]) if late in o.step_s else "-" for late in LATES),
            f"{o.updates:,.0f}",
            human_seconds(o.seconds),
            o.gain_over(result.baseline).words(),
            three_digits(o.machine_hours),
        ]
        for o in reversed(shown)
    ]
    title = f"{workers} workers; time per update with late work cancelled, and with it finished"
    columns = ["N", "b", "cancelled", "finished", "updates", "to target"]
    print_table(title, [*columns, f"x {result.baseline.rule}", "machine-h"], rows)
    print(result.sentence())
    cheap = result.cheapest
    if cheap is not None and cheap.machines < workers:
        share = 1 - cheap.machine_hours / result.options[-1].machine_hours
        print(
            f"Cheapest choice that is no slower than sync: the {cheap.machines} fastest machines "
            f"with backup:{cheap.backups}, {three_digits(cheap.machine_hours)} machine-hours "
            f"({100 * share:.0f} % fewer)."
        )
    for assumption in result.assumptions:
        print(f"Assumed: {assumption}.")
    print(f"Intervals: {result.intervals}.")
    for line in inputs.origin():
        print(line)
    if summaries:
        print_table(f"throughput, {COMPARED_STEPS} updates", COLUMNS, comparison_rows(summaries))
        if any(s.staleness_mean > 0 for s in summaries):
            print(
                "Warning: throughput is not convergence; rules with staleness above 0 need more "
                "updates or end with a worse model."
            )


def _is_shown(backups: int, result: Plan) -> bool:
    """Show every N for few workers; otherwise those near the best and near sync, and a few more."""
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
    seconds = [o.seconds for o in result.options]
    worst = [o.seconds_last for o in result.options]
    planned = PlannedTimes(
        workers=spec.workers,
        needed=[o.needed for o in result.options],
        step_s={late: [o.step_s[late] for o in result.options] for late in result.baseline.step_s},
        seconds=seconds,
        intervals=[(o.interval.low, o.interval.high) for o in result.options if o.interval],
        best=result.best.backups,
        baseline=result.baseline.backups,
        worst_seconds=worst if worst != seconds else [],
    )
    draw_plan(planned, arrivals, path)
