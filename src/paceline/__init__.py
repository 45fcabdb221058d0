# SPDX-License-Identifier: BSD-3-Clause
"""Paceline: data-parallel training for PyTorch that doesn't wait for stragglers.

These names are the public API. Importing `paceline` imports neither torch nor numpy: each name is
loaded when you first use it.

    >>> import paceline
    >>> cluster = paceline.Cluster.parse("50ms + 5% exp:500ms")
    >>> spec = paceline.RunSpec(workers=8, steps=1000)
    >>> trace = paceline.simulate("backup:1", cluster, spec)
    >>> paceline.summarize(trace).updates
    1000
"""

# Import nothing here, not even `typing` or `importlib`: until `__main__` handles Ctrl-C, it would
# print a traceback.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from paceline.core.events import Fate
    from paceline.core.policies import parse_policy
    from paceline.core.policy import Policy
    from paceline.errors import (
        CheckpointError,
        InternalError,
        PacelineError,
        PeerLost,
        ProtocolError,
        SpecError,
        TraceError,
    )
    from paceline.release import RELEASE as __version__  # noqa: N811 # the usual name of it
    from paceline.run.script import Run, join
    from paceline.sim import convergence
    from paceline.sim.cluster import Cluster
    from paceline.sim.planner import Plan, plan
    from paceline.sim.simulate import simulate
    from paceline.spec import RunSpec
    from paceline.trace.reader import read_trace
    from paceline.trace.schema import Trace, write_trace
    from paceline.watch.summary import summarize

__all__ = [
    "CheckpointError",
    "Cluster",
    "Fate",
    "InternalError",
    "PacelineError",
    "PeerLost",
    "Plan",
    "Policy",
    "ProtocolError",
    "Run",
    "RunSpec",
    "SpecError",
    "Trace",
    "TraceError",
    "__version__",
    "convergence",
    "join",
    "parse_policy",
    "plan",
    "read_trace",
    "simulate",
    "summarize",
    "write_trace",
]

_MODULES = {
    "CheckpointError": "paceline.errors",
    "Cluster": "paceline.sim.cluster",
    "Fate": "paceline.core.events",
    "InternalError": "paceline.errors",
    "PacelineError": "paceline.errors",
    "PeerLost": "paceline.errors",
    "Plan": "paceline.sim.planner",
    "Policy": "paceline.core.policy",
    "ProtocolError": "paceline.errors",
    "Run": "paceline.run.script",
    "RunSpec": "paceline.spec",
    "SpecError": "paceline.errors",
    "Trace": "paceline.trace.schema",
    "TraceError": "paceline.errors",
    "__version__": "paceline.release",
    "convergence": "paceline.sim.convergence",
    "join": "paceline.run.script",
    "parse_policy": "paceline.core.policies",
    "plan": "paceline.sim.planner",
    "read_trace": "paceline.trace.reader",
    "simulate": "paceline.sim.simulate",
    "summarize": "paceline.watch.summary",
    "write_trace": "paceline.trace.schema",
}


def __getattr__(name: str) -> "Any":
    if name not in _MODULES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    value = __import__(_MODULES[name], fromlist=["*"])
    if name != "convergence":  # that is the module itself
        value = getattr(value, "RELEASE" if name == "__version__" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
