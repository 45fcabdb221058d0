# SPDX-License-Identifier: BSD-3-Clause
"""The Inception network: its cost, and its width."""

import pytest
import torch

from paceline.lab.models.inception import Inception


def test_multiplications_are_as_documented(multiplications):
    found = multiplications(Inception(), torch.zeros(1, 3, 32, 32))
    assert found == pytest.approx(2.6e6, rel=0.02)


def test_width_scales_the_network(parameter_counts):
    half, one, two = parameter_counts(Inception, 0.5, 1.0, 2.0)
    assert two > 3 * one
    assert one > 3 * half
