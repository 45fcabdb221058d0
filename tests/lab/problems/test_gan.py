# SPDX-License-Identifier: BSD-3-Clause
"""The GAN's score: the Fréchet distance."""

import pytest
import torch

from paceline.lab.problems.gan import DrawnDigits, Features, frechet


def built(problem):
    torch.manual_seed(problem.seed)
    return problem.build()


def test_frechet_distance_of_known_distributions():
    torch.manual_seed(0)
    a = torch.randn(5, 5, dtype=torch.double)
    here = Features(torch.zeros(5).double(), a @ a.T)
    assert frechet(here, here) == pytest.approx(0.0, abs=1e-9)
    there = here._replace(mean=torch.full((5,), 2.0).double())
    assert frechet(here, there) == pytest.approx(20.0)
    # With common axes, it is the sum over them of (difference of deviations)².
    one, two = (
        Features(torch.zeros(2).double(), torch.diag(v).double())
        for v in (torch.tensor([1.0, 4.0]), torch.tensor([9.0, 1.0]))
    )
    assert frechet(one, two) == pytest.approx((1 - 3) ** 2 + (2 - 1) ** 2)


def test_untrained_generator_is_far_from_real_digits(data_folder, mnist):
    del mnist
    problem = DrawnDigits(batch=3, data=data_folder, scored=100)
    with torch.no_grad():
        assert problem.evaluate(built(problem))["distance"] > 20
