# SPDX-License-Identifier: BSD-3-Clause
"""Signals that ask a run to stop are counted, and handlers are restored."""

import os
import signal

import pytest

from paceline.run.launch import stop_signals
from paceline.run.launch.stop_signals import STOP_SIGNALS, StopSignals


def test_signals_at_the_same_time_are_one_request():
    """As from a terminal that closes: the shell sends SIGHUP, and then the kernel does."""
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        assert (signals.count, signals.last) == (1, signal.SIGHUP)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_is_counted_and_remembered(number, monkeypatch):
    monkeypatch.setattr(stop_signals, "SAME_S", 0.0)
    with StopSignals() as signals:
        assert signals.count == 0
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert (signals.count, signals.last) == (2, number)


def test_handlers_are_restored():
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopSignals():
        assert all(signal.getsignal(number) not in before for number in STOP_SIGNALS)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_closed_terminal_is_ignored_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.count == 0
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
