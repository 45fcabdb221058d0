# SPDX-License-Identifier: BSD-3-Clause
"""Leave the run when this process gets SIGTERM, because its machine is about to go.

The signal may arrive anywhere: while the worker computes, waits, or is in the middle of a message.
So it says goodbye over a connection of its own, abandons its gradient and ends the script, wherever
that is, with `Departed`. The server leases its batch to another worker at once, and nobody waits
for it. Python handles signals between two of its instructions, which in a backward pass is at the
latest when the next gradient of a parameter is complete.
"""

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from paceline.errors import PacelineError
from paceline.run.launch.environment import Identity
from paceline.run.net.handshake import connect
from paceline.run.net.messages import LeaveRun
from paceline.run.net.tls import client_context

__all__ = ["Departed", "Departure"]

GOODBYE_S = 2.0  # for the server to answer; if it doesn't, it notices that the process is gone


class Departed(SystemExit):
    """Ends the script of a worker that leaves; its process exits with code 0."""

    def __init__(self) -> None:
        super().__init__(0)


class Departure:
    """What a worker does when it is told to go."""

    def __init__(self, who: Identity, tell_launcher: Callable[[], None]) -> None:
        self._who = who
        self._tell_launcher = tell_launcher
        self._thread = threading.local()  # the signal mask of a thread that forks
        self.session = b""
        """Of this worker at the server; empty: it hasn't joined."""
        self.has_begun = False

    def watch(self) -> None:
        """Leave on SIGTERM, unless the script handles that signal itself."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        signal.signal(signal.SIGTERM, self._on_signal)
        # Processes that the script forks are ended by this signal as usual. It is blocked until
        # they don't have our handler any more, which would swallow it.
        os.register_at_fork(
            before=self._block, after_in_parent=self._unblock, after_in_child=self._unwatch
        )

    def check(self) -> None:
        """Raise Departed if this worker leaves: the script has gone on nevertheless."""
        if self.has_begun:
            raise Departed

    def _block(self) -> None:
        self._thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._thread.mask)

    def _unwatch(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._unblock()

    def _on_signal(self, number: int, frame: FrameType | None) -> NoReturn:
        del number, frame
        self.has_begun = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # another one ends the process at once
        self._tell_launcher()
        with suppress(PacelineError, OSError):  # the server notices that the process is gone
            self._say_goodbye()
        raise Departed

    def _say_goodbye(self) -> None:
        """Tell the server, and wait until it knows: this process may exit then."""
        who = self._who
        if who.worker is None or not self.session:
            return
        tls = None if who.tls is None else client_context(who.tls)
        channel = connect(who.address, who.token(), GOODBYE_S, tls)
        try:
            channel.send(LeaveRun(who.worker, self.session))
            channel.receive()
        finally:
            channel.close()
