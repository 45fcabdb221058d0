# SPDX-License-Identifier: BSD-3-Clause
"""Notice the steps of an optimizer, without changing them.

An optimizer whose `step` calls `super().step()` runs its step hooks twice: torch wraps the `step`
of every class. Here, such a step counts once.
"""

import inspect
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.optim import Optimizer

__all__ = ["call_after_step"]


def call_after_step(optimizer: Optimizer, callback: Callable[[], None]) -> None:
    """Call back after each step of the optimizer that completes."""
    steps = _NestedSteps(callback)
    optimizer.register_step_pre_hook(steps.on_begin)
    optimizer.register_step_post_hook(steps.on_end)


class _NestedSteps:
    """The calls of `step` of one optimizer that are being executed."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._depth = 0
        self._outermost: FrameType | None = None  # not None iff the depth is > 0

    def on_begin(self, *_: Any) -> None:
        """Note that a call begins."""
        frame = inspect.currentframe()
        if not _is_running(self._outermost, frame):  # none is, or an exception ended the last one
            self._depth, self._outermost = 0, frame and frame.f_back
        self._depth += 1

    def on_end(self, *_: Any) -> None:
        """Note that a call ends; if it is the outermost one, call back."""
        self._depth -= 1
        if self._depth == 0:
            self._outermost = None
            self._callback()


def _is_running(wanted: FrameType | None, frame: FrameType | None) -> bool:
    """Return whether a frame is among the callers of another one."""
    while wanted is not None and frame is not None:
        if frame is wanted:
            return True
        frame = frame.f_back
    return False
