# SPDX-License-Identifier: BSD-3-Clause
"""A scheduler that went back makes the same steps again."""

import warnings
from collections import deque

import pytest
import torch
import torch._dynamo  # optimizers import it, and it sets an environment variable
from torch import nn
from torch.optim import lr_scheduler

from paceline.run.worker.scheduler_snapshot import SchedulerSnapshot


class Own(lr_scheduler.LRScheduler):
    """A script's own scheduler, with a memory, and a part that can't be copied."""

    def __init__(self, optimizer):
        self.recent = deque(maxlen=2)
        self.by_name = {"sum": [0.0]}
        self.model = (part for part in ())
        super().__init__(optimizer)

    def get_lr(self):
        self.recent.append(self.last_epoch)
        self.by_name["sum"][0] += sum(self.recent)
        return [base / (1 + self.by_name["sum"][0]) for base in self.base_lrs]


SCHEDULERS = {
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.5),
    "multi-step": lambda o: lr_scheduler.MultiStepLR(o, milestones=[2, 4]),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=4),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=2.0, total_steps=9),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.1, max_lr=1.0, step_size_up=3),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.StepLR(o, step_size=2)],
        milestones=[3],
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, gamma=0.5)]
    ),
    "own": Own,
}


@pytest.mark.parametrize("lr", [1.0, torch.tensor(1.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_scheduler_makes_the_same_steps_again(kind, lr):
    lr = lr.clone() if isinstance(lr, torch.Tensor) else lr
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr, momentum=0.9)
    [group] = optimizer.param_groups

    def steps():
        found = []
        for _ in range(6):
            scheduler.step()
            found.append(
                (float(group["lr"]), group["momentum"], *map(float, scheduler.get_last_lr()))
            )
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of SequentialLR
        scheduler = SCHEDULERS[kind](optimizer)
        optimizer.step()  # or torch warns
        scheduler.step()
        snapshot = SchedulerSnapshot(scheduler)
        first = steps()
        for _ in range(2):  # a server may be restored more than once
            snapshot.restore()
            assert steps() == first
