# SPDX-License-Identifier: BSD-3-Clause
"""`paceline serve` as a child of worker 0, for workers that another launcher has started.

The child must never outlive its parent. If the parent is killed, the OS sends the child a signal.
If the other launcher stops the parent, the parent stops the child and waits for it first, so that
the run is saved before the other launcher sees that everything has ended.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

from paceline.run.launch.environment import Identity
from paceline.run.launch.outer_launcher import read_announcement
from paceline.run.launch.own_signals import handle_in_this_process

__all__ = ["ServingChild"]

_PROGRAM = """
import sys
sys.path[:] = {path!r}
from paceline.run.launch.prctl import die_with
die_with({parent}, {number})
from paceline.run.launch.outer_launcher import announce_to
announce_to({pipe})
from paceline.__main__ import main
main()
"""


class ServingChild:
    """The launcher of the run's server, in a process of its own."""

    def __init__(self, words: Sequence[str], *, saves: bool) -> None:
        """Start `paceline serve` with these words.

        `saves`: whether it saves the run when it is stopped. If not, it vanishes as if the host
        had lost power: its workers then wait for the next server instead of ending their scripts.
        """
        self._saves = saves
        number = signal.SIGTERM if saves else signal.SIGKILL
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # private, so it has no types
        self._told, pipe = os.pipe()
        program = _PROGRAM.format(path=sys.path, parent=os.getpid(), number=int(number), pipe=pipe)
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-c", program, "serve", *words],
            pass_fds=[pipe],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # the other launcher signals the whole group of its workers
        )
        os.close(pipe)

    def wait_listening(self) -> Identity | None:
        """Wait until it knows the server's address; None: it has exited instead."""
        return read_announcement(self._told)

    @property
    def has_exited(self) -> bool:
        """Whether it has ended, so that there will be no server any more."""
        return self._process.poll() is not None

    def wait(self) -> int:
        """Wait until the run has ended; return the exit code."""
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def stop(self) -> int:
        """End the run now; return the exit code."""
        self._process.send_signal(signal.SIGTERM if self._saves else signal.SIGKILL)
        return self.wait()

    def stop_first(self, prepare: Callable[[], None]) -> None:
        """Stop it before SIGTERM or SIGHUP ends this process, unless the script handles them.

        `prepare` is called first.
        """

        def stop(number: int) -> None:
            signal.signal(number, signal.SIG_DFL)  # a second one ends this process at once
            prepare()
            self.stop()
            os.kill(os.getpid(), number)

        handle_in_this_process([signal.SIGTERM, signal.SIGHUP], stop)
