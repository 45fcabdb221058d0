# SPDX-License-Identifier: BSD-3-Clause
"""The script that the simulated workers execute, and what it noted about each gradient.

It is an ordinary training script with a loader. Before each step it notes the parameters that it
computed with and the gradient that it got, so that the weights of the run can be computed again
from the trace. After each step it notes the fate that it was told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.run.worker.last_gradient import Last
from storm.world import World

__all__ = [
    "STYLES",
    "Computed",
    "ScriptFailure",
    "ScriptFault",
    "StormScript",
    "Told",
    "make_optimizer",
]

SAMPLES = 24
STEPS_PER_EPOCH = 8  # of a worker whose script has no loader
STOPS_AT = 6  # the version at which a script that ends the run does so

STYLES = ("loader", "no loader", "stops the run", "reads the state")
"""What a script may do: train on a loader or without one, call run.stop() or state_dict()."""

LEARNING_RATE = 0.05


class Computed(NamedTuple):
    """What a worker computed in a turn."""

    version: int
    parameters: list[Tensor]
    mean: Tensor  # the buffer before the forward pass
    gradient: list[Tensor]
    new_mean: Tensor  # the buffer after it


class Told(NamedTuple):
    """What a worker was told about the gradient of a turn."""

    worker: int
    turn: int
    last: Last
    server: str  # that was there when it reported the gradient; "": none


class ScriptFailure(Exception):
    """Raised by the script on purpose."""


class ScriptFault(NamedTuple):
    """Something that a script does wrong, once, after so many steps of a worker."""

    worker: int
    step: int
    kind: str  # "raise", "exit", "hang", "nan"


class NormedModel(nn.Module):
    """A linear model with a buffer that changes with each batch, as batch norm has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1, dtype=torch.float64)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Return the prediction; note the mean of the batch."""
        if self.training:
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        result: Tensor = self.linear(x)
        return result


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of the script."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)


def make_model() -> NormedModel:
    """Return the model, the same in every process."""
    model = NormedModel()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape) + i)
    return model


def make_loader(batch_size: int) -> DataLoader[Any]:
    """Return the loader over the training set."""
    x = torch.sin(torch.arange(SAMPLES * 3, dtype=torch.float64)).reshape(SAMPLES, 3)
    y = (x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)).unsqueeze(1)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=True)


@dataclass
class StormScript:
    """The script of one run, and its faults."""

    world: World
    epochs: int
    batch_size: int
    compute_s: float  # a step takes up to this long
    style: str = "loader"  # one of STYLES
    faults: list[ScriptFault] = field(default_factory=list)
    computed: dict[tuple[int, int], Computed] = field(default_factory=dict)  # by worker and turn
    told: list[Told] = field(default_factory=list)
    steps: dict[int, int] = field(default_factory=dict)  # by worker, over all restarts
    fired: list[ScriptFault] = field(default_factory=list)  # the faults that have happened
    _models: list[nn.Module] = field(default_factory=list)  # of all processes
    on_hang: Callable[[int], None] = lambda _: None  # called with the number of a worker that hangs

    def objects(self) -> tuple[Any, ...]:
        """Return what the script prepares: a model, an optimizer, and perhaps a loader."""
        model = make_model()
        self._models.append(model)
        loader = () if self.style == "no loader" else (make_loader(self.batch_size),)
        return model, make_optimizer(model.parameters()), *loader

    def forget_models(self) -> None:
        """Free the models, as the end of their processes would.

        A hook of a parameter refers to what refers to the parameter, and Python's garbage collector
        can't see that.
        """
        for model in self._models:
            for parameter in model.parameters():
                (parameter._post_accumulate_grad_hooks or {}).clear()
        self._models.clear()

    def train(self, run: Any) -> None:
        """Do what a worker's script does."""
        model, optimizer, *loaders = run.prepare(*self.objects())
        self.world.process.has_joined = True
        for epoch in range(self.epochs):
            for x, y in loaders[0] if loaders else self._own_batches(run, epoch):
                optimizer.zero_grad()
                self._compute(run, model, lambda x=x, y=y: nn.functional.mse_loss(model(x), y))
                self._step(run, optimizer)
                run.log(loss=1.0)
                if self.style == "reads the state" and run.version % 5 == 3:
                    optimizer.state_dict()
                if self.style == "stops the run" and run.version >= STOPS_AT:
                    run.stop()

    def _step(self, run: Any, optimizer: torch.optim.Optimizer) -> None:
        """Call `optimizer.step()`, and note what became of the gradient, if the run wanted one."""
        assignment, before = run._worker._assignment, run.last
        servers = [
            p.name for p in self.world.processes if p.is_alive and p.name.startswith("server#")
        ]
        optimizer.step()
        if assignment is not None and run.last is not before:
            server = servers[-1] if servers else ""
            self.told.append(Told(run.worker, assignment.turn, run.last, server))

    def _own_batches(self, run: Any, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches that the script draws itself, until the run ends."""
        batches = list(make_loader(self.batch_size))
        for number in range(STEPS_PER_EPOCH):
            if run.finished:
                return
            yield batches[(epoch + number + run.worker) % len(batches)]

    def _compute(self, run: Any, model: NormedModel, loss_of: Callable[[], Tensor]) -> None:
        step = self.steps[run.worker] = self.steps.get(run.worker, 0) + 1
        faults = [fault for fault in self.faults if (run.worker, step) == fault[:2]]
        kinds = {fault.kind for fault in faults}
        self.fired += faults
        self._misbehave(kinds, run.worker)
        assignment = run._worker._assignment
        parameters = [p.detach().clone() for p in model.parameters()]
        mean = model.mean.clone()
        loss = loss_of() * (float("nan") if "nan" in kinds else 1.0)
        self.world.sleep(self.world.random.random() * self.compute_s)
        if self.world.random.random() < 0.5:
            run.backward(loss)
        else:
            loss.backward()
        if assignment is not None:
            gradient = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            key = (run.worker, assignment.turn)
            new_mean = model.mean.clone()
            self.computed[key] = Computed(assignment.version, parameters, mean, gradient, new_mean)

    def _misbehave(self, kinds: set[str], worker: int) -> None:
        if "hang" in kinds:
            self.on_hang(worker)
            self.world.wait_for(lambda: False)
        if "raise" in kinds:
            raise ScriptFailure("the script fails here")
        if "exit" in kinds:
            raise SystemExit(9)
