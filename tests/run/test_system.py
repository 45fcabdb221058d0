# SPDX-License-Identifier: BSD-3-Clause
"""The real operating system is the default; a simulation replaces single parts of it."""

import os
import time

from paceline.run.system import SYSTEM, System


def test_default_is_the_real_system():
    before = time.monotonic()
    assert before <= SYSTEM.monotonic() <= time.monotonic()
    assert SYSTEM.cpu_time() <= time.process_time()
    assert not SYSTEM.is_stopped(os.getpid())


def test_single_parts_can_be_replaced():
    system = System(monotonic=lambda: 7.0)
    assert system.monotonic() == 7.0
    assert system.cpu_time is SYSTEM.cpu_time
