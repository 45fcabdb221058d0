# SPDX-License-Identifier: BSD-3-Clause
"""The interface of problems: a value with four methods, and draws that sort and compare."""

from dataclasses import FrozenInstanceError

import pytest

from paceline.lab.problem import Draw, Problem
from toys import Clouds


def test_problem_without_its_methods_cannot_be_created():
    with pytest.raises(TypeError, match="abstract"):
        Problem(batch=1)


def test_problem_is_a_value():
    assert Clouds(seed=1) == Clouds(seed=1) != Clouds(seed=2)
    assert len({Clouds(), Clouds(), Clouds(dropout=0.5)}) == 2
    with pytest.raises(FrozenInstanceError):
        Clouds().seed = 3


def test_draw_is_identified_by_worker_and_number():
    assert sorted({Draw(1, 0), Draw(0, 2), Draw(1, 0)}) == [(0, 2), (1, 0)]
