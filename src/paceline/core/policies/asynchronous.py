# SPDX-License-Identifier: BSD-3-Clause
"""Asynchronous training: every gradient is an update of its own.

No worker waits, so with W workers a gradient is on average W - 1 updates old when it is applied.

Literature: Downpour SGD (Dean et al. 2012); Async-SGD in Chen et al. 2016.
"""

from dataclasses import dataclass

from paceline.core.barrier_free import Free

__all__ = ["Async"]


@dataclass(frozen=True)
class Async(Free):
    """Apply every gradient as soon as it arrives.

    >>> str(Async(lr="inverse"))
    'async:lr=inverse'
    """

    name = "async"
    form = "async, or async:lr=inverse, or async:bound=20 to refuse what is older than 20 updates"
