# SPDX-License-Identifier: BSD-3-Clause
"""Pilots get the norms of their gradients at the versions at which they were computed."""

import pytest
import torch

from paceline.core.events import Fate
from paceline.lab.gradient_norms import with_norms
from paceline.lab.problem import Draw
from paceline.lab.recipe import Recipe
from paceline.lab.training import Training
from paceline.lab.updates_of_trace import schedule
from paceline.sim.cluster import Cluster
from paceline.sim.convergence import estimate_noise_scale
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from toys import Clouds

PROBLEM, RECIPE = Clouds(), Recipe(0.5)


@pytest.fixture
def trace():
    return simulate("sync", Cluster.parse("exp:1s", batch=4), RunSpec(workers=5, steps=6))


def squared_norm(model, draws):
    loss = PROBLEM.losses(model, draws).mean()
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return sum(float(grad.square().sum()) for grad in grads)


def test_norms_match_those_of_training(trace):
    pilot = with_norms(trace, PROBLEM, RECIPE)
    training = Training(PROBLEM, schedule(trace), RECIPE)
    training.run(3)
    draws = [Draw(worker, 3) for worker in range(5)]
    found = {g.worker: g.sq_norm for g in pilot.gradients() if g.version == 3}
    expected = {draw.worker: squared_norm(training.model, [draw]) for draw in draws}
    assert found == pytest.approx(expected)
    [whole] = [update.sq_norm for update in pilot.updates() if update.update == 4]
    assert whole == pytest.approx(squared_norm(training.model, draws))


def test_only_the_norms_are_added(trace):
    pilot = with_norms(trace, PROBLEM, RECIPE)
    assert pilot.header == trace.header
    assert [g.t for g in pilot.gradients()] == [g.t for g in trace.gradients()]
    assert all(g.fate is Fate.ACCEPTED and g.sq_norm is not None for g in pilot.gradients())


def test_norms_of_some_updates_match_those_of_all(trace):
    few, every = (list(with_norms(trace, PROBLEM, RECIPE, n).updates()) for n in (2, 1))
    assert [u.sq_norm for u in few[::2]] == pytest.approx([u.sq_norm for u in every[::2]])
    assert [u.sq_norm for u in few[1::2]] == [None] * 3


def test_planner_can_estimate_the_noise_scale(trace):
    assert 0 < estimate_noise_scale(with_norms(trace, PROBLEM, RECIPE)) < 100


def test_number_of_threads_is_restored(trace):
    before = torch.get_num_threads()
    with_norms(trace, PROBLEM, RECIPE)
    assert torch.get_num_threads() == before
