# SPDX-License-Identifier: BSD-3-Clause
"""How late do the last gradients arrive? A model of the paper's measurements, and this machine.

The paper publishes the mean time until k of 100 gradients have arrived, and the distribution of the
time of the last one. A mixture of three parts is fitted to both: usual times, occasional pauses of
about a second, and rare long delays. All other experiments draw from the rounded fit (`CHEN`).
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.lab import extras
from paceline.lab.arrival_times import arrival_cdf, mean_arrival
from paceline.lab.experiment import Experiment, Lab, Rows, Tables
from paceline.lab.experiments.tables import column
from paceline.lab.plotting import new_figure
from paceline.lab.real_run import arrival_times, record_run
from paceline.lab.scripts import cnn_on_noise
from paceline.latency import Distribution, Exponential, LogNormal, Mixture, parse_latency
from paceline.sim.fast import draw_times, version_durations
from paceline.spec import RunSpec
from paceline.watch.figure_style import (
    GREY,
    SERIES,
    WIDTH,
    describe_axes,
    legend_below,
    split_figure,
    whole_numbers,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure, FigureBase

__all__ = ["STRAGGLERS", "fit_model", "format_latency"]

Floats = NDArray[np.float64]

WORKERS = 100

KS = (1, 10, 25, 50, 75, 90, 95, 96, 97, 98, 99, 100)
SECONDS = (1.43, 1.50, 1.55, 1.62, 1.68, 1.72, 1.735, 1.74, 1.77, 1.84, 2.00, 2.62)
MEANS = dict(zip(KS, SECONDS, strict=True))
"""Mean seconds until k gradients have arrived, read off figure 4."""

TIMES = (1.8, 2.0, 2.5, 2.6, 2.9, 3.0, 3.5, 4.0, 5.0, 6.0)
SHARES = (0.25, 0.30, 0.42, 0.50, 0.77, 0.82, 0.92, 0.965, 0.985, 0.99)
LAST = dict(zip(TIMES, SHARES, strict=True))
"""Probability that the last gradient has arrived by a time, read off figure 3."""

OTHERS = [(99, 1.8, 0.5), (99, 2.33, 0.8), (99, 3.0, 0.97), (98, 2.0, 0.8), (50, 1.57, 0.5)]
"""k, seconds, and the probability that the k-th has arrived by then; not used in the fit."""

STEPS = [(53, 50, 1.68), (106, 100, 1.66), (212, 200, 2.19)]
"""Machines, gradients per update, and seconds per update in the paper's training runs."""

FIRST_GUESS = (1.6, 0.05, 0.01, 2.7, 0.1, 0.002, 2.0)


# ---------------------------------------------------------------------------------------- the fit


def _model(parameters: Sequence[float]) -> Mixture:
    median, sigma, pauses, pause_median, pause_sigma, rare, rare_mean = parameters
    return Mixture(
        (1 - pauses - rare, pauses, rare),
        (
            LogNormal(median, sigma),
            LogNormal(pause_median, pause_sigma),
            Exponential(rare_mean, shift=median),
        ),
    )


def _residuals(model: Distribution) -> Floats:
    """Return model minus paper, in seconds and in probabilities; both can be read equally well."""
    means = [mean_arrival(model, k, WORKERS) for k in MEANS]
    last = arrival_cdf(model, WORKERS, WORKERS, np.array(TIMES))
    return np.subtract([*means, *last], [*SECONDS, *SHARES])


def fit_model() -> Mixture:
    """Return the least-squares fit to the paper's figures."""

    def residuals(logarithms: Floats) -> Floats:  # all parameters are > 0, and some are small
        return _residuals(_model(np.exp(logarithms).tolist()))

    found = extras.load("scipy.optimize").least_squares(residuals, np.log(FIRST_GUESS))
    return _model(np.exp(found.x).tolist())


def format_latency(model: Mixture) -> str:
    """Return the model as a latency string, with rounded parameters."""
    usual, pause, rare = model.parts
    assert isinstance(usual, LogNormal)
    assert isinstance(pause, LogNormal)
    assert isinstance(rare, Exponential)
    pauses, rares = (round(100 * weight, 2) for weight in model.weights[1:])
    return (
        f"{100 - pauses - rares:.4g}% lognormal:{usual.median:.3f}s,{usual.sigma:.3f}"
        f" | {pauses:g}% lognormal:{pause.median:.2f}s,{pause.sigma:.3f}"
        f" | {rares:g}% exp:{rare.mean_s:.2f}s,shift={usual.median:.3f}s"
    )


# ----------------------------------------------------------------------------------- measurements


def measure(lab: Lab) -> Tables:
    """Fit the model, compute what follows from it, and measure this machine."""
    latency = format_latency(fit_model())
    model = parse_latency(latency).base
    distributed = [(WORKERS, t, value) for t, value in LAST.items()] + OTHERS
    return {
        "model": [
            {"latency": latency, "rms_miss": float(np.sqrt(np.mean(_residuals(model) ** 2)))}
        ],
        "means": [
            {"k": k, "paper_s": value, "model_s": mean_arrival(model, k, WORKERS)}
            for k, value in MEANS.items()
        ],
        "distribution": [
            {
                "k": k,
                "t_s": t,
                "paper": value,
                "model": float(arrival_cdf(model, k, WORKERS, np.array([t]))[0]),
                "fitted": "yes" if k == WORKERS else "no",
            }
            for k, t, value in distributed
        ],
        "update": _updates(latency, 500 if lab.quick else 5000),
        "machine": _machine(60 if lab.quick else 600),
    }


def _updates(latency: str, rounds: int) -> Rows:
    """Return the time per update in the model, with late work cancelled or finished, and in the
    paper."""
    cases = [(WORKERS, k, value, "arrival") for k, value in MEANS.items()]
    cases += [(*case, "update") for case in STEPS]
    model = parse_latency(latency)
    rows: Rows = []
    for machines in dict.fromkeys(case[0] for case in cases):
        times = draw_times(model, machines, rounds, seed=0)
        own = [case for case in cases if case[0] == machines]
        needed = np.array([case[1] for case in own])
        cancelled, finished = (
            version_durations(times, needed, late)[20:].mean(
                axis=0
            )  # after the first few, it is steady
            for late in ("cancel", "finish")
        )
        rows += [
            {
                "machines": machines,
                "needed": case[1],
                "cancelled_s": float(cancelled[i]),
                "finished_s": float(finished[i]),
                "paper_s": case[2],
                "paper_tells": case[3],
            }
            for i, case in enumerate(own)
        ]
    return rows


def _machine(updates: int) -> Rows:
    """Measure arrivals in a real run, without the first updates, in which processes warm up."""
    trace = record_run(Path(cnn_on_noise.__file__), RunSpec(workers=8, steps=updates))
    times = arrival_times(trace, skip=updates // 10)
    return [
        {
            "k": k,
            "mean_s": float(own.mean()),
            "median_s": float(np.median(own)),
            "p90_s": float(np.percentile(own, 90)),
            "max_s": float(own.max()),
            "updates": len(own),
            "cores": len(os.sched_getaffinity(0)),
        }
        for k, own in enumerate(times.T, start=1)
    ]


# ------------------------------------------------------------------------------------------ report


def draw(tables: Tables) -> "Figure":
    """Draw mean arrivals, distributions, times per update, and this machine."""
    figure = new_figure(WIDTH, 8.4, "When gradients arrive, and how long updates take")
    panels = split_figure(figure, 2, 2)
    model = parse_latency(str(tables["model"][0]["latency"])).base
    _draw_means(panels[0], model, tables["means"])
    _draw_shares(panels[1], model, tables["distribution"])
    _draw_updates(panels[2], tables["update"])
    _draw_machine(panels[3], tables["machine"])
    return figure


def _draw_means(figure: "FigureBase", model: Distribution, rows: Rows) -> None:
    axes, ks = figure.subplots(), range(1, WORKERS + 1)
    means = [mean_arrival(model, k, WORKERS) for k in ks]
    axes.plot(ks, means, color=SERIES[2], label="our model")
    axes.plot(column(rows, "k"), column(rows, "paper_s"), "o", color=GREY, label="paper")
    title = "Mean arrival of the k-th gradient"
    describe_axes(axes, title, f"k, of {WORKERS} gradients", "mean time until it arrives (s)")
    axes.set_ylim(1.3, None)
    whole_numbers(axes.xaxis)
    legend_below(figure, axes)


def _draw_shares(figure: "FigureBase", model: Distribution, rows: Rows) -> None:
    axes, t = figure.subplots(), np.linspace(1.3, 5.0, 400)
    for k, colour in zip((50, 98, 99, 100), (SERIES[0], *SERIES[2:5]), strict=True):
        axes.plot(t, arrival_cdf(model, k, WORKERS, t), color=colour, label=f"k = {k}")
        own = [row for row in rows if row["k"] == k]
        axes.plot(column(own, "t_s"), column(own, "paper"), "o", color=colour)
    title = "Probability that k gradients have arrived"
    describe_axes(axes, title, "time since the start of the update (s)", "probability")
    axes.set_xlim(1.3, 5.0)
    axes.plot([], [], "o", color=GREY, label="paper")
    legend_below(figure, axes, columns=3)


def _draw_updates(figure: "FigureBase", rows: Rows) -> None:
    axes = figure.subplots()
    own = [row for row in rows if row["machines"] == WORKERS]
    needed = column(own, "needed")
    for name, style, colour, label in (
        ("finished_s", "s--", SERIES[4], "late work is finished, then dropped"),
        ("cancelled_s", "o-", SERIES[2], "late work is cancelled"),
    ):
        axes.plot(needed, column(own, name), style, color=colour, markersize=4, label=label)
    paper = column(own, "paper_s")
    axes.plot(needed, paper, "--", color=GREY, label="paper: arrivals without backups")
    title = "Time of an update, simulated"
    xlabel = f"N, gradients an update waits for, of {WORKERS}"
    describe_axes(axes, title, xlabel, "mean time per update (s)")
    axes.set_xlim(48, 101)
    whole_numbers(axes.xaxis)
    legend_below(figure, axes, columns=1)


def _draw_machine(figure: "FigureBase", rows: Rows) -> None:
    axes, ks = figure.subplots(), column(rows, "k")
    for name, style, colour, label in (
        ("p90_s", "v:", SERIES[4], "slowest 10 % of updates take longer"),
        ("mean_s", "o-", SERIES[2], "mean"),
        ("median_s", "s--", SERIES[0], "median"),
    ):
        milliseconds = [1e3 * value for value in column(rows, name)]
        axes.plot(ks, milliseconds, style, color=colour, markersize=4, label=label)
    title = "Real processes, no delays added"
    describe_axes(axes, title, f"k, of {len(rows)} gradients", "time until it arrives (ms)")
    axes.set_ylim(0, None)
    whole_numbers(axes.xaxis)
    legend_below(figure, axes, columns=1)


def describe(tables: Tables) -> str:
    """Summarize the tables in words."""
    model, updates = _describe_model(tables), _describe_updates(tables["update"])
    return "\n\n".join([" ".join(model), " ".join(updates), _describe_machine(tables)])


def _describe_model(tables: Tables) -> Iterator[str]:
    model, means = tables["model"][0], tables["means"]
    off = max(abs(float(row["model_s"]) - float(row["paper_s"])) for row in means)
    last = [row for row in tables["distribution"] if row["fitted"] == "yes"]
    wrong = max(abs(float(row["model"]) - float(row["paper"])) for row in last)
    yield (
        f"The fitted model is `{model['latency']}`. It is off by at most {off:.3f} s in the mean "
        f"arrivals, and by at most {100 * wrong:.1f} points in the distribution of the last one."
    )
    [in_time] = [row for row in tables["distribution"] if row["k"] == 98]
    yield (
        f"It predicts that {100 * float(in_time['model']):.0f} % of the 98th gradients arrive "
        f"within 2 s, which was not part of the fit (paper: {100 * float(in_time['paper']):.0f} "
        "%). In the model, workers are late independently of each other; the paper's numbers look "
        "as if some were late together."
    )


def _describe_updates(rows: Rows) -> Iterator[str]:
    def time(name: str, machines: int, needed: int) -> float:
        return column(rows, name, machines=machines, needed=needed)[0]

    whole = time("cancelled_s", 100, 100)
    first = time("cancelled_s", 100, 96)
    yield (
        f"An update takes {first:.2f} s if it waits for 96 of 100 workers, and {whole:.2f} s if it "
        "waits for all (paper: 1.74 and 2.62 s)."
    )
    extra = 100 * (time("finished_s", 100, 96) / first - 1)
    more = 100 * (time("finished_s", 106, 100) / time("cancelled_s", 106, 100) - 1)
    yield (
        "This assumes that late work is cancelled. If it is finished and then dropped, an update "
        f"takes {extra:.1f} % longer with 96 of 100 and {more:.1f} % longer with 100 of 106."
    )
    observed = "; ".join(
        f"{needed} of {machines}: {time('cancelled_s', machines, needed):.2f} s cancelled, "
        f"{time('finished_s', machines, needed):.2f} s finished, {paper:.2f} s in the paper"
        for machines, needed, paper in STEPS
    )
    yield f"Compared with the time per update in the paper's training runs: {observed}."


def _describe_machine(tables: Tables) -> str:
    rows = tables["machine"]
    mean, p90 = column(rows, "mean_s"), column(rows, "p90_s")
    cores = column(rows, "cores")[0]
    return (
        f"On this machine, with {len(rows)} real processes on {cores:.0f} cores, the first "
        f"gradient arrives after {1e3 * mean[0]:.1f} ms on average, the next to last after "
        f"{1e3 * mean[-2]:.1f} ms, and the last after {1e3 * mean[-1]:.1f} ms; in 9 of 10 updates, "
        f"the last arrives within {1e3 * p90[-1]:.1f} ms."
    )


STRAGGLERS = Experiment(
    name="stragglers",
    question="How late are the last gradients, and what does it cost to wait for them?",
    expected=(
        "Chen et al., figures 3 and 4, 100 workers: 80 % of the 98th gradients arrive within 2 s, "
        "but only 30 % of the last ones. The mean is 1.62 s for the 50th, 1.74 s for the 96th, "
        "2.00 s for the 99th and 2.62 s for the last. They measured without backups, so their "
        "figures don't show what happens when a late worker is still busy."
    ),
    measure=measure,
    draw=draw,
    describe=describe,
)
