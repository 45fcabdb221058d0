# SPDX-License-Identifier: BSD-3-Clause
"""The figures of the README and of docs/ look like all others, and colours have one source."""

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import paceline
from figure_checks import check_figure

SRC = Path(paceline.__file__).parent
SCRIPT = Path(__file__).parents[1] / "docs" / "figures.py"

FAST = ["timeline", "arrivals", "late", "target", "race"]
"""The figures that are drawn within a second; `growth` makes 36 plans."""

COLOUR = re.compile(r"""["']#[0-9a-fA-F]{6}["']|["'](?:C\d|C\{|tab:)|(?:colormaps|cmap)\b""")
"""A colour of matplotlib's own, or one that is spelled out."""


@pytest.fixture(scope="module")
def figures():
    """Return the module docs/figures.py."""
    spec = spec_from_file_location("docs_figures", SCRIPT)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", FAST)
def test_figure_is_labelled_and_nothing_covers_its_data(figures, name):
    check_figure(getattr(figures, f"draw_{name}")())


def test_colours_are_defined_in_one_module():
    files = [SCRIPT, *SRC.rglob("*.py")]
    coloured = [file.name for file in files if COLOUR.search(file.read_text(encoding="utf-8"))]
    assert coloured == ["figure_style.py"]
