# SPDX-License-Identifier: BSD-3-Clause
"""The script that measures gradient times trains until the run ends."""

import torch

from paceline.lab.scripts import cnn_on_noise


class ThreeSteps:
    """A run that prepares nothing and ends after three updates."""

    def __init__(self):
        self.steps = 0
        self.weights = []

    def prepare(self, model, optimizer):
        self.model = model
        optimizer.register_step_post_hook(self.count)
        return model, optimizer

    def count(self, *_):
        self.steps += 1
        self.weights.append(torch.cat([p.detach().flatten() for p in self.model.parameters()]))

    @property
    def finished(self):
        return self.steps == 3


def test_script_trains_until_the_run_ends(monkeypatch):
    run = ThreeSteps()
    monkeypatch.setattr(cnn_on_noise, "join", lambda: run)
    cnn_on_noise.main()
    assert run.steps == 3
    assert not torch.equal(run.weights[0], run.weights[2])
