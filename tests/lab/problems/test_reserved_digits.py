# SPDX-License-Identifier: BSD-3-Clause
"""Reserved digits: who draws them, and how they are scored."""

import pytest
import torch

from paceline.lab.problems.reserved_digits import ReservedDigits


def built(problem):
    torch.manual_seed(problem.seed)
    return problem.build()


def reserved_digits(data, batch=4):
    return ReservedDigits(
        batch=batch, data=data, width=0.25, scored=300, reserved=(8, 9), owners=(0,), workers=3
    )


def test_only_owners_draw_reserved_digits(data_folder, mnist):
    problem = reserved_digits(data_folder, batch=200)
    for worker in range(3):
        labels = mnist.train_y[torch.from_numpy(problem.pool().of(worker))]
        assert bool(torch.isin(labels, torch.tensor([8, 9])).any()) == (worker == 0)


def test_accuracy_combines_reserved_and_other_digits(data_folder, mnist):
    problem = reserved_digits(data_folder)
    with torch.no_grad():
        scores = problem.evaluate(built(problem).eval())
    part = torch.isin(mnist.test_y[:300], torch.tensor([8, 9])).double().mean().item()
    whole = part * scores["reserved"] + (1 - part) * scores["others"]
    assert scores["accuracy"] == pytest.approx(whole)
