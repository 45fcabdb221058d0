# SPDX-License-Identifier: BSD-3-Clause
"""Draw the figures of README.md and docs/theory.md: `make figures`.

The figures depend only on this code and on the files in docs/. The timeline is drawn from two
recorded runs; `python docs/figures.py --record` records new ones.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from math import exp, gamma
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch
from scipy.stats import binom

from paceline.lab.experiment import read_tables
from paceline.lab.experiments.inception import curve
from paceline.latency import (
    Constant,
    Distribution,
    Exponential,
    Gamma,
    Latency,
    LogNormal,
    Pareto,
    Recorded,
    TimeModel,
    Weibull,
    parse_latency,
)
from paceline.sim.cluster import Cluster
from paceline.sim.convergence import every_gradient_counts, noise_scale
from paceline.sim.fast import draw_times, version_durations
from paceline.sim.orderstats import expected_finish_time, expected_order_statistic, finish_bounds
from paceline.sim.planner import plan
from paceline.spec import Late, RunSpec
from paceline.trace.reader import read_trace
from paceline.trace.schema import Trace
from paceline.watch.figure_style import (
    DPI,
    GREY,
    SERIES,
    WIDTH,
    describe_axes,
    label_target,
    legend_below,
    line_style,
    plain_log,
    rule_colour,
    split_style,
    whole_numbers,
)

FOLDER = Path(__file__).parent / "figures"
RESULTS = Path(__file__).parent / "results"
CHEN = "1.4s + exp:150ms + 2% exp:1.2s"  # close to the arrivals that Chen et al. measured
SEED = 1

LATE: dict[Late, str] = {"cancel": SERIES[2], "finish": SERIES[4]}

TIMELINE = FOLDER / "timeline"
TIMELINE_RULES = {"sync": "sync.jsonl", "backup:1": "backup-1.jsonl"}
TIMELINE_SLOW = "60ms + exp:8ms + 8% exp:200ms; worker 3 x2"
STATES = {
    "accepted": ("computing", 0),
    "late": ("computed, but too late", 1),
    "cancelled": ("cancelled: too late for the update", 1),
    "waiting": ("waiting for the others", 2),
}
"""What a worker does, and which part of a bar looks like it."""


def main() -> None:
    """Draw all figures."""
    FOLDER.mkdir(exist_ok=True)
    if "--record" in sys.argv[1:]:
        record_timeline()
    for name, draw in (
        ("timeline", draw_timeline),
        ("arrivals", draw_arrivals),
        ("late", draw_late),
        ("target", draw_target),
        ("growth", draw_growth),
        ("race", draw_race),
    ):
        figure = draw()
        path = FOLDER / f"{name}.png"
        # Without a date and a version in it, the file changes only if the figure does.
        figure.savefig(path, dpi=DPI, metadata={"Software": None})
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} KB")


def record_timeline() -> None:
    """Train examples/digits.py under both rules and keep the traces."""
    for rule, name in TIMELINE_RULES.items():
        with tempfile.TemporaryDirectory() as folder:
            words = f"-m paceline run -w 4 --steps 13 --seed 6 --checkpoint-every 0 -p {rule}"
            script = Path(__file__).parents[1] / "examples" / "digits.py"
            options = ["--latency", TIMELINE_SLOW, "--out", folder, str(script)]
            subprocess.run([sys.executable, *words.split(), *options], check=True)
            (TIMELINE / name).write_bytes(Path(folder, "trace.jsonl").read_bytes())


def draw_timeline() -> Figure:
    """Draw what each worker does over time, under `sync` and under `backup:1`."""
    figure = Figure(figsize=(WIDTH, 5), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    shown: dict[str, list[Patch]] = {}
    for axes, (rule, name) in zip(panels, TIMELINE_RULES.items(), strict=True):
        trace = read_trace(TIMELINE / name)
        first, *rest = [update.t for update in trace.updates()]
        for state in draw_workers(axes, trace, first, rest[-1]):
            look = split_style(rule_colour(rule), STATES[state][1])
            if state != "waiting" or state not in shown:
                shown.setdefault(state, []).append(Patch(**look))
        axes.vlines([t - first for t in rest], -0.5, 3.5, color="black", linewidth=1.5)
        waits = {"sync": "waits for all 4 workers", "backup:1": "takes the first 3 of 4"}[rule]
        title = f"{rule} {waits}: {len(rest)} updates in {rest[-1] - first:.1f} s"
        axes.set_title(title, loc="left", fontsize="large", fontweight="bold")
    panels[-1].set_xlabel("time (s)")
    panels[-1].set_xlim(0, None)
    handles = [tuple(shown[state]) for state in STATES if state in shown]
    labels = [STATES[state][0] for state in STATES if state in shown]
    (line,) = panels[0].plot([], [], color="black", linewidth=1.5)
    figure.legend(
        [*handles, line],
        [*labels, "update of the model"],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.2)},
        loc="outside lower center",
        ncols=5,
        frameon=False,
    )
    return figure


def draw_workers(axes: Axes, trace: Trace, first: float, last: float) -> set[str]:
    """Draw a row for each worker between two updates; return the states that occur."""
    spans: list[tuple[int, str, float, float]] = []
    for worker in range(trace.header.workers):
        own = [g for g in trace.gradients() if g.worker == worker]
        spans += [(worker, g.fate.value, g.asked_at, g.t) for g in own]
        resumed = [*(g.asked_at for g in own[1:]), last]
        spans += [(worker, "waiting", g.t, t) for g, t in zip(own, resumed, strict=True)]
    spans = [(w, state, max(first, t), min(last, end)) for w, state, t, end in spans if end > first]
    for worker, state, begin, end in spans:
        if end > begin:
            left = begin - first
            look = split_style(rule_colour(trace.header.policy), STATES[state][1])
            axes.barh(worker, end - begin, left=left, height=0.72, **look)
            axes.plot([left, left], [worker - 0.36, worker + 0.36], "w", linewidth=1)
    slow = trace.header.workers - 1
    axes.set_yticks(range(slow + 1), [*(f"worker {i}" for i in range(slow)), f"slow worker {slow}"])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return {state for _, state, begin, end in spans if end > begin}


def expected(distribution: Distribution, n: int) -> np.ndarray:
    """Return the expected arrival times of n gradients, from first to last."""
    return np.array([expected_order_statistic(distribution, k, n) for k in range(1, n + 1)])


def one_panel(height: float = 4.8) -> tuple[Figure, Axes]:
    """Return a figure with one panel."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def draw_arrivals() -> Figure:
    """Draw the expected k-th of 100 arrivals for distributions of equal mean."""
    shapes = {
        "constant": Constant(1.0),
        "Weibull, shape 8": Weibull(1 / gamma(1 + 1 / 8), 8.0),
        "gamma, shape 16": Gamma(1.0, 16.0),
        "0.8 s + exponential 0.2 s": Exponential(0.2, shift=0.8),
        "log-normal, sigma 0.5": LogNormal(exp(-0.125), 0.5),
        "Pareto, alpha 2.5": Pareto(0.6, 2.5),
    }
    figure, axes = one_panel()
    workers = 100
    shown = np.array([1, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99, 100])
    every = np.arange(1, workers + 1)
    for (label, distribution), colour in zip(shapes.items(), SERIES[::-1], strict=True):
        axes.plot(every, expected(distribution, workers), color=colour, label=label)
        times = draw_times(Latency(distribution), workers, 2000, SEED)
        means = version_durations(times, shown, "cancel").mean(axis=0)
        axes.plot(shown, means, "o", color=colour, markersize=4)
    axes.plot([], [], "o", color=GREY, markersize=4, label="simulated, 2000 updates")
    plain_log(axes, "y")
    describe_axes(
        axes,
        "When the k-th of 100 gradients arrives, if each takes 1 s on average",
        "k, of 100 gradients started together",
        "expected arrival (s)",
    )
    legend_below(figure, axes)
    return figure


def draw_late() -> Figure:
    """Draw the time of an update against N, with late work cancelled and finished."""
    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    distribution, workers = Exponential(1.0), 20
    every = np.arange(1, workers + 1)
    bounds = np.array([finish_bounds(distribution, n, workers) for n in every.tolist()])
    finish = [expected_finish_time(distribution, n, workers) for n in every.tolist()]
    left.plot(every, bounds[:, 1], "--", color=GREY, label="upper bound: the last of N")
    left.plot(every, finish, color=LATE["finish"], label="late work is finished, then dropped")
    left.plot(every, bounds[:, 0], color=LATE["cancel"], label="late work is cancelled")
    times = draw_times(Latency(distribution), workers, 6000, SEED)
    for late, colour in LATE.items():
        means = version_durations(times, every, late)[1:].mean(axis=0)
        left.plot(every, means, "o", color=colour, markersize=4)
    left.plot([], [], "o", color=GREY, markersize=4, label="simulated")
    left.set_ylim(0, 4.8)
    workers = 100
    times = draw_times(parse_latency(CHEN), workers, 6000, SEED)
    chosen = np.array([*range(4, 88, 4), *range(88, 101)])
    for late, colour in LATE.items():
        means = version_durations(times, chosen, late)[20:].mean(axis=0)
        right.plot(chosen, means, "o-", color=colour, markersize=3)
    for axes, title in (
        (left, "20 workers: exponential, mean 1 s"),
        (right, f"100 workers: {CHEN}"),
    ):
        describe_axes(axes, title, "N, gradients an update waits for", "mean time of an update (s)")
        whole_numbers(axes.xaxis)
    legend_below(figure, left)
    return figure


def draw_target() -> Figure:
    """Draw the time to the target against b, for several noise scales."""
    workers = 100
    step = plan(
        Cluster(parse_latency(CHEN)), RunSpec(workers=workers), every_gradient_counts(workers, 1.0)
    )
    needed = np.arange(1, workers + 1)
    lasted = np.array([option.step_s["cancel"] for option in step.options])
    figure, axes = one_panel()
    scales = [(np.inf, "every gradient counts"), (100, "100"), (30, "30"), (10, "10"), (3, "3")]
    for (beta, label), colour in zip(scales, SERIES, strict=False):
        updates = noise_scale(beta * 32, 32, workers, 1.0).updates(needed.astype(float))
        relative = lasted * updates / lasted[-1]
        best = int(np.argmin(relative))
        backups = workers - needed
        name = f"noise scale: {label} batches" if np.isfinite(beta) else label
        axes.plot(backups, relative, color=colour, label=f"{name}; best b = {backups[best]}")
        axes.plot(backups[best], relative[best], "o", color=colour, markersize=7)
    label_target(axes, 1.0, "sync")
    describe_axes(
        axes,
        f"Time to the target with 100 workers: {CHEN}",
        "b, backup workers",
        "time, relative to sync",
    )
    axes.set_xlim(-1, 100)
    axes.set_ylim(0.4, 1.4)
    whole_numbers(axes.xaxis)
    legend_below(figure, axes, columns=2)
    return figure


def draw_growth() -> Figure:
    """Draw the best b against W if every gradient counts, for several kinds of tails."""
    pareto, exponential = Pareto(0.75, 4.0), Exponential(0.2, shift=0.8)
    even = Recorded(dict.fromkeys(range(200), np.linspace(0.8, 1.2, 4001)), block=1)
    tails: list[tuple[str, TimeModel, Callable[[int], np.ndarray]]] = [
        ("Pareto, alpha 4", Latency(pareto), lambda w: expected(pareto, w)),
        ("0.8 s + exponential 0.2 s", Latency(exponential), lambda w: expected(exponential, w)),
        ("0.95 s, but 1.95 s in 5 % of cases", parse_latency("95% 950ms | 5% 1.95s"), two_points),
        ("evenly from 0.8 s to 1.2 s", even, lambda w: 0.8 + 0.4 * np.arange(1, w + 1) / (w + 1)),
    ]
    counts = [5, 10, 20, 35, 50, 75, 100, 150, 200]
    figure, axes = one_panel()
    for (label, times, formula), colour in zip(tails, (SERIES[0], *SERIES[2:]), strict=False):
        every = range(2, 201)
        best = [w - 1 - int(np.argmin(formula(w) / np.arange(1, w + 1))) for w in every]
        axes.plot(every, best, color=colour, label=label, drawstyle="steps-mid")
        planned = [
            plan(Cluster(times), RunSpec(workers=w), every_gradient_counts(w, 1.0)) for w in counts
        ]
        # The recommendation is the smallest b within 2 % of the fastest one; show the fastest.
        fastest = [min(each.options, key=lambda option: option.seconds) for each in planned]
        axes.plot(counts, [each.backups for each in fastest], "o", color=colour, markersize=5)
    axes.plot([], [], "o", color=GREY, markersize=5, label="found by paceline plan")
    describe_axes(
        axes,
        "The best b, if a gradient takes 1 s on average and every gradient counts",
        "W, workers",
        "best b, backup workers",
    )
    whole_numbers(axes.xaxis)
    whole_numbers(axes.yaxis)
    legend_below(figure, axes, columns=3)
    return figure


def draw_race() -> Figure:
    """Draw accuracy against time with 100 workers, from the lab's tables: seeds and mean."""
    tables = read_tables(RESULTS / "inception")
    figure, axes = one_panel()
    for name, rule in (("sync", "sync"), ("backup", "backup:6"), ("async", "async")):
        style = line_style(rule)
        own = [r for r in tables["curves"] if (r["workers"], r["rule"]) == (100, name)]
        for seed in {row["seed"] for row in own}:
            mine = [row for row in own if row["seed"] == seed]
            points = [(row["seconds"], 100 * float(row["accuracy"])) for row in mine]
            color = style["color"]
            axes.plot(*zip(*points, strict=True), color=color, linewidth=0.7, alpha=0.4)
        seconds, accuracy = curve(tables, 100, name)
        axes.plot(seconds, [100 * value for value in accuracy], label=rule, **style)
    describe_axes(
        axes,
        "Inception on CIFAR-10, 100 workers, the same data for every rule (thin: one seed)",
        "virtual time (s)",
        "accuracy on test images (%)",
    )
    axes.set_xlim(0, None)
    legend_below(figure, axes)
    return figure


def two_points(workers: int) -> np.ndarray:
    """Return the expected N-th arrival: it is slow if more than W - N workers are."""
    backups = workers - np.arange(1, workers + 1)
    return 0.95 + binom.sf(backups, workers, 0.05)


if __name__ == "__main__":
    main()
