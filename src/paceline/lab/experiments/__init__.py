# SPDX-License-Identifier: BSD-3-Clause
"""The experiments, one a file, by name, in the order in which they are run."""

from paceline.lab.experiment import Experiment
from paceline.lab.experiments.inception import INCEPTION
from paceline.lab.experiments.staleness import STALENESS

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: dict[str, Experiment] = {one.name: one for one in (STALENESS, INCEPTION)}
