# SPDX-License-Identifier: BSD-3-Clause
"""`paceline compare`: one script under several rules, one after the other, on real processes."""

import sys
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from paceline.cli.report import report_lines
from paceline.cli.run import Load, described
from paceline.cli.show import print_table, table_text
from paceline.core.policies import parse_policy
from paceline.errors import SpecError
from paceline.run.folder import new_run_dir
from paceline.run.launch import Launch
from paceline.run.nursery import Nursery
from paceline.run.settings import Settings
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.watch.curves import Target, final
from paceline.watch.figures import draw_comparison, draw_curves
from paceline.watch.summary import Summary, summarize
from paceline.watch.trace import Trace, read_trace
from paceline.watch.words import human_seconds, percent, three_digits

__all__ = ["run"]


@dataclass(frozen=True)
class Result:
    """What came of the script under one rule."""

    folder: Path
    trace: Trace
    summary: Summary
    step_s: float  # from update to update
    predicted_s: float | None  # by the simulator; None: nothing was injected


def run(
    script: Path,
    arguments: list[str] | None,
    policy: list[str],
    target: str,
    out: Path | None,
    load: Load,
    **options: Any,
) -> None:
    """Run the script under each rule, and show what came of it."""
    goal = Target.parse(target) if target else None
    all_settings = [described(script, options | {"policy": each}) for each in policy]
    all_settings = [
        msgspec.structs.replace(each, arguments=tuple(arguments or ())) for each in all_settings
    ]
    if len({each.policy for each in all_settings}) < len(all_settings):
        raise SpecError(f"a rule is given twice: {', '.join(policy)}")
    folder = new_run_dir(out, Path(f"compare-{script.stem}"))
    results: list[Result] = []
    with Nursery(script) as nursery:
        nursery.start()
        for place, settings in enumerate(all_settings, start=1):
            print(f"{settings.policy}, {place} of {len(all_settings)}", file=sys.stderr)
            code = _launch(settings, folder, nursery, load)
            if code:
                print(f"{settings.policy} has failed, so the comparison ends", file=sys.stderr)
                sys.exit(code)
            results.append(_result(settings, folder))
    _show(results, goal, folder)


def _folder(settings: Settings, folder: Path) -> Path:
    return folder / settings.policy.replace(":", "-").replace("/", "-")


def _launch(settings: Settings, folder: Path, nursery: Nursery, load: Load) -> int:
    run_dir = _folder(settings, folder)
    run_dir.mkdir()
    is_live = sys.stderr.isatty()
    settings = msgspec.structs.replace(settings, progress=not is_live)
    launch = Launch(settings, Path(settings.script), settings.arguments, run_dir, nursery)
    screen = load("panel").Panel(settings, run_dir / "trace.jsonl") if is_live else None
    return launch.run(screen)


def _result(settings: Settings, folder: Path) -> Result:
    run_dir = _folder(settings, folder)
    trace = read_trace(run_dir / "trace.jsonl")
    return Result(run_dir, trace, summarize(trace), step_s(trace), _predicted(settings, trace))


def _predicted(settings: Settings, trace: Trace) -> float | None:
    """What the simulator makes of the same delays, drawn from the same seed."""
    updates = len(list(trace.updates()))
    if not settings.slow or updates < 2:
        return None
    spec = settings.spec
    spec = RunSpec(workers=spec.workers, steps=updates, late=spec.late, seed=spec.seed)
    return step_s(simulate(parse_policy(settings.policy), Cluster.parse(settings.slow), spec))


def step_s(trace: Trace) -> float:
    """Seconds from the first update to the last, for each."""
    times = [update.t for update in trace.updates()]
    return (times[-1] - times[0]) / max(1, len(times) - 1)


def _show(results: list[Result], goal: Target | None, folder: Path) -> None:
    columns, rows = _table(results, goal)
    header = results[0].trace.header
    title = f"{header.workers} workers"
    slow = Settings.read(results[0].folder / "spec.json").slow
    title += f", {slow}" if slow else ""
    print_table(title, columns, rows)
    traces = [result.trace for result in results]
    draw_comparison(traces, folder / "rules.png")
    figures = ["rules.png"]
    for name in _logged(results):
        draw_curves(
            traces, name, goal if goal and goal.name == name else None, folder / f"{name}.png"
        )
        figures.append(f"{name}.png")
    _write_report(results, table_text(title, columns, rows), figures, folder / "report.md")
    print(f"The figures are in {folder}: {', '.join(figures)}; the report is {folder}/report.md")


def _logged(results: list[Result]) -> list[str]:
    """The names under which every script has logged something."""
    names = [
        {name for update in result.trace.updates() for name in update.scalars} for result in results
    ]
    return sorted(set.intersection(*names))


def _table(results: list[Result], goal: Target | None) -> tuple[list[str], list[list[str]]]:
    columns = ["rule", "updates/s", "staleness", "dropped", "step"]
    if any(result.predicted_s is not None for result in results):
        columns += ["predicted", "off by"]
    if goal is not None:
        columns += [f"to {goal}", f"final {goal.name}"]
    return columns, [_row(result, goal) for result in results]


def _row(result: Result, goal: Target | None) -> list[str]:
    summary = result.summary
    row = [
        summary.policy,
        three_digits(summary.updates_per_s),
        f"{summary.staleness_mean:.2f}",
        percent(1 - summary.acceptance),
        human_seconds(result.step_s),
    ]
    if result.predicted_s is not None:
        off = result.step_s / result.predicted_s - 1
        row += [human_seconds(result.predicted_s), f"{100 * off:+.1f} %"]
    if goal is not None:
        reached_at, last = goal.reached_at(result.trace), final(result.trace, goal.name)
        row.append(human_seconds(reached_at) if isfinite(reached_at) else "never")
        row.append("-" if last is None else f"{last:.4g}")
    return row


def _write_report(results: list[Result], table: str, figures: list[str], path: Path) -> None:
    parts = [f"```\n{table}```", *(f"![{name}]({name})" for name in figures)]
    for result in results:
        lines = "\n".join(report_lines(result.trace, result.folder / "trace.jsonl"))
        parts.append(f"## {result.summary.policy}\n\n```\n{lines}\n```")
    path.write_text("# The rules side by side\n\n" + "\n\n".join(parts) + "\n", encoding="utf-8")
