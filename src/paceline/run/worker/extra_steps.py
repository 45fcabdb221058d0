# SPDX-License-Identifier: BSD-3-Clause
"""End a script that keeps calling `optimizer.step()` after the run has ended.

The first extra step of each optimizer does nothing, so that a script with several optimizers can
complete the iteration in which the run ended. The second one ends the script: its loop doesn't ask
`run.finished`, and would otherwise compute gradients that nobody uses.
"""

import sys
from typing import NoReturn

__all__ = ["ExtraSteps", "LoopEnded", "end_script"]


class LoopEnded(SystemExit):
    """Ends a script, with exit code 0, whose loop goes on after the run has ended."""


def end_script(why: str) -> NoReturn:
    """End a script that would go on for ever, and print why."""
    print(
        f"{why}, so this worker ends its script, which goes on training; to run the code after "
        "your loop, leave the loop when run.finished is true",
        file=sys.stderr,
        flush=True,
    )
    raise LoopEnded(0)


class ExtraSteps:
    """Counts the steps that each optimizer makes after the end of the run."""

    def __init__(self) -> None:
        self._optimizers: set[int] = set()  # that have made one

    def count(self, optimizer: int, version: int) -> None:
        """Count a step after the end, at this version; the second one raises `LoopEnded`."""
        if optimizer in self._optimizers:
            end_script(f"the run ended at update {version}")
        self._optimizers.add(optimizer)
