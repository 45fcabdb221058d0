# SPDX-License-Identifier: BSD-3-Clause
"""Scripts in processes of the fork server, without a run."""

import os
import select
from pathlib import Path

import msgspec

from paceline.run.launch.child import ChildPipes, Task
from paceline.run.launch.environment import Identity, variables

__all__ = ["PATIENCE_S", "ForkedScript"]

PATIENCE_S = 60  # for what takes a moment


class ForkedScript:
    """A script in a process of the fork server, and our ends of its pipes."""

    def __init__(self, forkserver, path, **changes):
        self._forkserver = forkserver
        who = Identity("unix:@nowhere", Path("no-token"), path.parent, worker=3)
        task = Task(variables(who), str(path), (), str(path.parent), seed=0, threads=1)
        forkserver.start()
        while not forkserver.wait_ready(1.0):
            pass
        (self.out, out), (self.err, err), (self.failure, failure) = (os.pipe() for _ in range(3))
        self.pid = forkserver.fork(
            msgspec.structs.replace(task, **changes), ChildPipes(out, err, failure)
        )
        for fd in (out, err, failure):
            os.close(fd)

    def code(self):
        """Wait for its exit, and return its exit code."""
        while True:
            select.select([self._forkserver], [], [], PATIENCE_S)
            for ended in self._forkserver.take_exited():
                if ended.pid == self.pid:
                    return ended.code

    def output(self):
        """Return all that it wrote to each of its pipes."""
        found = []
        for fd in (self.out, self.err, self.failure):
            with open(fd, "rb") as pipe:
                found.append(pipe.read())
        return found
