# SPDX-License-Identifier: BSD-3-Clause
"""What the OS says about a worker's process."""

from pathlib import Path

__all__ = ["is_stopped"]


def is_stopped(pid: int) -> bool:
    """Return whether the process was stopped (SIGSTOP, Ctrl-Z)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    # The state follows the name, which is in parentheses and may contain anything.
    # "t" doesn't count: it is a process under a debugger or profiler, stopped on purpose.
    return stat[stat.rfind(b")") + 2 :][:1] == b"T"
