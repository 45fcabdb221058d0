# SPDX-License-Identifier: BSD-3-Clause
"""Logistic regression with a quadratic penalty, its optimum, and its curvature.

    F(w) = mean over i of log(1 + exp(-y_i w.x_i)) + l2/2 |w|²,   y_i in {-1, +1}

There is no constant term; add a column of ones to x if you need one. Everything is computed in
double precision, because the experiment measures how the distance to the optimum shrinks. For the
bounds of theory: F is L-smooth with L = (largest eigenvalue of the mean of x xᵀ)/4 + l2, and
c-strongly convex with c = l2, the largest c that holds for every w.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import softplus

from paceline.errors import SpecError
from paceline.lab import extras

__all__ = ["Curvature", "Logistic", "curvature", "optimum"]

GRADIENT_NORM_MAX = 1e-10
NEWTON_STEPS_MAX = 50


class Logistic(nn.Module):
    """Scores [B] of x [B, features], positive for label +1; the initial weights are zeros."""

    def __init__(self, features: int, l2: float) -> None:
        super().__init__()
        self.l2 = l2
        self.weight = nn.Parameter(torch.zeros(features, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.weight.dtype) @ self.weight

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample [B]; each includes the whole penalty, so that their mean
        does, too."""
        return softplus(-y * self(x)) + self.l2 / 2 * self.weight.square().sum()


class Curvature(NamedTuple):
    """Bounds on the curvature of the objective, everywhere and in all directions."""

    strong_convexity: float  # c
    smoothness: float  # L


def curvature(x: Tensor, l2: float) -> Curvature:
    """Return the bounds for the objective on this data."""
    rows = x.double()
    largest = float(torch.linalg.eigvalsh(rows.T @ rows / len(rows))[-1])
    return Curvature(l2, largest / 4 + l2)


def optimum(x: Tensor, y: Tensor, l2: float) -> tuple[Tensor, float]:
    """Return the best weight and its objective, to a gradient norm of at most 1e-10."""
    if l2 <= 0:
        raise SpecError(f"l2 must be > 0, got {l2}; without a penalty there may be no optimum")
    objective = _Objective(x.double(), y.double(), l2)

    def value_and_gradient(weight: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        at = torch.from_numpy(weight)
        return objective.value(at), objective.gradient(at).numpy()

    minimize = extras.load("scipy.optimize").minimize
    start = minimize(value_and_gradient, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B").x
    weight = torch.from_numpy(np.asarray(start))
    for _ in range(NEWTON_STEPS_MAX):
        gradient = objective.gradient(weight)
        if gradient.norm() <= GRADIENT_NORM_MAX:
            return weight, objective.value(weight)
        weight = weight - torch.linalg.solve(objective.hessian(weight), gradient)
    raise SpecError(
        f"found no optimum in {NEWTON_STEPS_MAX} Newton steps; "
        "scale the features to about 1, or use a larger l2"
    )


class _Objective(NamedTuple):
    """The objective in torch, which respects the limit on threads; NumPy doesn't."""

    x: Tensor
    y: Tensor
    l2: float

    def value(self, weight: Tensor) -> float:
        losses = softplus(-self.y * (self.x @ weight))
        return float(losses.mean() + self.l2 / 2 * weight @ weight)

    def gradient(self, weight: Tensor) -> Tensor:
        pull = self.y * torch.sigmoid(-self.y * (self.x @ weight))
        return self.l2 * weight - pull @ self.x / len(self.y)

    def hessian(self, weight: Tensor) -> Tensor:
        probability = torch.sigmoid(self.x @ weight)
        rows = self.x * (probability * (1 - probability))[:, None]
        return self.x.T @ rows / len(self.y) + self.l2 * torch.eye(len(weight)).double()
