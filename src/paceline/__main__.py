# SPDX-License-Identifier: BSD-3-Clause
"""Start the command line: `paceline`, or `python -m paceline`.

The command line takes a tenth of a second to import. Ctrl-C during that time exits quietly with the
usual code; after it, each verb handles Ctrl-C itself.
"""

import os  # Python has already imported it

INTERRUPTED = 130  # 128 + SIGINT; importing `signal` would take a while

try:
    from importlib import import_module

    from paceline.interrupts import exit_on_interrupt
except KeyboardInterrupt:
    os._exit(INTERRUPTED)

__all__ = ["main"]


def main() -> None:
    """Import the command line and run it."""
    try:
        exit_on_interrupt()
        try:
            import_module("paceline.cli").main()
        finally:
            exit_on_interrupt()  # cleaning up takes Python a while, too
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
