# SPDX-License-Identifier: BSD-3-Clause
"""The papers' experiments: real models on real data, trained in virtual time.

Gradients are real and computed in one process, in the order and with the staleness that a simulated
schedule dictates, so that a cluster of any size and slowness can be tried on a laptop. Besides
`run` this is the only room that imports torch; nothing but the command line imports it.

`train(Trial(...))` is all that a training of one's own needs, with a problem of `lab.problems` or
one that is written after `Problem`.
"""

from paceline.lab.conduct import train
from paceline.lab.problem import Draw, Problem
from paceline.lab.recipe import Recipe
from paceline.lab.trial import Outcome, Trial

__all__ = ["Draw", "Outcome", "Problem", "Recipe", "Trial", "train"]
