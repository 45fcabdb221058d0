# SPDX-License-Identifier: BSD-3-Clause
"""The options of `paceline run` that say where the processes run.

`paceline --help` loads this module: it must import nothing heavy.
"""

import os
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from paceline.cli.verb_options import RunOptions

__all__ = ["PlacedRunOptions", "keep_ray_private"]

# Ray reads the first of these when it is imported; it then listens on loopback only.
PRIVATE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
"""Environment variables for a Ray that is started on this machine for one run."""


@dataclass(frozen=True, kw_only=True)
class PlacedRunOptions(RunOptions):
    """The options of `paceline run`: those of a run, and those of a Ray cluster."""

    on: Annotated[
        Literal["this-machine", "ray"],
        typer.Option(
            help="Where servers and workers run: on this machine, or in actors on a Ray cluster, "
            "which needs: pip install 'paceline[ray]'. Start this command on a node of the "
            "cluster; the script must be at the same path on all nodes."
        ),
    ] = "this-machine"
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="With --on ray: the address of the cluster, or 'auto' for the one that runs on "
            "this machine. [default: RAY_ADDRESS, or else a Ray on this machine for this run]",
        ),
    ] = None
    cpus_per_worker: Annotated[
        float,
        typer.Option(
            help="With --on ray: processors that Ray reserves for each worker, which computes with "
            "as many threads. A worker starts when a node has them. Each server reserves one."
        ),
    ] = 1.0
    gpus_per_worker: Annotated[
        float, typer.Option(help="With --on ray: GPUs that Ray reserves for each worker.")
    ] = 0.0
    server_label: Annotated[
        str,
        typer.Option(
            metavar="KEY=VALUE",
            help="With --on ray: run servers only on nodes with this label, such as "
            "'market=on-demand', or with any other value: 'market=!spot'. These nodes must share "
            "the folder of the run (--out). [default: the first server on this node, the others "
            "on any]",
        ),
    ] = ""


def keep_ray_private(options: PlacedRunOptions) -> None:
    """If a Ray will be started for this run, let it talk to nobody outside; call it before that."""
    if options.address is None and "RAY_ADDRESS" not in os.environ:
        for name, value in PRIVATE.items():
            os.environ.setdefault(name, value)
