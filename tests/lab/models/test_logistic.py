# SPDX-License-Identifier: BSD-3-Clause
"""Logistic regression: the optimum, and the bounds of the curvature."""

from itertools import pairwise

import pytest
import torch

from paceline.errors import SpecError
from paceline.lab.models.logistic import Logistic, curvature, optimum


def data(rows=200, features=7):
    torch.manual_seed(0)
    x = torch.randn(rows, features, dtype=torch.double)
    y = torch.where(x[:, 0] + torch.randn(rows, dtype=torch.double) > 0, 1.0, -1.0)
    return x, y.double()


def objective(x, y, l2, weight):
    model = Logistic(x.shape[1], l2)
    with torch.no_grad():
        model.weight.copy_(weight)
    return model.losses(x, y).mean(), model.weight


@pytest.mark.parametrize("l2", [1e-4, 0.1, 10.0])
def test_gradient_is_zero_at_the_optimum(l2):
    x, y = data()
    weight, value = optimum(x, y, l2)
    loss, parameter = objective(x, y, l2, weight)
    loss.backward()
    assert parameter.grad.norm() <= 2e-10
    assert loss.item() == pytest.approx(value, abs=1e-14)


def test_separable_data_has_an_optimum():
    x = torch.tensor([[1.0], [2.0], [-1.0]])
    weight, value = optimum(x, torch.tensor([1.0, 1.0, -1.0]), 1e-6)
    assert weight.isfinite().all()
    assert 0 < value < 1e-3


def test_optimum_on_real_data_is_found(a9a):
    l2 = 1 / len(a9a.train_y)
    weight, value = optimum(a9a.train_x, a9a.train_y, l2)
    loss, parameter = objective(a9a.train_x, a9a.train_y, l2, weight)
    loss.backward()
    assert parameter.grad.norm() <= 2e-10
    assert value == pytest.approx(0.3233795825, abs=1e-9)
    right = (a9a.test_x.double() @ weight).sign() == a9a.test_y
    assert right.double().mean() > 0.84


def test_curvature_stays_within_its_bounds():
    x, y = data()
    l2 = 0.01
    c, smoothness = curvature(x, l2)
    assert c == l2
    for scale in (0.0, 1.0, 100.0):
        weight = scale * torch.randn(7, dtype=torch.double)

        def value(w):
            return torch.nn.functional.softplus(-y * (x @ w)).mean() + l2 / 2 * w @ w

        curvatures = torch.linalg.eigvalsh(torch.autograd.functional.hessian(value, weight))
        assert curvatures.min() >= c - 1e-12
        assert curvatures.max() <= smoothness + 1e-12
        if scale == 0.0:  # there the bound is reached
            assert curvatures.max().item() == pytest.approx(smoothness)


def test_gradient_descent_converges_as_fast_as_theory_says():
    x, y = data()
    l2 = 0.1
    _, best = optimum(x, y, l2)
    c, smoothness = curvature(x, l2)
    model = Logistic(7, l2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / smoothness)
    gaps = []
    for _ in range(30):
        loss = model.losses(x, y).mean()
        gaps.append(loss.item() - best)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ratios = [after / before for before, after in pairwise(gaps) if after > 1e-13]
    assert len(ratios) > 5
    assert max(ratios) <= 1 - c / smoothness


def test_missing_penalty_is_refused():
    with pytest.raises(SpecError, match="l2 must be > 0, got 0"):
        optimum(*data(), 0.0)
