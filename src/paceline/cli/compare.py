# SPDX-License-Identifier: BSD-3-Clause
"""`paceline compare`: train one script under several rules, one after the other.

A rule that fails is left out of the table and the others still run: that the script doesn't train
under it is a result. If a run makes no update at all, the comparison stops, because the script
would make none under the next rule either.
"""

import sys
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from statistics import fmean
from time import monotonic

import msgspec

from paceline.cli.end_of_run import report_lines
from paceline.cli.printing import print_table, table_text
from paceline.cli.run import Load, launch, new_settings
from paceline.cli.verb_options import CompareOptions
from paceline.core.policies import parse_policy
from paceline.core.policy import Policy
from paceline.errors import PacelineError, SpecError
from paceline.run.launch.forkserver import ForkServer
from paceline.run.launch.run_folder import new_run_dir
from paceline.run.launch.screen import ignoring_closed_stream
from paceline.run.settings import Settings
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.trace.schema import Trace
from paceline.watch.curves import Target, final, logged
from paceline.watch.figures import draw_comparison, draw_curves
from paceline.watch.segments import kept_updates, split, step_times
from paceline.watch.summary import Summary, summarize
from paceline.watch.words import human_seconds, join_words, percent, three_digits

__all__ = ["run"]

STOPPED = 128  # an exit code above this means that a signal stopped the run
INTERRUPTED = STOPPED + 2


@dataclass(frozen=True)
class Result:
    """The outcome of the script under one rule."""

    folder: Path
    trace: Trace
    summary: Summary
    step_s: float | None  # mean time between updates; None: gaps of the trace hide it
    predicted_s: float | None  # by the simulator; None without injected delays


@dataclass
class Comparison:
    """The outcome of the script under all rules."""

    folder: Path
    goal: Target | None
    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # printed below the table
    code: int = 0  # exit code


def run(options: CompareOptions, load: Load) -> None:
    """Train the script under each rule and show the results."""
    goal = Target.parse(options.target) if options.target else None
    rules = options.policy or _default_rules(options.workers)
    _check([parse_policy(rule, (options.script.parent, "")) for rule in rules], options.workers)
    arguments = tuple(options.arguments or ())
    all_settings = [
        msgspec.structs.replace(new_settings(options, rule), arguments=arguments) for rule in rules
    ]
    folder = new_run_dir(options.out, Path(f"compare-{options.script.stem}"))
    comparison = Comparison(folder, goal)
    with ForkServer(options.script) as forkserver:
        forkserver.start()
        _run_all(comparison, all_settings, forkserver, load)
    if comparison.results:
        _show(comparison)
        if _unlogged(comparison):  # the name is probably mistyped
            comparison.code = comparison.code or SpecError.exit_code
    else:
        _say("\n".join(comparison.notes))
    sys.exit(comparison.code)


def _default_rules(workers: int) -> list[str]:
    """Return the rules to compare, with settings that suit this number of workers."""
    backups = [f"backup:{b}" for b in (1, 2) if b < workers]
    softsync = [f"softsync:{workers // 2}"] if workers >= 4 else []  # softsync:1 is async
    return ["sync", *backups, *softsync, "async"]


def _check(policies: list[Policy], workers: int) -> None:
    """Raise SpecError unless every rule is given once and works with this many workers."""
    if len(set(policies)) < len(policies):
        raise SpecError(f"each rule may be given once, got {', '.join(map(str, policies))}")
    spec = RunSpec(workers=workers)
    for policy in policies:
        try:
            policy.validate(spec)
        except SpecError as error:
            raise SpecError(f"{policy} is not possible: {error}") from None


def _run_all(
    comparison: Comparison, all_settings: list[Settings], forkserver: ForkServer, load: Load
) -> None:
    """Run the rules one after the other, until one is stopped or makes no update."""
    rules, began = [settings.policy for settings in all_settings], monotonic()
    for number, settings in enumerate(all_settings, start=1):
        left = _left(monotonic() - began, number - 1, len(rules))
        _say(f"{settings.policy}, {number} of {len(rules)}{left}")
        try:
            code = _launch(settings, comparison.folder, forkserver, load)
            result = None if code > STOPPED else _result(settings, comparison.folder)
        except KeyboardInterrupt:
            code, result = INTERRUPTED, None
        if result is None:
            _leave_out(comparison, settings, code or PacelineError.exit_code)
            comparison.notes.append(f"The comparison stops here{_without(rules[number:])}.")
            return
        if code:
            _leave_out(comparison, settings, code)
            _say(comparison.notes[-1])
        else:
            comparison.results.append(result)
        if number == 1 and (unlogged := _unlogged(comparison)):
            _say(unlogged)  # now, not after the other rules have run


def _left(took_s: float, done: int, of: int) -> str:
    """Return how long the other rules will take, if they take as long as those that are done."""
    return f"; about {human_seconds(took_s / done * (of - done))} left in all" if done else ""


def _leave_out(comparison: Comparison, settings: Settings, code: int) -> None:
    """Leave a rule out of the table and note why."""
    is_stopped = code > STOPPED
    comparison.code = code if is_stopped else comparison.code or code
    how = "was stopped" if is_stopped else "failed"
    run_dir = _folder(settings, comparison.folder)
    comparison.notes.append(f"{settings.policy} {how}; see {run_dir}.")


def _say(text: str) -> None:
    with ignoring_closed_stream(sys.stderr):
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
    """Return the result of a run, or None if it made no update."""
    run_dir = _folder(settings, folder)
    path = run_dir / "trace.jsonl"
    if not path.exists():
        return None
    trace = read_trace(path)
    if not kept_updates(split(trace)):
        return None
    return Result(run_dir, trace, summarize(trace), step_s(trace), _predicted(settings, trace))


def _predicted(settings: Settings, trace: Trace) -> float | None:
    """Return the step time that the simulator predicts for the same delays and seed."""
    updates = max(update.update for update in trace.updates())
    if not settings.latency or updates < 2:
        return None
    spec = settings.spec
    spec = RunSpec(workers=spec.workers, steps=updates, late=spec.late, seed=spec.seed)
    found = step_s(simulate(settings.parse_policy(), Cluster.parse(settings.latency), spec))
    return found or None  # without any delay there is nothing to predict


def step_s(trace: Trace) -> float | None:
    """Return the mean time between updates; None: not known."""
    steps = step_times(trace)
    return fmean(step.lasted_s for step in steps) if steps else None


# ---- output ----


def _show(comparison: Comparison) -> None:
    results, goal, folder = comparison.results, comparison.goal, comparison.folder
    notes = [*comparison.notes, *filter(None, (_unlogged(comparison), _uneven(results)))]
    columns, rows = _table(results, goal)
    header = results[0].trace.header
    title = f"{header.workers} workers"
    latency = Settings.read(results[0].folder / "spec.json").latency
    title += f", {latency}" if latency else ""
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
    print(f"Figures in {folder}: {', '.join(figures)}; report: {folder}/report.md")


def _names(results: list[Result]) -> list[str]:
    """Return the names of all logged values."""
    return sorted({name for result in results for name in logged(result.trace)})


def _unlogged(comparison: Comparison) -> str:
    """Return a warning if the value of the target was never logged."""
    names, goal = _names(comparison.results), comparison.goal
    if goal is None or not comparison.results or goal.name in names:
        return ""
    return (
        f"The script never logged {goal.name}, so the target can't be reached; "
        f"it logged {join_words(names) if names else 'nothing'}."
    )


def _uneven(results: list[Result]) -> str:
    """Return a warning if the rules trained on clearly different numbers of samples."""
    if not _is_uneven(results):
        return ""
    why = (
        "; use --samples or --epochs instead of --steps to give all of them the same"
        if results[0].trace.header.steps is not None
        else ""
    )
    return f"The rules trained on different numbers of samples, so compare with care{why}."


def _is_uneven(results: list[Result]) -> bool:
    samples = [result.summary.samples for result in results]
    largest_update = max(result.summary.samples / result.summary.updates for result in results)
    return max(samples) - min(samples) > largest_update


def _table(results: list[Result], goal: Target | None) -> tuple[list[str], list[list[str]]]:
    """Return the columns that any rule has, and one row per rule."""
    cells = [_cells(result, goal, _is_uneven(results)) for result in results]
    columns = max(cells, key=len)
    return list(columns), [[row.get(column, "-") for column in columns] for row in cells]


def _cells(result: Result, goal: Target | None, with_samples: bool) -> dict[str, str]:
    summary = result.summary
    per_s = summary.updates_per_s
    cells = {"rule": summary.policy, "updates/s": "-" if per_s is None else three_digits(per_s)}
    if with_samples:
        cells["samples"] = f"{result.summary.samples:,}"
    cells |= {
        "staleness": f"{summary.staleness_mean:.2f}",
        "dropped": percent(1 - summary.acceptance),
        "step": "-" if result.step_s is None else human_seconds(result.step_s),
    }
    if result.predicted_s is not None and result.step_s is not None:
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
    path.write_text("# Comparison of rules\n\n" + "\n\n".join(parts) + "\n", encoding="utf-8")
