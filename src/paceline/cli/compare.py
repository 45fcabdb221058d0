# SPDX-License-Identifier: BSD-3-Clause
"""`paceline compare`: one script under several rules, one after the other, on real processes.

A rule that fails is left out of the table, and the others are run all the same: that it does not
train is a result, too. A script that makes no update would make none under the next rule either.
"""

import sys
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from paceline.cli.report import report_lines
from paceline.cli.run import Load, described, launch
from paceline.cli.show import print_table, table_text
from paceline.core.policies import parse_policy
from paceline.errors import PacelineError, SpecError
from paceline.run.launch.forkserver import ForkServer
from paceline.run.launch.output import patience_with
from paceline.run.launch.run_folder import new_run_dir
from paceline.run.settings import Settings
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.trace.schema import Trace
from paceline.watch.curves import Target, final, logged
from paceline.watch.figures import draw_comparison, draw_curves
from paceline.watch.summary import Summary, summarize
from paceline.watch.words import human_seconds, join_words, percent, three_digits

__all__ = ["run"]

STOPPED = 128  # somebody has stopped a run whose exit code is larger
INTERRUPTED = STOPPED + 2


@dataclass(frozen=True)
class Result:
    """What came of the script under one rule."""

    folder: Path
    trace: Trace
    summary: Summary
    step_s: float  # from update to update
    predicted_s: float | None  # by the simulator; None: there is nothing to predict


@dataclass
class Comparison:
    """What came of the script under all rules."""

    folder: Path
    goal: Target | None
    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what stands below the table
    code: int = 0  # that we end with


def run(
    script: Path,
    arguments: list[str] | None,
    policy: list[str] | None,
    target: str,
    out: Path | None,
    load: Load,
    **options: Any,
) -> None:
    """Run the script under each rule, and show what came of it."""
    goal = Target.parse(target) if target else None
    rules = policy or _round_of_rules(options["workers"])
    _check(rules, options["workers"])
    all_settings = [described(script, options | {"policy": each}) for each in rules]
    all_settings = [
        msgspec.structs.replace(each, arguments=tuple(arguments or ())) for each in all_settings
    ]
    comparison = Comparison(new_run_dir(out, Path(f"compare-{script.stem}")), goal)
    with ForkServer(script) as forkserver:
        forkserver.start()
        _run_all(comparison, all_settings, forkserver, load)
    if comparison.results:
        _show(comparison)
    else:
        _say("\n".join(comparison.notes))
    sys.exit(comparison.code)


def _round_of_rules(workers: int) -> list[str]:
    """The rules side by side, with settings that make sense for so many workers."""
    backups = [f"backup:{b}" for b in (1, 2) if b < workers]
    softsync = [f"softsync:{workers // 2}"] if workers >= 4 else []  # softsync:1 is async
    return ["sync", *backups, *softsync, "async"]


def _check(rules: list[str], workers: int) -> None:
    """Raise SpecError unless each of them can be run with so many workers."""
    policies = [parse_policy(rule) for rule in rules]
    if len(set(policies)) < len(policies):
        raise SpecError(f"a rule is given twice: {', '.join(rules)}")
    spec = RunSpec(workers=workers)
    for policy in policies:
        try:
            policy.validate(spec)
        except SpecError as error:
            raise SpecError(f"{policy} does not fit: {error}") from None


def _run_all(
    comparison: Comparison, all_settings: list[Settings], forkserver: ForkServer, load: Load
) -> None:
    """Run them one after the other, until one was stopped or has made no update."""
    rules = [settings.policy for settings in all_settings]
    for place, settings in enumerate(all_settings, start=1):
        _say(f"{settings.policy}, {place} of {len(rules)}")
        try:
            code = _launch(settings, comparison.folder, forkserver, load)
            result = None if code > STOPPED else _result(settings, comparison.folder)
        except KeyboardInterrupt:
            code, result = INTERRUPTED, None
        if result is None:
            _leave_out(comparison, settings, code or PacelineError.exit_code)
            comparison.notes.append(f"So the comparison ends{_without(rules[place:])}.")
            return
        if code:
            _leave_out(comparison, settings, code)
            _say(comparison.notes[-1])
        else:
            comparison.results.append(result)
        if place == 1 and (unlogged := _unlogged(comparison)):
            _say(unlogged)  # before the other rules take their time


def _leave_out(comparison: Comparison, settings: Settings, code: int) -> None:
    """This rule is not in the table; say why."""
    is_stopped = code > STOPPED
    comparison.code = code if is_stopped else comparison.code or code
    how = "was stopped" if is_stopped else "has failed"
    run_dir = _folder(settings, comparison.folder)
    comparison.notes.append(f"{settings.policy} {how}; its folder is {run_dir}.")


def _say(text: str) -> None:
    with patience_with(sys.stderr):
        print(text, file=sys.stderr)


def _without(rules: list[str]) -> str:
    return f" without {join_words(rules)}" if rules else ""


def _folder(settings: Settings, folder: Path) -> Path:
    return folder / settings.policy.replace(":", "-").replace("/", "-")


def _launch(settings: Settings, folder: Path, forkserver: ForkServer, load: Load) -> int:
    run_dir = _folder(settings, folder)
    run_dir.mkdir()
    return launch(settings, run_dir, forkserver, load)


def _result(settings: Settings, folder: Path) -> Result | None:
    """What came of a run; None: it has made no update."""
    run_dir = _folder(settings, folder)
    path = run_dir / "trace.jsonl"
    if not path.exists():
        return None
    trace = read_trace(path)
    if not any(trace.updates()):
        return None
    return Result(run_dir, trace, summarize(trace), step_s(trace), _predicted(settings, trace))


def _predicted(settings: Settings, trace: Trace) -> float | None:
    """What the simulator makes of the same delays, drawn from the same seed."""
    updates = len(list(trace.updates()))
    if not settings.slow or updates < 2:
        return None
    spec = settings.spec
    spec = RunSpec(workers=spec.workers, steps=updates, late=spec.late, seed=spec.seed)
    found = step_s(simulate(parse_policy(settings.policy), Cluster.parse(settings.slow), spec))
    return found or None  # no delay is no prediction


def step_s(trace: Trace) -> float:
    """Seconds from the first update to the last, for each."""
    times = [update.t for update in trace.updates()]
    return (times[-1] - times[0]) / max(1, len(times) - 1)


# ---------------------------------------------------------------------------------- what is shown


def _show(comparison: Comparison) -> None:
    results, goal, folder = comparison.results, comparison.goal, comparison.folder
    notes = [*comparison.notes, *filter(None, (_unlogged(comparison), _uneven(results)))]
    columns, rows = _table(results, goal)
    header = results[0].trace.header
    title = f"{header.workers} workers"
    slow = Settings.read(results[0].folder / "spec.json").slow
    title += f", {slow}" if slow else ""
    traces = [result.trace for result in results]
    draw_comparison(traces, folder / "rules.png")
    figures = ["rules.png"]
    for name in _names(results):
        figure = f"{name.replace('/', '-')}.png"
        draw_curves(traces, name, goal if goal and goal.name == name else None, folder / figure)
        figures.append(figure)
    text = "\n".join([table_text(title, columns, rows).rstrip("\n"), *notes])
    _write_report(results, text, figures, folder / "report.md")
    print_table(title, columns, rows)
    for note in notes:
        print(note)
    print(f"The figures are in {folder}: {', '.join(figures)}; the report is {folder}/report.md")


def _names(results: list[Result]) -> list[str]:
    """The names under which something was logged."""
    return sorted({name for result in results for name in logged(result.trace)})


def _unlogged(comparison: Comparison) -> str:
    """A sentence, if the target is of something that was never logged."""
    names, goal = _names(comparison.results), comparison.goal
    if goal is None or not comparison.results or goal.name in names:
        return ""
    return (
        f"Nothing was logged as {goal.name}, so that target could not be reached; "
        f"the script logs {join_words(names) if names else 'nothing'}."
    )


def _uneven(results: list[Result]) -> str:
    """A sentence, if the rules have learnt from more or less, beyond what is left of an update."""
    if not _is_uneven(results):
        return ""
    why = (
        "; to give all of them the same, end with --samples or --epochs instead of --steps"
        if results[0].trace.header.steps is not None
        else ""
    )
    return f"The rules have learnt from unequal numbers of samples: compare with care{why}."


def _is_uneven(results: list[Result]) -> bool:
    samples = [result.summary.samples for result in results]
    largest_update = max(result.summary.samples / result.summary.updates for result in results)
    return max(samples) - min(samples) > largest_update


def _table(results: list[Result], goal: Target | None) -> tuple[list[str], list[list[str]]]:
    """The columns that any of the rules has, and the rows."""
    cells = [_cells(result, goal, _is_uneven(results)) for result in results]
    columns = max(cells, key=len)
    return list(columns), [[row.get(column, "-") for column in columns] for row in cells]


def _cells(result: Result, goal: Target | None, with_samples: bool) -> dict[str, str]:
    summary = result.summary
    cells = {"rule": summary.policy, "updates/s": three_digits(summary.updates_per_s)}
    if with_samples:
        cells["samples"] = f"{result.summary.samples:,}"
    cells |= {
        "staleness": f"{summary.staleness_mean:.2f}",
        "dropped": percent(1 - summary.acceptance),
        "step": human_seconds(result.step_s),
    }
    if result.predicted_s is not None:
        off = result.step_s / result.predicted_s - 1
        cells |= {"predicted": human_seconds(result.predicted_s), "off by": f"{100 * off:+.1f} %"}
    if goal is not None:
        reached_at, last = goal.reached_at(result.trace), final(result.trace, goal.name)
        missed = "never" if goal.name in logged(result.trace) else "not logged"
        cells[f"to {goal}"] = human_seconds(reached_at) if isfinite(reached_at) else missed
        cells[f"final {goal.name}"] = "-" if last is None else f"{last:.4g}"
    return cells


def _write_report(results: list[Result], table: str, figures: list[str], path: Path) -> None:
    parts = [f"```\n{table}\n```", *(f"![{name}]({name})" for name in figures)]
    for result in results:
        lines = "\n".join(report_lines(result.trace, result.folder / "trace.jsonl"))
        parts.append(f"## {result.summary.policy}\n\n```\n{lines}\n```")
    path.write_text("# The rules side by side\n\n" + "\n\n".join(parts) + "\n", encoding="utf-8")
