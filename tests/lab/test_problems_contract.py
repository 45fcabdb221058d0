# SPDX-License-Identifier: BSD-3-Clause
"""Rules that every problem keeps, checked for a table of problems."""

from dataclasses import replace

import pytest
import torch

from paceline.lab.problem import Draw
from paceline.lab.problems.cartpole import CartPole
from paceline.lab.problems.gan import DrawnDigits
from paceline.lab.problems.logistic import Census
from paceline.lab.problems.reserved_digits import ReservedDigits
from paceline.lab.problems.shakespeare import Shakespeare

DRAWS = [Draw(0, 0), Draw(2, 7), Draw(1, 0)]

PROBLEMS = {
    "lstm": lambda data: Shakespeare(
        batch=2, data=data, model="lstm", width=8, length=16, scored=20
    ),
    "transformer": lambda data: Shakespeare(
        batch=2, data=data, model="transformer", width=8, length=16, scored=20
    ),
    "gan": lambda data: DrawnDigits(batch=3, data=data, scored=100),
    "cartpole": lambda data: CartPole(batch=2, scored=5),
    "census": lambda data: Census(batch=2, data=data, l2=0.1),
    "reserved": lambda data: ReservedDigits(
        batch=4, data=data, width=0.25, scored=300, reserved=(8, 9), owners=(0,), workers=3
    ),
}


@pytest.fixture(params=PROBLEMS)
def problem(request, data_folder, mnist, shakespeare, a9a):
    del mnist, shakespeare, a9a  # skips the test if the data is missing
    return PROBLEMS[request.param](data_folder)


def built(problem):
    torch.manual_seed(problem.seed)
    return problem.build().double() if isinstance(problem, Shakespeare) else problem.build()


def gradient(losses, model):
    grads = torch.autograd.grad(losses.mean(), list(model.parameters()))
    return torch.cat([grad.flatten() for grad in grads])


def test_draws_give_the_same_gradients_alone_and_together(problem):
    model = built(problem).train()
    together = problem.losses(model, DRAWS)
    assert together.shape == (3,)
    alone = [problem.losses(model, [draw]) for draw in DRAWS]
    torch.testing.assert_close(together, torch.cat(alone))
    mean = torch.stack([gradient(loss, model) for loss in alone]).mean(0)
    torch.testing.assert_close(gradient(together, model), mean, rtol=1e-3, atol=1e-5)


def test_mini_batches_differ_by_worker_number_and_seed(problem):
    model = built(problem)
    draws = [Draw(0, 0), Draw(0, 1), Draw(1, 0), Draw(0, 0)]
    found = [gradient(problem.losses(model, [draw]), model) for draw in draws]
    found.append(gradient(replace(problem, seed=1).losses(model, draws[:1]), model))
    assert torch.equal(found[0], found[3])
    assert not any(torch.equal(found[0], other) for other in (found[1], found[2], found[4]))


def test_evaluation_is_deterministic(problem):
    model = built(problem).eval()
    with torch.no_grad():
        first, second = problem.evaluate(model), problem.evaluate(model)
    assert first == second
    assert all(torch.tensor(value).isfinite() for value in first.values())
    assert problem.samples >= 1000
