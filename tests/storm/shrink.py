# SPDX-License-Identifier: BSD-3-Clause
"""Find the smallest scenario that still breaks the same law."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from storm.scenario import Scenario
from storm.storm import Outcome, run_storm

__all__ = ["Shrunk", "shrink"]

WORDS = 5  # that tell which law was broken


class Shrunk(NamedTuple):
    """The smallest failing scenario that was found."""

    kept: list[int]  # the faults that it needs
    outcome: Outcome


def shrink(scenario: Scenario, run: Callable[[Scenario], Outcome] = run_storm) -> Shrunk:
    """Leave out one fault after the other, as long as the same law is broken."""
    kept = list(range(scenario.fault_count))
    smallest = run(scenario)
    assert smallest.violation, "only a scenario that breaks a law can be shrunk"
    law = _law(smallest)
    for fault in reversed(range(scenario.fault_count)):
        without = [one for one in kept if one != fault]
        outcome = run(scenario.only(without))
        if outcome.violation and _law(outcome) == law:
            kept, smallest = without, outcome
    return Shrunk(kept, smallest)


def _law(outcome: Outcome) -> list[str]:
    """Return the first words of a violation, whatever the numbers in them."""
    return re.sub(r"\d+", "0", outcome.violation).split()[:WORDS]
