# SPDX-License-Identifier: BSD-3-Clause
"""The version number has one source."""

import re

import paceline
from paceline.release import RELEASE


def test_version_of_the_package_is_the_release():
    assert paceline.__version__ == RELEASE


def test_release_is_a_version_number():
    assert re.fullmatch(r"\d+\.\d+\.\d+(?:(?:a|b|rc|\.dev)\d+)?", RELEASE)


def test_command_line_prints_the_release(call):
    assert call("--version") == (0, f"{RELEASE}\n", "")
