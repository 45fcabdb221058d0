# SPDX-License-Identifier: BSD-3-Clause
"""How late do the last gradients come? A model of what the paper measured, and this machine.

The paper publishes the mean time until k of 100 gradients are there, and how the time of the last
one is distributed. A mixture is fitted to both: the usual times, pauses of a second now and then,
and rare ones that take as long as they like. All other experiments draw from it, rounded (`CHEN`).
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.optimize import least_squares

from paceline.lab.arrivals import arrived, mean_arrival
from paceline.lab.experiment import Experiment, Lab, Rows, Tables
from paceline.lab.experiments.settings import picked
from paceline.lab.machine import arrivals, recorded
from paceline.lab.scripts import noise
from paceline.latency import Distribution, Exponential, LogNormal, Mixture, parse_latency
from paceline.sim.fast import closing_times, draw_times
from paceline.spec import RunSpec

__all__ = ["STRAGGLERS", "fitted", "rounded"]

Floats = NDArray[np.float64]

WORKERS = 100

KS = (1, 10, 25, 50, 75, 90, 95, 96, 97, 98, 99, 100)
SECONDS = (1.43, 1.50, 1.55, 1.62, 1.68, 1.72, 1.735, 1.74, 1.77, 1.84, 2.00, 2.62)
MEANS = dict(zip(KS, SECONDS, strict=True))
"""Seconds until k gradients are there, on average; read off figure 4."""

TIMES = (1.8, 2.0, 2.5, 2.6, 2.9, 3.0, 3.5, 4.0, 5.0, 6.0)
SHARES = (0.25, 0.30, 0.42, 0.50, 0.77, 0.82, 0.92, 0.965, 0.985, 0.99)
LAST = dict(zip(TIMES, SHARES, strict=True))
"""How often the last is there by then; read off figure 3."""

OTHERS = [(99, 1.8, 0.5), (99, 2.33, 0.8), (99, 3.0, 0.97), (98, 2.0, 0.8), (50, 1.57, 0.5)]
"""k, seconds, how often it is there by then. Nothing is fitted to these."""

STEPS = [(53, 50, 1.68), (106, 100, 1.66), (212, 200, 2.19)]
"""Machines, gradients of an update, and how long one took; from the paper's training runs."""

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


def _misses(model: Distribution) -> Floats:
    """By how much it misses what was published, in seconds and in shares: both are read as well."""
    means = [mean_arrival(model, k, WORKERS) for k in MEANS]
    last = arrived(model, WORKERS, WORKERS, np.array(TIMES))
    return np.subtract([*means, *last], [*SECONDS, *SHARES])


def fitted() -> Mixture:
    """The model that misses least."""

    def misses(logarithms: Floats) -> Floats:  # because all are > 0, and some are small
        return _misses(_model(np.exp(logarithms).tolist()))

    return _model(np.exp(least_squares(misses, np.log(FIRST_GUESS)).x).tolist())


def rounded(model: Mixture) -> str:
    """The same as a latency that people can read."""
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
    """Fit, say what follows from it, and look at this machine."""
    latency = rounded(fitted())
    model = parse_latency(latency).base
    distributed = [(WORKERS, t, value) for t, value in LAST.items()] + OTHERS
    return {
        "model": [{"latency": latency, "rms_miss": float(np.sqrt(np.mean(_misses(model) ** 2)))}],
        "means": [
            {"k": k, "paper_s": value, "model_s": mean_arrival(model, k, WORKERS)}
            for k, value in MEANS.items()
        ],
        "distribution": [
            {
                "k": k,
                "t_s": t,
                "paper": value,
                "model": float(arrived(model, k, WORKERS, np.array([t]))[0]),
                "fitted": "yes" if k == WORKERS else "no",
            }
            for k, t, value in distributed
        ],
        "update": _updates(latency, 500 if lab.quick else 5000),
        "machine": _machine(60 if lab.quick else 600),
    }


def _updates(latency: str, rounds: int) -> Rows:
    """How long an update takes: the model's, late work cancelled and finished; the paper's."""
    cases = [(WORKERS, k, value, "arrival") for k, value in MEANS.items()]
    cases += [(*case, "update") for case in STEPS]
    model = parse_latency(latency)
    rows: Rows = []
    for machines in dict.fromkeys(case[0] for case in cases):
        times = draw_times(model, machines, rounds, seed=0)
        own = [case for case in cases if case[0] == machines]
        needed = np.array([case[1] for case in own])
        cancelled, finished = (
            closing_times(times, needed, late)[20:].mean(axis=0)  # lateness has settled by then
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
    """Arrivals in a real run; the first updates, while processes warm up, are not counted."""
    trace = recorded(Path(noise.__file__), RunSpec(workers=8, steps=updates))
    times = arrivals(trace, skip=updates // 10)
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


# ------------------------------------------------------------------------------------------- shown


def draw(tables: Tables) -> Figure:
    """Means by k; distributions; what an update takes; this machine."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    (means, shares), (update, machine) = figure.subplots(2, 2)
    model = parse_latency(str(tables["model"][0]["latency"])).base
    ks = range(1, WORKERS + 1)
    means.plot(ks, [mean_arrival(model, k, WORKERS) for k in ks], label="model")
    means.plot(picked(tables["means"], "k"), picked(tables["means"], "paper_s"), "o", label="paper")
    means.set(xlabel=f"k of {WORKERS}", ylabel="mean arrival (s)", ylim=(1.3, None))
    means.set_title("mean arrival of the k-th gradient")
    means.legend(frameon=False)
    _draw_shares(shares, model, tables["distribution"])
    _draw_updates(update, tables["update"])
    _draw_machine(machine, tables["machine"])
    return figure


def _draw_shares(axes: Axes, model: Distribution, rows: Rows) -> None:
    t = np.linspace(1.3, 5.0, 400)
    for number, k in enumerate((50, 98, 99, 100)):
        axes.plot(t, arrived(model, k, WORKERS, t), color=f"C{number}", label=f"k = {k}")
        own = [row for row in rows if row["k"] == k]
        axes.plot(picked(own, "t_s"), picked(own, "paper"), "o", color=f"C{number}")
    axes.set(xlabel="time (s)", ylabel="share of updates", xlim=(1.3, 5.0))
    axes.set_title("k-th gradient is there by then (dots: paper)")
    axes.legend(frameon=False, loc="lower right")


def _draw_updates(axes: Axes, rows: Rows) -> None:
    own = [row for row in rows if row["machines"] == WORKERS]
    needed = picked(own, "needed")
    for column, style, label in (
        ("finished_s", "s-", "late work finished, then dropped"),
        ("cancelled_s", "o-", "late work cancelled"),
    ):
        axes.plot(needed, picked(own, column), style, label=label)
    axes.plot(needed, picked(own, "paper_s"), "k--", label="paper: arrivals without backups")
    axes.set(xlabel=f"N of {WORKERS}", ylabel="time of an update (s)", xlim=(48, 101))
    axes.set_title("what waiting for N takes, simulated")
    axes.legend(frameon=False)


def _draw_machine(axes: Axes, rows: Rows) -> None:
    ks = picked(rows, "k")
    for column, style, label in (
        ("p90_s", "v:", "90 % are there"),
        ("mean_s", "o-", "mean"),
        ("median_s", "s--", "median"),
    ):
        axes.plot(ks, [1e3 * value for value in picked(rows, column)], style, label=label)
    axes.set(xlabel=f"k of {len(rows)}", ylabel="arrival (ms)", ylim=(0, None))
    axes.set_title("real processes on this machine, nothing injected")
    axes.legend(frameon=False)


def tell(tables: Tables) -> str:
    """Put it into words."""
    return " ".join([*_of_model(tables), *_of_updates(tables["update"]), _of_machine(tables)])


def _of_model(tables: Tables) -> Iterator[str]:
    model, means = tables["model"][0], tables["means"]
    off = max(abs(float(row["model_s"]) - float(row["paper_s"])) for row in means)
    last = [row for row in tables["distribution"] if row["fitted"] == "yes"]
    wrong = max(abs(float(row["model"]) - float(row["paper"])) for row in last)
    yield (
        f"The fitted model is `{model['latency']}`. It misses no mean arrival by more than "
        f"{off:.3f} s and the distribution of the last by no more than {100 * wrong:.1f} points."
    )
    [in_time] = [row for row in tables["distribution"] if row["k"] == 98]
    yield (
        f"It was not fitted to the 98th, of which it says that {100 * float(in_time['model']):.0f} "
        f"% are there within 2 s (paper: {100 * float(in_time['paper']):.0f} %). In the model each "
        "worker is late by itself; that of the paper looks as if some were late together."
    )


def _of_updates(rows: Rows) -> Iterator[str]:
    def time(column: str, machines: int, needed: int) -> float:
        return picked(rows, column, machines=machines, needed=needed)[0]

    whole = time("cancelled_s", 100, 100)
    first = time("cancelled_s", 100, 96)
    yield (
        f"Waiting for 96 of 100 instead of all takes {first:.2f} s an update instead of "
        f"{whole:.2f} s (paper: 1.74 and 2.62 s)."
    )
    extra = 100 * (time("finished_s", 100, 96) / first - 1)
    more = 100 * (time("finished_s", 106, 100) / time("cancelled_s", 106, 100) - 1)
    yield (
        f"That is if late work is cancelled; if it is finished and then dropped, an update takes "
        f"{extra:.1f} % longer with 96 of 100 and {more:.1f} % longer with 100 of 106."
    )
    observed = "; ".join(
        f"{needed} of {machines}: {time('cancelled_s', machines, needed):.2f} s cancelled, "
        f"{time('finished_s', machines, needed):.2f} s finished, {paper:.2f} s in the paper"
        for machines, needed, paper in STEPS
    )
    yield f"Beside what the paper's training took for an update: {observed}."


def _of_machine(tables: Tables) -> str:
    rows = tables["machine"]
    mean, p90 = picked(rows, "mean_s"), picked(rows, "p90_s")
    cores = picked(rows, "cores")[0]
    return (
        f"On this machine, {len(rows)} real processes: the first gradient is there after "
        f"{1e3 * mean[0]:.1f} ms, the next to last after {1e3 * mean[-2]:.1f} ms, the last after "
        f"{1e3 * mean[-1]:.1f} ms on average and after {1e3 * p90[-1]:.1f} ms in 9 of 10 updates; "
        f"they share {cores:.0f} cores."
    )


STRAGGLERS = Experiment(
    name="stragglers",
    question="How late do the last gradients come, and what does it cost to wait for them?",
    expected=(
        "Chen et al., figures 3 and 4, 100 workers: 80 % of the 98th gradients are there within "
        "2 s, but only 30 % of the last; the mean is 1.62 s for the 50th, 1.74 s for the 96th, "
        "2.00 s for the 99th and 2.62 s for the last. They measured without backups; what happens "
        "when a worker that was late is still busy is not in their figures."
    ),
    measure=measure,
    draw=draw,
    tell=tell,
)
