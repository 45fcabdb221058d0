# SPDX-License-Identifier: BSD-3-Clause
"""Train on a Ray cluster: connect to it, and run a training function from a Ray program.

Importing this module imports ray.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import msgspec
import ray

from paceline.errors import (
    CheckpointError,
    InternalError,
    PacelineError,
    PeerLost,
    SpecError,
    TraceError,
)
from paceline.run.launch.launcher import Launcher
from paceline.run.launch.pickled_function import RESULT, SCRIPT, pack, unpack
from paceline.run.launch.ray_cluster import RayCluster
from paceline.run.launch.ray_placement import Placement
from paceline.run.launch.run_folder import new_run_dir
from paceline.run.settings import Settings
from paceline.spec import RunSpec

__all__ = ["Trained", "cluster", "connected", "run"]

DIAL_S = 5.0  # for a Ray cluster to accept a connection; Ray itself tries for minutes
STORE_BYTES = 128 * 2**20  # nothing large travels through a Ray that we start
LOCAL = "127.0.0.1"

_ERRORS = (SpecError, TraceError, PeerLost, CheckpointError, InternalError)


@dataclass(frozen=True)
class Trained:
    """The outcome of a run."""

    value: Any
    """What the training function returned in worker 0."""

    folder: Path
    """The folder of the run, with its trace, weights and checkpoints."""


def run(
    train: Callable[..., Any],
    spec: RunSpec,
    *,
    config: Any = None,
    out: str | Path | None = None,
    placement: Placement | None = None,
    **options: Any,
) -> Trained:
    """Train with this function on the Ray cluster that this program is connected to.

    Each process of the run calls `train()`, or `train(config)` if there is a config. The function
    does what a script does: it calls `paceline.join()` and `run.prepare()`. `options` are the
    options of `paceline run` that `RunSpec` hasn't, such as `policy="backup:1"` or `epochs=10`;
    `patience_s` and `grace_s` are in seconds. `out`: the folder of the run; None:
    runs/FUNCTION-NUMBER.

    If this program isn't connected to Ray, a Ray on this machine is started for the run. Raises
    PacelineError if the run fails.
    """
    placement = placement or Placement()
    settings = Settings(spec=spec, **{"progress": False, **options})
    name = getattr(train, "__name__", "train").strip("<>")
    folder = new_run_dir(None if out is None else Path(out), Path(f"{name}.py")).resolve()
    files = pack(train, () if config is None else (config,))
    for file, content in files.items():  # `paceline run --resume` continues with them
        (folder / file).write_bytes(content)
    settings = msgspec.structs.replace(settings, script=str(folder / SCRIPT))
    with cluster(settings, placement, files=files) as found:
        code = Launcher(settings, folder, cluster=found).run()
        result = found.read_file("worker 0", RESULT)
    if code:
        kind = {error.exit_code: error for error in _ERRORS}.get(code, PacelineError)
        raise kind(f"the run failed with exit code {code}; its output is in {folder / 'output'}")
    return Trained(None if result is None else unpack(result), folder)


@contextmanager
def cluster(
    settings: Settings,
    placement: Placement,
    address: str | None = None,
    files: dict[str, bytes] | None = None,
) -> Iterator[RayCluster]:
    """Connect to Ray for a run with these settings."""
    if settings.tls_cert:
        raise SpecError(
            "TLS doesn't work on Ray, where the server may run on any node; leave out --tls-cert"
        )
    total = placement.total(settings.spec.workers, settings.servers)
    with connected(address, total), closing(RayCluster(placement, files)) as found:
        yield found


@contextmanager
def connected(address: str | None, total: dict[str, float]) -> Iterator[None]:
    """Connect this process to Ray, unless it is connected; disconnect at the end.

    `address`: of the cluster; None: that in RAY_ADDRESS, or else start a Ray on this machine. Ray
    counts processors and doesn't bind to them, so it is told to have as many as the run needs.
    """
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS")
    if address is not None:
        _check(address)
    quiet: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": "ERROR",
        "configure_logging": False,
    }
    try:
        if address is None:
            ray.init(
                address="local",
                num_cpus=ceil(total["CPU"]),
                include_dashboard=False,
                object_store_memory=STORE_BYTES,
                _node_ip_address=LOCAL,
                **quiet,
            )
        else:
            ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise SpecError(f"cannot connect to Ray: {error}") from None
    # Ray prints a page of its log for each node that is lost. The launcher says it in a line.
    with suppress(AttributeError):  # it is not public
        ray._private.worker.print_to_stdstream = lambda *_, **__: None
    try:
        yield
    finally:
        ray.shutdown()


def _check(address: str) -> None:
    """Raise SpecError if nobody listens at this address, or if we can't be a client of it."""
    if address.startswith("ray://"):
        raise SpecError(
            f"--address {address} is for clients outside the cluster, but Paceline must run on a "
            "node of it: use `ray job submit`, or give --address HOST:PORT on a node"
        )
    host, _, port = address.rpartition(":")
    if not port.isdecimal():  # such as "auto"
        return
    try:
        with closing(socket.create_connection((host.strip("[]"), int(port)), DIAL_S)):
            return
    except OSError as error:
        raise SpecError(
            f"there is no Ray cluster at {address}: {error.strerror or error}; start one with: ray "
            "start --head"
        ) from None
