# SPDX-License-Identifier: BSD-3-Clause
"""An experiment of the lab that takes no time."""

from matplotlib.figure import Figure

from paceline.lab.experiment import Experiment
from paceline.lab.recipe import Recipe
from paceline.lab.trial import Trial
from toys import Clouds

__all__ = ["TOY", "describe", "draw", "measure"]


def measure(lab):
    trials = [
        Trial(Clouds(seed=seed), Recipe(0.1), "sync", 2, "10ms", epochs=0.2, rows=2)
        for seed in lab.seeds
    ]
    results = lab.run(trials)
    rows = [
        {"seed": seed, "rule": "sync", "accuracy": result.last("accuracy")}
        for seed, result in zip(lab.seeds, results, strict=True)
    ]
    return {"final": rows}


def draw(tables):
    figure = Figure()
    figure.subplots().plot([row["seed"] for row in tables["final"]])
    return figure


def describe(tables):
    return f"{len(tables['final'])} seeds, at most {max(r['accuracy'] for r in tables['final'])}."


TOY = Experiment("toy", "Does it work?", "That it does.", measure, draw, describe)
