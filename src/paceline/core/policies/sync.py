# SPDX-License-Identifier: BSD-3-Clause
"""Full synchronous training: every update waits for all W workers.

The gradient of an update is the mean over all mini-batches at the same version, so the run equals
one process with a W times larger batch. One slow worker slows down all others.

Literature: synchronous SGD. `backup:0` and `delayed:0` decide the same, event for event.
"""

from dataclasses import dataclass

from paceline.core.policy import Policy

__all__ = ["Sync"]


@dataclass(frozen=True)
class Sync(Policy):
    """Take the gradients of all W workers.

    >>> str(Sync())
    'sync'
    """

    name = "sync"
    form = "sync"
