# SPDX-License-Identifier: BSD-3-Clause
"""CartPole: the physics of the example, reproducible games, and learning."""

import ast
import copy
from pathlib import Path

import torch

from paceline.lab.models import cartpole
from paceline.lab.models.cartpole import LIMITS, MOMENTS, losses, move, play, policy

EXAMPLE = Path(__file__).parents[3] / "examples" / "cartpole.py"


def rng(seed):
    return torch.Generator().manual_seed(seed)


def of_example(*names):
    """Return these functions and constants of the example, without running it."""
    tree = ast.parse(EXAMPLE.read_text(encoding="utf-8"))

    def defines(node):
        if isinstance(node, ast.FunctionDef):
            return node.name in names
        targets = node.targets if isinstance(node, ast.Assign) else []
        found = {
            name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
        }
        return bool(found & set(names))

    tree.body = [node for node in tree.body if defines(node)]
    space = {"torch": torch}
    exec(compile(tree, str(EXAMPLE), "exec"), space)
    return [space[name] for name in names]


def test_physics_match_the_example():
    their_move, their_limits, their_moments = of_example("move", "LIMITS", "MOMENTS")
    torch.manual_seed(0)
    state, right = torch.randn(50, 4), torch.rand(50).round()
    torch.testing.assert_close(move(state, right), their_move(state, right), rtol=0, atol=0)
    torch.testing.assert_close(LIMITS, their_limits)
    assert their_moments == MOMENTS


def test_push_to_the_right_moves_the_cart_right_and_tilts_the_pole_left():
    still = torch.zeros(4)
    after = move(move(still, torch.tensor(1.0)), torch.tensor(1.0))
    assert after[0] > 0
    assert after[2] < 0
    torch.testing.assert_close(move(still, torch.tensor(0.0)), -move(still, torch.tensor(1.0)))


def test_fallen_pole_stays_down():
    games = play(policy(), 16, rng(0))
    assert games.states.shape == (MOMENTS, 16, 4)
    assert (games.upright.diff(dim=0) <= 0).all()
    out = (games.states.abs() >= LIMITS).any(-1)
    torch.testing.assert_close(games.upright, (out.cumsum(0) == 0).float())
    assert (games.returns < MOMENTS).any()


def test_games_are_the_same_alone_and_together():
    torch.manual_seed(0)
    model = policy()
    together = play(model, 3, rng(1), rng(2))
    alone = [play(model, 3, rng(1)), play(model, 3, rng(2))]
    for ours, *theirs in zip(together, *alone, strict=True):
        torch.testing.assert_close(ours, torch.cat(theirs, dim=1))


def test_games_in_one_pass_give_the_mean_of_their_gradients():
    torch.manual_seed(0)
    model = policy().double()
    each = [play(copy.deepcopy(model).float(), 3, rng(seed)) for seed in range(4)]
    each = [cartpole.Games(*(part.double() for part in games)) for games in each]
    gradients, alone = [], []
    for games in each:
        worker = copy.deepcopy(model)
        loss = losses(worker, games)
        loss.sum().backward()
        alone.append(loss.detach())
        gradients.append(torch.cat([p.grad.flatten() for p in worker.parameters()]))
    together = losses(
        model, cartpole.Games(*(torch.cat(part, 1) for part in zip(*each, strict=True))), 4
    )
    together.mean().backward()
    torch.testing.assert_close(together.detach(), torch.cat(alone))
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(gradient, torch.stack(gradients).mean(0))


def test_loss_matches_the_example():
    torch.manual_seed(0)
    model = policy()
    games = play(model, 2, rng(0))
    total = 0.0
    for episode in range(2):
        length = int(games.returns[episode])
        for moment in range(length):
            score, baseline = model(games.states[moment, episode])
            went_right = games.rights[moment, episode]
            chance = score.sigmoid() if went_right else 1 - score.sigmoid()
            advantage = (length - moment) / MOMENTS - baseline
            total += -chance.log() * advantage.detach() + advantage**2
    torch.testing.assert_close(losses(model, games), (total / games.upright.sum())[None])


def test_policy_improves_with_training():
    torch.manual_seed(0)
    model = policy()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    returns = []
    for update in range(12):
        games = play(model, 64, rng(update))
        optimizer.zero_grad()
        losses(model, games).sum().backward()
        optimizer.step()
        returns.append(games.returns.mean().item())
    assert returns[-1] > 2 * returns[0]
