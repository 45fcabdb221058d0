# SPDX-License-Identifier: BSD-3-Clause
"""Text prediction: bits of a model that knows nothing, and what is predicted."""

import pytest
import torch

from paceline.lab.problems.shakespeare import Shakespeare


def built(problem):
    torch.manual_seed(problem.seed)
    return problem.build().double()


def small_lstm(data, scored=20):
    return Shakespeare(batch=2, data=data, model="lstm", width=8, length=16, scored=scored)


def test_uniform_model_needs_six_bits_for_65_characters(data_folder):
    problem = small_lstm(data_folder)
    model = built(problem)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        assert problem.evaluate(model)["bits"] == pytest.approx(6.0224, abs=1e-3)


def test_each_character_is_predicted_from_those_before_it(shakespeare, data_folder):
    """A model that repeats the character it sees is right where two in a row are equal."""

    class Echo(torch.nn.Module):
        def forward(self, x):
            seen.append(x)
            return 20.0 * torch.nn.functional.one_hot(x, 65)

    seen = []
    problem = small_lstm(data_folder, scored=1)
    bits = problem.evaluate(Echo())["bits"]
    piece = shakespeare.test[:17].long()
    assert torch.equal(seen[0][0], piece[:-1])
    wrong = (piece[1:] != piece[:-1]).double().mean().item()
    assert bits == pytest.approx(wrong * 20 / torch.log(torch.tensor(2.0)).item(), rel=1e-4)
