# SPDX-License-Identifier: BSD-3-Clause
"""CartPole as a problem: a bad policy scores low."""

import torch

from paceline.lab.problems.cartpole import CartPole


def built(problem):
    torch.manual_seed(problem.seed)
    return problem.build()


def test_policy_that_always_pushes_one_way_falls_soon():
    problem = CartPole(batch=2, scored=5)
    model = built(problem)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        chance = problem.evaluate(model)["return"]
        model[-1].bias[0] = 100.0
        assert problem.evaluate(model)["return"] < 15 < chance
