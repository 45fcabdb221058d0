# SPDX-License-Identifier: BSD-3-Clause
"""The convex problem: its gap to the optimum, and the variance of its gradients."""

import pytest
import torch

from paceline.lab.problems.logistic import Census


def built(problem):
    torch.manual_seed(problem.seed)
    return problem.build()


def test_gap_is_zero_at_the_optimum_and_positive_elsewhere(data_folder, a9a):
    problem = Census(batch=2, data=data_folder, l2=0.1)
    model = built(problem)
    with torch.no_grad():
        start = problem.evaluate(model)
        assert 0.1 < start["gap"] < 0.7
    # The variance is that of the gradients of single rows.
    rows = torch.arange(0, len(a9a.train_y), 50)
    x, y = a9a.train_x[rows].double(), a9a.train_y[rows].double()
    grads = -0.5 * y[:, None] * x  # at w = 0
    spread = (grads - grads.mean(0)).square().sum(1).mean().item()
    assert start["variance"] == pytest.approx(spread, rel=0.1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=30)

    def closure():
        optimizer.zero_grad()
        loss = model.losses(a9a.train_x, a9a.train_y).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        assert 0 <= problem.evaluate(model)["gap"] < 1e-4
