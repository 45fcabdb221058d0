# SPDX-License-Identifier: BSD-3-Clause
"""Recipes: the learning rate over time, and the optimizer."""

import pytest
import torch

from paceline.errors import SpecError
from paceline.lab.recipe import Recipe


def test_rate_is_constant_and_then_falls_to_zero():
    recipe = Recipe(0.8, fall_from=0.5)
    assert [recipe.rate(epochs, 10.0) for epochs in (0.0, 5.0, 7.5, 10.0)] == pytest.approx(
        [0.8, 0.8, 0.4, 0.0]
    )


def test_rate_stays_constant_by_default():
    assert Recipe(0.8).rate(10.0, 10.0) == 0.8


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_rate_must_be_positive(rate):
    with pytest.raises(SpecError, match=f"rate must be > 0, got {rate}"):
        Recipe(rate)


@pytest.mark.parametrize(
    ("recipe", "kind", "options"),
    [
        (Recipe(0.1, momentum=0.9), torch.optim.SGD, {"momentum": 0.9}),
        (
            Recipe(0.1, "rmsprop", 0.9, smoothing=0.95, eps=0.5),
            torch.optim.RMSprop,
            {"alpha": 0.95, "eps": 0.5, "momentum": 0.9},
        ),
        (Recipe(0.1, "adam", weight_decay=0.3), torch.optim.Adam, {"weight_decay": 0.3}),
    ],
)
def test_optimizer_has_the_options_of_the_recipe(recipe, kind, options):
    optimizer = recipe.optimizer([torch.zeros(3, requires_grad=True)])
    assert type(optimizer) is kind
    assert optimizer.defaults | options | {"lr": 0.1} == optimizer.defaults
