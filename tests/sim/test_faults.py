# SPDX-License-Identifier: BSD-3-Clause
"""Fault strings."""

import pytest

from paceline.errors import SpecError
from paceline.sim.faults import Fault, parse_faults


def test_every_form_is_parsed_and_printed_back():
    text = (
        "kill 3 at 10s; kill 3 at 10s for 5s; kill any every 10m for 1m; freeze 2 at 1s for 2s; "
        "stall 1 at 2s; stall any every 1m for 5s"
    )

    faults = parse_faults(text)

    assert faults == (
        Fault("kill", 3, 10.0, repeats=False, lasting=None),
        Fault("kill", 3, 10.0, repeats=False, lasting=5.0),
        Fault("kill", None, 600.0, repeats=True, lasting=60.0),
        Fault("freeze", 2, 1.0, repeats=False, lasting=2.0),
        Fault("stall", 1, 2.0, repeats=False, lasting=None),
        Fault("stall", None, 60.0, repeats=True, lasting=5.0),
    )
    assert parse_faults("; ".join(map(str, faults))) == faults


def test_empty_string_means_none():
    assert parse_faults(" ; ") == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("explode 3 at 1s", "cannot parse fault .*; write kill 3 at"),
        ("kill 3", "cannot parse fault"),
        ("kill 3 at -1s", "at must be >= 0"),
        ("kill any every 0s for 1s", "every must be > 0"),
        ("freeze 3 at 1s", "a freeze needs a duration"),
        ("kill 3 at soon", "at must be a duration"),
    ],
)
def test_bad_string_is_refused(text, reason):
    with pytest.raises(SpecError, match=reason):
        parse_faults(text)
