# SPDX-License-Identifier: BSD-3-Clause
"""What a script learns about its last gradient, as `run.last`."""

from dataclasses import dataclass

from paceline.core.events import Fate

__all__ = ["Last"]


@dataclass(frozen=True)
class Last:
    """The fate of a worker's last gradient."""

    fate: Fate
    version: int  # of the parameters that it was computed at
    staleness: int  # updates between that version and the one at which its fate was decided
    contributors: int  # gradients in the update that it went into; 0: none, or not made yet
    waited_s: float  # time spent in `optimizer.step()` waiting for the answer
