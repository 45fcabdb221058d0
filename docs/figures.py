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
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.trace.schema import Trace

FOLDER = Path(__file__).parent / "figures"
RESULTS = Path(__file__).parent / "results"
COLOURS = ["#3366aa", "#dd7711", "#339955", "#bb3344", "#8855aa", "#777777"]
CHEN = "1.4s + exp:150ms + 2% exp:1.2s"  # close to the arrivals that Chen et al. measured
SEED = 1

TIMELINE = FOLDER / "timeline"
TIMELINE_RULES = {"sync": "sync.jsonl", "backup:1": "backup-1.jsonl"}
TIMELINE_SLOW = "60ms + exp:8ms + 8% exp:200ms; worker 3 x2"
STATES = {
    "accepted": ("computing", "#4477aa"),
    "late": ("computed, but too late", "#aa3377"),
    "cancelled": ("cancelled", "#ee8833"),
    "waiting": ("waiting", "#e6e6e6"),
}


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
        figure.savefig(path, dpi=150 if name == "timeline" else 110, metadata={"Software": None})
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} KB")


def record_timeline() -> None:
    """Train examples/digits.py under both rules and keep the traces."""
    for rule, name in TIMELINE_RULES.items():
        with tempfile.TemporaryDirectory() as folder:
            words = f"-m paceline run -w 4 --steps 13 --seed 6 --checkpoint-every 0 -p {rule}"
            script = Path(__file__).parents[1] / "examples" / "digits.py"
            options = ["--slow", TIMELINE_SLOW, "--run-dir", folder, str(script)]
            subprocess.run([sys.executable, *words.split(), *options], check=True)
            (TIMELINE / name).write_bytes(Path(folder, "trace.jsonl").read_bytes())


def draw_timeline() -> Figure:
    """Draw what each worker does over time, under `sync` and under `backup:1`."""
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    shown: set[str] = set()
    for axes, (rule, name) in zip(panels, TIMELINE_RULES.items(), strict=True):
        trace = read_trace(TIMELINE / name)
        first, *rest = [update.t for update in trace.updates()]
        shown |= draw_workers(axes, trace, first, rest[-1])
        axes.vlines([t - first for t in rest], -0.5, 3.5, color="black", linewidth=1.3)
        waits = {"sync": "waits for all 4 workers", "backup:1": "takes the first 3 of 4"}[rule]
        title = f"{rule} {waits}: {len(rest)} updates in {rest[-1] - first:.1f} s"
        axes.set_title(title, loc="left", fontsize="large")
    panels[-1].set_xlabel("seconds")
    panels[-1].set_xlim(0, None)
    handles = [Patch(color=STATES[s][1], label=STATES[s][0]) for s in STATES if s in shown]
    line = panels[0].plot([], [], color="black", linewidth=1.3, label="update")
    figure.legend(handles=[*handles, *line], loc="outside lower center", ncols=5, frameon=False)
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
            axes.barh(worker, end - begin, left=left, height=0.72, color=STATES[state][1])
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


def tidy(axes: Axes, **labels: object) -> None:
    """Add labels, a light grid and a legend without a frame."""
    axes.set(**labels)
    axes.grid(color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")


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
    figure = Figure(figsize=(7.5, 4.4), layout="constrained")
    axes = figure.subplots()
    workers = 100
    shown = np.array([1, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99, 100])
    every = np.arange(1, workers + 1)
    for (label, distribution), colour in zip(shapes.items(), COLOURS[::-1], strict=True):
        axes.plot(every, expected(distribution, workers), color=colour, label=label)
        times = draw_times(Latency(distribution), workers, 2000, SEED)
        means = version_durations(times, shown, "cancel").mean(axis=0)
        axes.plot(shown, means, "o", color=colour, markersize=4)
    axes.plot([], [], "o", color="0.3", markersize=4, label="simulated, 2000 updates")
    axes.set_yscale("log")
    axes.set_yticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])
    axes.minorticks_off()
    tidy(axes, xlabel="k, of 100 gradients begun together", ylabel="expected k-th arrival (s)")
    axes.set_title("Mean 1 s each: only the tail differs", loc="left", fontsize="medium")
    return figure


def draw_late() -> Figure:
    """Draw the time of an update against N, with late work cancelled and finished."""
    figure = Figure(figsize=(9.5, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    distribution, workers = Exponential(1.0), 20
    every = np.arange(1, workers + 1)
    bounds = np.array([finish_bounds(distribution, n, workers) for n in every.tolist()])
    finish = [expected_finish_time(distribution, n, workers) for n in every.tolist()]
    left.plot(every, bounds[:, 1], "--", color="0.6", label="upper bound: the last of N")
    left.plot(every, finish, color=COLOURS[1], label="finished, then dropped")
    left.plot(every, bounds[:, 0], color=COLOURS[0], label="cancelled: N-th of 20")
    times = draw_times(Latency(distribution), workers, 6000, SEED)
    for late, colour in (("cancel", COLOURS[0]), ("finish", COLOURS[1])):
        means = version_durations(times, every, late)[1:].mean(axis=0)
        left.plot(every, means, "o", color=colour, markersize=4)
    left.plot([], [], "o", color="0.3", markersize=4, label="simulated")
    left.set_xticks([1, 5, 10, 15, 20])
    tidy(left, xlabel="N, gradients in an update", ylabel="mean time of an update (s)")
    left.set_title("exponential, mean 1 s, 20 workers", loc="left", fontsize="medium")
    left.set_ylim(0, 4.8)
    workers = 100
    times = draw_times(parse_latency(CHEN), workers, 6000, SEED)
    chosen = np.array([*range(4, 88, 4), *range(88, 101)])
    for late, colour, label in (
        ("finish", COLOURS[1], "finished, then dropped"),
        ("cancel", COLOURS[0], "cancelled"),
    ):
        means = version_durations(times, chosen, late)[20:].mean(axis=0)
        right.plot(chosen, means, "o-", color=colour, markersize=3, label=label)
    tidy(right, xlabel="N, gradients in an update", ylabel="mean time of an update (s)")
    right.set_title(f"{CHEN}, 100 workers", loc="left", fontsize="medium")
    return figure


def draw_target() -> Figure:
    """Draw the time to the target against b, for several noise scales."""
    workers = 100
    step = plan(
        Cluster(parse_latency(CHEN)), RunSpec(workers=workers), every_gradient_counts(workers, 1.0)
    )
    needed = np.arange(1, workers + 1)
    lasted = np.array([option.step_s["cancel"] for option in step.options])
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    scales = [(np.inf, "every gradient counts"), (100, "100"), (30, "30"), (10, "10"), (3, "3")]
    for (beta, label), colour in zip(scales, COLOURS, strict=False):
        updates = noise_scale(beta * 32, 32, workers, 1.0).updates(needed.astype(float))
        relative = lasted * updates / lasted[-1]
        best = int(np.argmin(relative))
        backups = workers - needed
        name = f"noise scale: {label} batches" if np.isfinite(beta) else label
        axes.plot(backups, relative, color=colour, label=f"{name}; best b = {backups[best]}")
        axes.plot(backups[best], relative[best], "o", color=colour, markersize=7)
    axes.axhline(1.0, color="0.6", linewidth=0.8, linestyle="--")
    axes.text(35, 1.01, "sync", ha="center", va="bottom", color="0.4", fontsize="small")
    tidy(axes, xlabel="b, backups among 100 workers", ylabel="time to the target / that of sync")
    axes.set_xlim(-1, 100)
    axes.set_ylim(0.4, 1.4)
    axes.set_title(CHEN, loc="left", fontsize="medium")
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
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for (label, times, formula), colour in zip(tails, COLOURS, strict=False):
        every = range(2, 201)
        best = [w - 1 - int(np.argmin(formula(w) / np.arange(1, w + 1))) for w in every]
        axes.plot(every, best, color=colour, label=label, drawstyle="steps-mid")
        planned = [
            plan(Cluster(times), RunSpec(workers=w), every_gradient_counts(w, 1.0)) for w in counts
        ]
        axes.plot(counts, [each.best.backups for each in planned], "o", color=colour, markersize=5)
    axes.plot([], [], "o", color="0.3", markersize=5, label="found by plan")
    tidy(axes, xlabel="W, workers", ylabel="best b")
    axes.set_title("Mean 1 s each, every gradient counts", loc="left", fontsize="medium")
    return figure


def draw_race() -> Figure:
    """Draw accuracy against time with 100 workers, from the lab's tables: seeds and mean."""
    tables = read_tables(RESULTS / "inception")
    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.subplots()
    for rule, label, colour in (
        ("sync", "sync", COLOURS[0]),
        ("backup", "backup:6", COLOURS[1]),
        ("async", "async", COLOURS[3]),
    ):
        own = [r for r in tables["curves"] if (r["workers"], r["rule"]) == (100, rule)]
        for seed in {row["seed"] for row in own}:
            mine = [row for row in own if row["seed"] == seed]
            points = [(row["seconds"], 100 * float(row["accuracy"])) for row in mine]
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=0.7, alpha=0.4)
        seconds, accuracy = curve(tables, 100, rule)
        axes.plot(seconds, [100 * value for value in accuracy], color=colour, label=label)
    tidy(axes, xlabel="virtual time (s)", ylabel="test accuracy (%)")
    axes.set_xlim(0, None)
    axes.set_title(
        "Inception, CIFAR-10, 100 workers, as much data each", loc="left", fontsize="medium"
    )
    return figure


def two_points(workers: int) -> np.ndarray:
    """Return the expected N-th arrival: it is slow if more than W - N workers are."""
    backups = workers - np.arange(1, workers + 1)
    return 0.95 + binom.sf(backups, workers, 0.05)


if __name__ == "__main__":
    main()
