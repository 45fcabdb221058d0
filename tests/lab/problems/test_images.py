# SPDX-License-Identifier: BSD-3-Clause
"""Image classification: losses are the same alone and together, and the evaluation."""

from dataclasses import replace

import pytest
import torch

from paceline.lab.problem import Draw
from paceline.lab.problems.images import Digits, Photographs


@pytest.fixture(params=["digits", "photographs"])
def problem(request, data_folder, data_cache, mnist, cifar10):
    del mnist, cifar10  # skips the test if the data is missing
    if request.param == "digits":
        return Digits(batch=2, data=data_folder, width=0.25, scored=30)
    return Photographs(batch=2, data=data_folder, cache=data_cache, width=0.5, scored=30)


def test_losses_are_the_same_alone_and_together(problem):
    model = problem.build().eval()  # in training, batch norm looks at the whole batch
    draws = [Draw(0, 0), Draw(3, 1), Draw(1, 7)]
    with torch.no_grad():
        alone = torch.cat([problem.losses(model, [draw]) for draw in draws])
        assert torch.allclose(problem.losses(model, draws), alone, atol=1e-4)
    assert len(set(alone.tolist())) == 3


def test_accuracy_counts_the_scored_images(problem, monkeypatch):
    model = problem.build().eval()
    with torch.no_grad():
        at_once = problem.evaluate(model)
        monkeypatch.setattr("paceline.lab.problems.images.SCORED_AT_ONCE", 7)
        in_parts = problem.evaluate(model)
    assert in_parts["accuracy"] == at_once["accuracy"]
    assert in_parts["loss"] == pytest.approx(at_once["loss"], rel=1e-5)
    assert (30 * at_once["accuracy"]) % 1 == pytest.approx(0, abs=1e-9)


def test_images_are_augmented_in_training_only(problem):
    pixels = problem.images().test_x[:4]
    plain = problem.preprocess(pixels, [])
    assert torch.equal(plain, problem.preprocess(pixels, []))
    assert not torch.equal(plain, problem.preprocess(pixels, [Draw(0, 0)]))
    other = replace(problem, seed=1).preprocess(pixels, [Draw(0, 0)])
    assert not torch.equal(other, problem.preprocess(pixels, [Draw(0, 0)]))
