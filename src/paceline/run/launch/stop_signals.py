# SPDX-License-Identifier: BSD-3-Clause
"""The signals that ask a run to stop: Ctrl-C, `kill`, a closed terminal."""

import signal
import time
from types import FrameType
from typing import Self

__all__ = ["STOP_SIGNALS", "StopSignals"]

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_S = 0.5
"""Signals that arrive within this time are one request: a terminal that closes sends two."""


class StopSignals:
    """Counts the requests to stop that arrive while the context is open."""

    def __init__(self) -> None:
        self.count = 0
        self.last = 0  # the number of the last signal
        self._last_at = 0.0  # when it arrived
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        for number in STOP_SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # started with `nohup`: a closed terminal doesn't stop the run
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        now = time.monotonic()
        if not self.count or now >= self._last_at + SAME_S:
            self.count += 1
        self.last, self._last_at = number, now
