# SPDX-License-Identifier: BSD-3-Clause
"""Paceline: data-parallel training for PyTorch that does not wait for slow workers.

This is the façade; what is not listed here is not public. Importing it imports neither torch nor
numpy: a name is loaded when it is first used.

    >>> import paceline
    >>> cluster = paceline.Cluster.parse("50ms + 5% exp:500ms")
    >>> spec = paceline.RunSpec(workers=8, steps=1000)
    >>> trace = paceline.simulate("backup:1", cluster, spec)
    >>> paceline.summarize(trace).updates
    1000
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.errors import (
    InternalError,
    PacelineError,
    PeerLost,
    ProtocolError,
    SpecError,
    TraceError,
)

if TYPE_CHECKING:
    from paceline.core.policies import (
        Async,
        Backup,
        BatchSync,
        Deadline,
        Delayed,
        SoftSync,
        Ssp,
        Sync,
        parse_policy,
    )
    from paceline.core.policy import Policy
    from paceline.run.script import join
    from paceline.sim import convergence
    from paceline.sim.cluster import Cluster
    from paceline.sim.planner import plan
    from paceline.sim.simulate import simulate
    from paceline.spec import RunSpec
    from paceline.trace.reader import read_trace
    from paceline.trace.schema import write_trace
    from paceline.watch.summary import summarize

__all__ = [
    "Async",
    "Backup",
    "BatchSync",
    "Cluster",
    "Deadline",
    "Delayed",
    "InternalError",
    "PacelineError",
    "PeerLost",
    "Policy",
    "ProtocolError",
    "RunSpec",
    "SoftSync",
    "SpecError",
    "Ssp",
    "Sync",
    "TraceError",
    "convergence",
    "join",
    "parse_policy",
    "plan",
    "read_trace",
    "simulate",
    "summarize",
    "write_trace",
]

_HOMES = {
    "Policy": "paceline.core.policy",
    "RunSpec": "paceline.spec",
    "Cluster": "paceline.sim.cluster",
    "join": "paceline.run.script",
    "plan": "paceline.sim.planner",
    "simulate": "paceline.sim.simulate",
    "summarize": "paceline.watch.summary",
    "read_trace": "paceline.trace.reader",
    "write_trace": "paceline.trace.schema",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    if name == "convergence":
        return import_module("paceline.sim.convergence")
    value = getattr(import_module(_HOMES.get(name, "paceline.core.policies")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
