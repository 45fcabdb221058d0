# SPDX-License-Identifier: BSD-3-Clause
"""`paceline run --on ray`: connect to Ray for a run. Importing this module imports ray."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from paceline.cli.ray_options import PlacedRunOptions
from paceline.run.launch.ray import cluster
from paceline.run.launch.ray_placement import Placement
from paceline.run.launch.spawner import RemoteSpawner
from paceline.run.settings import Settings

__all__ = ["connector"]


def connector(
    options: PlacedRunOptions,
) -> Callable[[Settings], AbstractContextManager[RemoteSpawner]]:
    """Return how to connect to Ray for a run with these options."""
    placement = Placement(
        cpus_per_worker=options.cpus_per_worker,
        gpus_per_worker=options.gpus_per_worker,
        server_label=options.server_label,
    )
    return partial(cluster, placement=placement, address=options.address)
