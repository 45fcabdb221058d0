# SPDX-License-Identifier: BSD-3-Clause
"""Signal handlers of one process, which those that it forks don't inherit.

A process that is forked has the handlers of its parent. Python loses a signal that arrives before
the new process executes its first instruction. So signals are blocked while a process is forked,
until it has the default handlers.
"""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType

__all__ = ["handle_in_this_process"]


def handle_in_this_process(numbers: Sequence[int], handle: Callable[[int], None]) -> None:
    """Handle those of these signals that have the default handler, only in this process.

    Does nothing outside of the main thread, where Python handles no signals.
    """
    is_main = threading.current_thread() is threading.main_thread()
    ours = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    if not (is_main and ours):
        return
    masks = threading.local()  # of the threads that fork

    def on_signal(number: int, frame: FrameType | None) -> None:
        del frame
        handle(number)

    def block() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, ours)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def reset() -> None:
        for number in ours:
            if signal.getsignal(number) is on_signal:
                signal.signal(number, signal.SIG_DFL)
        unblock()

    for number in ours:
        signal.signal(number, on_signal)
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=reset)
