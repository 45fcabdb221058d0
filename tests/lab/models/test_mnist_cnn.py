# SPDX-License-Identifier: BSD-3-Clause
"""The MNIST CNN: its cost, and its width."""

import pytest
import torch

from paceline.lab.models.mnist_cnn import MnistCnn


def test_multiplications_are_as_documented(multiplications):
    found = multiplications(MnistCnn(), torch.zeros(1, 1, 28, 28))
    assert found == pytest.approx(2.7e6, rel=0.02)


def test_width_scales_the_network(parameter_counts):
    half, one, two = parameter_counts(MnistCnn, 0.5, 1.0, 2.0)
    assert two > 3 * one
    assert one > 3 * half
