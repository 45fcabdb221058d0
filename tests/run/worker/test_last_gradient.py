# SPDX-License-Identifier: BSD-3-Clause
"""What a script learns about its last gradient."""

from dataclasses import FrozenInstanceError

import pytest

from paceline import Fate
from paceline.run.worker.last_gradient import Last


def test_script_reads_the_fate_of_its_last_gradient_but_does_not_change_it():
    last = Last(Fate.ACCEPTED, version=3, staleness=1, contributors=2, waited_s=0.5)
    assert (last.fate, last.version, last.contributors) == ("accepted", 3, 2)
    with pytest.raises(FrozenInstanceError):
        last.fate = Fate.LATE
