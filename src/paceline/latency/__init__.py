# SPDX-License-Identifier: BSD-3-Clause
"""How long a worker takes to compute a gradient, drawn from a seed; all times in seconds.

The simulator uses these times, and a real run injects them as delays. This package must not read a
clock (the caller passes the time), sleep or read files. `distributions` describes a single time,
`streams` a sequence of times, and `grammar` parses the strings of the command line.
"""

from paceline.latency.distributions import (
    Constant,
    Distribution,
    Exponential,
    Gamma,
    LogNormal,
    Mixture,
    Pareto,
    Sometimes,
    Sum,
    Weibull,
)
from paceline.latency.grammar import parse_latency
from paceline.latency.streams import Latency, Phases, Recorded, TimeModel, TimeStream

__all__ = [
    "Constant",
    "Distribution",
    "Exponential",
    "Gamma",
    "Latency",
    "LogNormal",
    "Mixture",
    "Pareto",
    "Phases",
    "Recorded",
    "Sometimes",
    "Sum",
    "TimeModel",
    "TimeStream",
    "Weibull",
    "parse_latency",
]
