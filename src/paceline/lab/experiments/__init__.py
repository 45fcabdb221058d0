# SPDX-License-Identifier: BSD-3-Clause
"""The experiments by name, in the order in which they run; one file per experiment."""

from paceline.lab.experiment import Experiment
from paceline.lab.experiments.choose_b import CHOOSE_B
from paceline.lab.experiments.convex import CONVEX
from paceline.lab.experiments.delay import DELAY
from paceline.lab.experiments.inception import INCEPTION
from paceline.lab.experiments.other_models import MODELS
from paceline.lab.experiments.pixelcnn import PIXELCNN
from paceline.lab.experiments.staleness import STALENESS
from paceline.lab.experiments.stragglers import STRAGGLERS
from paceline.lab.experiments.traffic import TRAFFIC
from paceline.lab.experiments.uneven import UNEVEN
from paceline.lab.experiments.where_backups_lose import LOSING

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: dict[str, Experiment] = {
    one.name: one
    for one in (
        *(STALENESS, INCEPTION, STRAGGLERS, CHOOSE_B, PIXELCNN, DELAY),
        *(MODELS, CONVEX, UNEVEN, LOSING, TRAFFIC),
    )
}
