# SPDX-License-Identifier: BSD-3-Clause
"""The exceptions: one root, and one documented exit code for each kind."""

import re
from pathlib import Path

import pytest

from paceline import errors
from paceline.errors import PacelineError

PAGE = Path(__file__).parents[1] / "docs" / "runtime.md"

KINDS = [getattr(errors, name) for name in errors.__all__]

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@every_kind
def test_every_error_is_a_paceline_error(kind):
    assert issubclass(kind, PacelineError)


def test_every_kind_of_error_has_its_own_exit_code():
    assert len({kind.exit_code for kind in KINDS}) == len(KINDS)


def test_every_exit_code_is_in_the_documentation():
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("\n## Exit codes\n")
    section, _, _ = rest.partition("\n## ")
    documented = re.findall(r"^\| (\d+) \|", section, re.MULTILINE)
    codes = {0} | {kind.exit_code for kind in KINDS}
    assert documented == [str(code) for code in sorted(codes)]


@every_kind
def test_tree_in_the_docstring_names_every_error(kind):
    assert kind.__name__ in errors.__doc__


@pytest.mark.parametrize("kind", [errors.SpecError, errors.TraceError])
def test_error_about_a_value_is_also_a_value_error(kind):
    assert issubclass(kind, ValueError)
