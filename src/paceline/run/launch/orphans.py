# SPDX-License-Identifier: BSD-3-Clause
"""End the processes that a script has left behind.

Theory of operation
    Every process of a run adopts the orphans among its descendants, and so does the fork server.
    So whatever a script starts stays below its process, even if it starts a session of its own or
    detaches from its parent. When the process exits, for whatever reason, the fork server becomes
    the parent of what is left: these are the orphans. They are asked to exit and, after a moment,
    killed. Their own children become orphans then, and are ended in the same way.

    Helpers of the standard library, such as the one that removes shared memory, use the moment to
    clean up.
"""

import os
import signal
from collections.abc import Collection
from contextlib import suppress
from math import inf

from paceline.run.launch.prctl import adopt_orphans
from paceline.run.process_status import children_of

__all__ = ["Orphans"]

GRACE_S = 1.0  # after the exit of the process that started them


class Orphans:
    """The processes that this one has adopted, except those that it had before."""

    def __init__(self) -> None:
        adopt_orphans()
        self._others = children_of(os.getpid())
        self._kill_at: dict[int, float] = {}  # by pid; of those that were asked to exit

    def end(self, forked: Collection[int], exited_at: float, now: float) -> float:
        """Ask new orphans to exit, and kill those that had time to; return when to call again.

        `forked`: the children that this process forked itself. `exited_at`: when the last of them
        exited that has. Call it also when any child has exited; inf: only then.
        """
        kill_at = {}
        for pid in children_of(os.getpid()) - self._others - set(forked):
            is_new = pid not in self._kill_at
            kill_at[pid] = self._kill_at.get(pid, exited_at + GRACE_S)
            if now >= kill_at[pid]:
                _signal(pid, signal.SIGKILL)
            elif is_new:
                _signal(pid, signal.SIGTERM)
        self._kill_at = kill_at
        return min([at for at in kill_at.values() if at > now], default=inf)

    def __bool__(self) -> bool:
        """Return whether there were any at the last call of `end`."""
        return bool(self._kill_at)


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it runs as another user
        os.kill(pid, number)
