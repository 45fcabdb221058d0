# SPDX-License-Identifier: BSD-3-Clause
"""The problems beyond the papers: text, a GAN, a pole on a cart, a convex one, reserved digits."""

from dataclasses import replace

import pytest
import torch

from paceline.lab.problem import Draw
from paceline.lab.problems.cartpole import CartPole
from paceline.lab.problems.convex import Census
from paceline.lab.problems.gan import DrawnDigits, Features, frechet
from paceline.lab.problems.reserved import ReservedDigits
from paceline.lab.problems.text import Shakespeare

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


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors lose much with more where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=PROBLEMS)
def problem(request, data_folder, mnist, shakespeare, a9a):
    del mnist, shakespeare, a9a  # those without their data are skipped
    return PROBLEMS[request.param](data_folder)


def built(problem):
    torch.manual_seed(problem.seed)
    return problem.build().double() if isinstance(problem, Shakespeare) else problem.build()


def gradient(losses, model):
    grads = torch.autograd.grad(losses.mean(), list(model.parameters()))
    return torch.cat([grad.flatten() for grad in grads])


def test_draws_computed_together_are_those_computed_alone(problem):
    model = built(problem).train()
    together = problem.losses(model, DRAWS)
    assert together.shape == (3,)
    alone = [problem.losses(model, [draw]) for draw in DRAWS]
    torch.testing.assert_close(together, torch.cat(alone))
    mean = torch.stack([gradient(loss, model) for loss in alone]).mean(0)
    torch.testing.assert_close(gradient(together, model), mean, rtol=1e-3, atol=1e-5)


def test_a_mini_batch_is_another_for_every_worker_number_and_seed(problem):
    model = built(problem)
    draws = [Draw(0, 0), Draw(0, 1), Draw(1, 0), Draw(0, 0)]
    found = [gradient(problem.losses(model, [draw]), model) for draw in draws]
    found.append(gradient(replace(problem, seed=1).losses(model, draws[:1]), model))
    assert torch.equal(found[0], found[3])
    assert not any(torch.equal(found[0], other) for other in (found[1], found[2], found[4]))


def test_what_a_model_is_worth_does_not_depend_on_chance(problem):
    model = built(problem).eval()
    with torch.no_grad():
        first, second = problem.evaluate(model), problem.evaluate(model)
    assert first == second
    assert all(torch.tensor(value).isfinite() for value in first.values())
    assert problem.samples >= 1000


def test_a_model_that_knows_nothing_needs_six_bits_for_one_of_65_characters(data_folder):
    problem = PROBLEMS["lstm"](data_folder)
    model = built(problem)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        assert problem.evaluate(model)["bits"] == pytest.approx(6.0224, abs=1e-3)


def test_every_character_is_told_from_those_before_it(shakespeare, data_folder):
    """A model that always says the character that it sees is right where two are the same."""

    class Echo(torch.nn.Module):
        def forward(self, x):
            seen.append(x)
            return 20.0 * torch.nn.functional.one_hot(x, 65)

    seen = []
    problem = replace(PROBLEMS["lstm"](data_folder), scored=1)
    bits = problem.evaluate(Echo())["bits"]
    piece = shakespeare.test[:17].long()
    assert torch.equal(seen[0][0], piece[:-1])
    wrong = (piece[1:] != piece[:-1]).double().mean().item()
    assert bits == pytest.approx(wrong * 20 / torch.log(torch.tensor(2.0)).item(), rel=1e-4)


def test_the_distance_of_normal_distributions_is_frechets():
    torch.manual_seed(0)
    a = torch.randn(5, 5, dtype=torch.double)
    here = Features(torch.zeros(5).double(), a @ a.T)
    assert frechet(here, here) == pytest.approx(0.0, abs=1e-9)
    there = here._replace(mean=torch.full((5,), 2.0).double())
    assert frechet(here, there) == pytest.approx(20.0)
    # Where the axes are common, it is the sum over them of (difference of deviations)².
    one, two = (
        Features(torch.zeros(2).double(), torch.diag(v).double())
        for v in (torch.tensor([1.0, 4.0]), torch.tensor([9.0, 1.0]))
    )
    assert frechet(one, two) == pytest.approx((1 - 3) ** 2 + (2 - 1) ** 2)


def test_real_digits_are_nearer_to_real_digits_than_drawn_ones(data_folder, mnist):
    del mnist
    problem = PROBLEMS["gan"](data_folder)
    with torch.no_grad():
        assert problem.evaluate(built(problem))["distance"] > 20


def test_the_gap_is_zero_at_the_optimum_and_nowhere_below(data_folder, a9a):
    problem = PROBLEMS["census"](data_folder)
    model = built(problem)
    with torch.no_grad():
        start = problem.evaluate(model)
        assert 0.1 < start["gap"] < 0.7
    # The variance is that of the gradients of single rows, about their mean.
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


def test_reserved_digits_are_drawn_by_their_owners_alone(data_folder, mnist):
    problem = replace(PROBLEMS["reserved"](data_folder), batch=200)
    for worker in range(3):
        labels = mnist.train_y[torch.from_numpy(problem.pool().of(worker))]
        assert bool(torch.isin(labels, torch.tensor([8, 9])).any()) == (worker == 0)


def test_scores_of_reserved_digits_and_others_make_up_the_whole(data_folder, mnist):
    problem = PROBLEMS["reserved"](data_folder)
    with torch.no_grad():
        scores = problem.evaluate(built(problem).eval())
    part = torch.isin(mnist.test_y[:300], torch.tensor([8, 9])).double().mean().item()
    whole = part * scores["reserved"] + (1 - part) * scores["others"]
    assert scores["accuracy"] == pytest.approx(whole)


def test_a_player_that_always_pushes_the_same_way_falls_soon():
    problem = PROBLEMS["cartpole"](None)
    model = built(problem)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        chance = problem.evaluate(model)["return"]
        model[-1].bias[0] = 100.0
        assert problem.evaluate(model)["return"] < 15 < chance
