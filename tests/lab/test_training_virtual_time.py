# SPDX-License-Identifier: BSD-3-Clause
"""Training in virtual time from the trace of a real run gives the weights of that run.

The run uses real processes with injected delays. The lab then computes the same gradients in this
process, at the versions that the trace records. Both use double precision, so that the order of
sums makes far less difference than any mistake would.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- the usual name

from paceline.lab.models.normalization import BatchNorm
from paceline.lab.problem import Draw, Problem
from paceline.lab.recipe import Recipe
from paceline.lab.training import Training
from paceline.lab.updates_of_trace import schedule

WORKERS, STEPS, BATCH, RATE = 4, 40, 6, 0.05

SCENE = """
def mini_batch(worker, number):
    generator = torch.Generator().manual_seed(1000 * worker + number)
    x = torch.randn(6, 2, 5, 5, generator=generator, dtype=torch.float64)
    return x, x.flatten(1).sum(1).long() % 3
"""
SCRIPT = (
    SCENE
    + """
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run = paceline.join()
model, optimizer, loader = run.prepare(
    model, optimizer, [mini_batch(run.worker, number) for number in range(200)]
)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
)


@dataclass(frozen=True)
class Same(Problem):
    """The problem that the script trains."""

    batch: int = BATCH
    name: ClassVar[str] = "same"

    @property
    def samples(self) -> int:
        return 1000

    def build(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, 4, 3), BatchNorm(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
        ).double()

    def losses(self, model: nn.Module, draws: Sequence[Draw]) -> Tensor:
        scene: dict[str, Any] = {"torch": torch}
        exec(SCENE, scene)
        batches = [scene["mini_batch"](*draw) for draw in draws]
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        found = F.cross_entropy(model(x), y, reduction="none")
        return found.view(len(draws), -1).mean(1)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        raise NotImplementedError


RULES = ["sync", "backup:1", "backup:2", "softsync:2", "async", "async:lr=inverse", "delayed:1"]


@pytest.mark.parametrize("policy", [*RULES, "delayed:2", "batchsync:3", "ssp:1"])
@pytest.mark.parametrize("ema", [None, 0.9])
def test_virtual_training_reproduces_the_weights_of_the_real_run(launch, policy, ema):
    ran = launch(
        SCRIPT, workers=WORKERS, steps=STEPS, policy=policy, latency="2ms + exp:3ms", ema=ema
    )
    assert ran.code == 0, ran.err
    recipe = Recipe(RATE, momentum=0.9, ema=ema)
    training = Training(Same(), schedule(ran.trace), recipe)
    training.run()
    assert training.version == STEPS
    assert_same(torch.load(ran.folder / "weights.pt"), training.model.state_dict())
    if ema is not None:
        assert training.average is not None
        real = torch.load(ran.folder / "weights-averaged.pt")
        for name, value in training.average.named_parameters():
            assert torch.allclose(real[name], value, rtol=1e-9, atol=1e-12), name


def assert_same(real: dict[str, Tensor], virtual: dict[str, Tensor]) -> None:
    assert real.keys() == virtual.keys()
    for name, value in real.items():
        if value.is_floating_point():
            assert torch.allclose(value, virtual[name], rtol=1e-9, atol=1e-12), name
