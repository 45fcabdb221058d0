# SPDX-License-Identifier: BSD-3-Clause
"""Gradients that a script resets by itself are noticed; accumulated ones are kept."""

import pytest
import torch
from torch import nn

from paceline.run.worker.backward_passes import BackwardPasses


class Model:
    """A model, and how often its gradients were seen to be reset."""

    def __init__(self, *layers):
        self.model = nn.Sequential(*layers)
        self.passes = BackwardPasses(list(self.model.parameters()))
        self.resets = 0
        for number, parameter in enumerate(self.model.parameters()):
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: self.note(number))

    def note(self, number):
        self.resets += self.passes.has_reset(number)

    def backward(self):
        self.model(torch.ones(1, 2)).sum().backward()


def by_hand(model):
    for parameter in model.parameters():
        parameter.grad = None


RESETS = {
    "model": nn.Module.zero_grad,
    "to zero": lambda model: model.zero_grad(set_to_none=False),
    "by hand": by_hand,
}


@pytest.mark.parametrize("how", RESETS)
def test_reset_is_noticed_once(how):
    one = Model(nn.Linear(2, 3), nn.Linear(3, 1))
    for _ in range(2):
        one.backward()
    assert one.resets == 0
    RESETS[how](one.model)
    for _ in range(3):
        one.backward()
    assert one.resets == 1


def test_start_over_is_not_noticed():
    one = Model(nn.Linear(2, 3), nn.Linear(3, 1))
    for _ in range(3):
        one.backward()
        one.model.zero_grad()
        one.passes.start_over()
    assert one.resets == 0


def test_lone_parameter_is_never_noticed():
    one = Model(nn.Linear(2, 1, bias=False))
    for _ in range(3):
        one.backward()
    assert one.resets == 0


def test_part_of_the_gradients_is_not_all():
    one = Model(nn.Linear(2, 3), nn.Linear(3, 1))
    one.backward()
    one.model[1].zero_grad()
    one.backward()
    assert one.resets == 0


SAMPLES = """
from torch.utils.data import DataLoader, TensorDataset
model = nn.Sequential(nn.Linear(2, 300), nn.Linear(300, 300), nn.Linear(300, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
loader = DataLoader(TensorDataset(torch.randn(64, 2)), batch_size=4)
run = paceline.join()
model, optimizer, loader = run.prepare(model, optimizer, loader)
for number, (x,) in enumerate(loader):
    model(x).square().mean().backward()
    if number % 4 == 1:
        RESET
    if number % 4 == 3:
        optimizer.step()
        model.zero_grad()
"""


@pytest.mark.parametrize(
    ("reset", "samples"),
    [
        ("pass", 16),
        ("optimizer.zero_grad()", 8),
        ("model.zero_grad()", 8),
        ("model.zero_grad(set_to_none=False)", 8),
    ],
)
def test_batches_of_gradients_that_the_script_reset_do_not_count(launch, reset, samples):
    """Each step is over four batches of four samples; the reset throws the first two away."""
    ran = launch(SAMPLES.replace("RESET", reset), workers=1, steps=4)
    assert (ran.code, ran.err) == (0, "")
    assert {gradient.samples for gradient in ran.trace.gradients()} == {samples}
