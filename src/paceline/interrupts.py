# SPDX-License-Identifier: BSD-3-Clause
"""What Ctrl-C does to the process of a command.

While Python imports modules, Ctrl-C would print the traceback of whatever is being imported. So the
command line exits at once until a verb begins, which handles KeyboardInterrupt itself.
"""

import os
import signal
from typing import Any

__all__ = ["exit_on_interrupt", "raise_on_interrupt"]


def _exit(*_: Any) -> None:
    os._exit(128 + signal.SIGINT)


def exit_on_interrupt() -> None:
    """Exit quietly at Ctrl-C, unless something else than Python's own handler is set."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    """Raise KeyboardInterrupt at Ctrl-C again, if `exit_on_interrupt` has changed that."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)
