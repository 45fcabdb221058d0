# SPDX-License-Identifier: BSD-3-Clause
"""The papers' experiments: real models on real data, trained in virtual time.

One process computes real gradients in the order, and with the staleness, that a simulated schedule
dictates. That way you can try a cluster of any size and speed on a laptop. Besides `run`, this is
the only package that imports torch, and only the command line imports it.

To train something of your own, call `train(Trial(...))` with a problem from `lab.problems`, or with
your own subclass of `Problem`.
"""

from paceline.lab.problem import Draw, Problem
from paceline.lab.recipe import Recipe
from paceline.lab.trial import Trial, TrialResult
from paceline.lab.trial_runner import train

__all__ = ["Draw", "Problem", "Recipe", "Trial", "TrialResult", "train"]
