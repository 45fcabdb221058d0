# SPDX-License-Identifier: BSD-3-Clause
"""Train in virtual time: real gradients, in the order and with the staleness of a schedule.

As soon as a version exists, all gradients at this version are computed and added to the updates
that they are for. So only the newest version is kept, gradients of one version go through the model
together, and dropped gradients are never computed. Instead of old versions, a sum is kept for each
update that has contributions: one under synchronous rules, otherwise at most one per worker.

An update does what `paceline run` does: it averages the gradients with the weights and scales that
the policy decided, clips the average, steps the optimizer, averages the buffers, and updates the
moving average of the weights. The moving average includes the buffers, because they belong to the
weights.

The models are small, so the overhead of calls matters: all tensors of a model are views of one flat
tensor, and each operation is a single call.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import groupby
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.errors import SpecError
from paceline.lab.models.normalization import set_groups
from paceline.lab.problem import Problem
from paceline.lab.recipe import Recipe
from paceline.lab.updates_of_trace import Step, StepPart

__all__ = ["Row", "Training"]


class Row(NamedTuple):
    """The scores of the model at one point of the training."""

    time: float
    update: int
    epochs: float  # how many epochs of data were used
    scores: dict[str, float]


@dataclass
class _Sum:
    """The sums of an update that isn't complete yet."""

    grads: Tensor
    buffers: Tensor


class _Group(NamedTuple):
    """The gradients of one version that go into one update."""

    update: int
    parts: list[StepPart]


class Training:
    """Trains a model according to a schedule."""

    def __init__(self, problem: Problem, steps: Sequence[Step], recipe: Recipe) -> None:
        if not steps:
            raise SpecError("the schedule has no update, so there is nothing to train")
        self._problem = problem
        self._steps = steps
        self._recipe = recipe
        self._samples = [0]  # used up to each version
        for step in steps:
            self._samples.append(self._samples[-1] + step.samples)
        self._groups = _by_version(steps)
        torch.manual_seed(problem.seed)
        self.model = problem.build().train()
        self.average = deepcopy(self.model).eval() if recipe.ema is not None else None
        self._averaged = _flatten(_floats(self.average)) if self.average is not None else None
        parameters = _trained(self.model)
        self._floats = _flatten(_floats(self.model))
        count = sum(parameter.numel() for parameter in parameters)
        self._weights = nn.Parameter(self._floats[:count])
        self._grads = self._weights.grad = torch.zeros_like(self._floats[:count])
        for parameter, part in zip(parameters, _parts(self._grads, parameters), strict=True):
            parameter.grad = part
        self._buffers = self._floats[count:]
        self._optimizer = recipe.optimizer([self._weights])
        self._sums: dict[int, _Sum] = {}
        self.version = 0
        self.is_diverged = False

    def epochs(self, version: int) -> float:
        """Return how many epochs of data were used up to this version."""
        return self._samples[version] / self._problem.samples

    def run(self, until: int | None = None) -> None:
        """Make the remaining updates, or those up to `until`; stop if an update isn't finite."""
        last = len(self._steps) if until is None else min(until, len(self._steps))
        while self.version < last and not self.is_diverged:
            for group in self._groups.get(self.version, ()):
                self._compute(group)
            self._apply(self._steps[self.version])

    def score(self) -> Row:
        """Evaluate the model, or the moving average of its weights if there is one."""
        model = self.average or self.model
        model.eval()
        with torch.no_grad():
            scores = self._problem.evaluate(model)
        self.model.train()
        time = self._steps[self.version - 1].time if self.version else 0.0
        return Row(time, self.version, self.epochs(self.version), scores)

    # --------------------------------------------------------------------------------- updating

    def _compute(self, group: _Group) -> None:
        """Add these gradients, and their buffers, to the sums of their update."""
        if group.update not in self._sums:
            zeros = _Sum(torch.zeros_like(self._grads), torch.zeros_like(self._buffers))
            self._sums[group.update] = zeros
        into = self._sums[group.update]
        before = self._buffers.clone()
        self._grads.zero_()
        for number, parts in enumerate(_passes(group.parts, self._problem)):
            seed = _seed(self._problem.seed, group.update, self.version, number)
            torch.default_generator.manual_seed(seed)  # seeding all devices takes much longer
            set_groups(self.model, len(parts))
            losses = self._problem.losses(self.model, [part.draw for part in parts])
            factors = [part.weight * part.scale for part in parts]
            (losses @ losses.new_tensor(factors)).backward()
            into.buffers.add_(self._buffers, alpha=sum(part.weight for part in parts))
            self._buffers.copy_(before)  # each worker starts from those of this version
        into.grads += self._grads

    @torch.no_grad()
    def _apply(self, step: Step) -> None:
        into = self._sums.pop(step.update)
        self._grads.copy_(into.grads)
        limit = self._recipe.clip_norm or float("inf")
        norm = nn.utils.clip_grad_norm_(self._weights, limit)
        if not isfinite(float(norm)):
            self.is_diverged = True
            return
        rate = self._recipe.rate(self.epochs(self.version), self.epochs(len(self._steps)))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._buffers.copy_(into.buffers)
        self.version = step.update
        if self._averaged is not None and self._recipe.ema is not None:
            self._averaged.lerp_(self._floats, 1 - self._recipe.ema)

    # ----------------------------------------------------------------------------- checkpointing

    def state(self) -> dict[str, Any]:
        """Return everything that the next update depends on, without copying it."""
        return {
            "version": self.version,
            "is_diverged": self.is_diverged,
            "model": self.model.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "sums": {update: (s.grads, s.buffers) for update, s in self._sums.items()},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.version, self.is_diverged = state["version"], state["is_diverged"]
        self.model.load_state_dict(state["model"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._sums = {update: _Sum(*kept) for update, kept in state["sums"].items()}


def _trained(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _floats(model: nn.Module) -> list[Tensor]:
    """Return what training changes: the parameters, and the buffers that can be averaged."""
    return [*_trained(model), *(b for b in model.buffers() if b.is_floating_point())]


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Copy the tensors into one flat tensor, and make them views of it."""
    types = {tensor.dtype for tensor in tensors}
    if len(types) > 1:
        raise SpecError(f"parameters and buffers must have one type, got {sorted(map(str, types))}")
    whole = torch.cat([tensor.detach().flatten() for tensor in tensors])
    for tensor, part in zip(tensors, _parts(whole, tensors), strict=True):
        tensor.data = part
    return whole


def _parts(whole: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield views of a flat tensor with the shapes of these tensors, one after the other."""
    start = 0
    for tensor in tensors:
        yield whole[start : start + tensor.numel()].view_as(tensor)
        start += tensor.numel()


def _by_version(steps: Iterable[Step]) -> dict[int, list[_Group]]:
    """Return the gradients to compute at each version, in the order of their updates."""
    groups: defaultdict[int, list[_Group]] = defaultdict(list)
    for step in steps:
        by_version = sorted(step.parts, key=lambda part: part.version)
        for version, parts in groupby(by_version, key=lambda part: part.version):
            groups[version].append(_Group(step.update, list(parts)))
    return groups


def _passes(parts: list[StepPart], problem: Problem) -> Iterator[list[StepPart]]:
    """Yield parts that go through the model together: of the same size, and not too many."""
    for samples, same in groupby(parts, key=lambda part: part.samples):
        alike = list(same)
        count = max(1, problem.pass_samples // max(1, samples))
        yield from (alike[i : i + count] for i in range(0, len(alike), count))


def _seed(*numbers: int) -> int:
    """Combine numbers into a seed, so that a pass with dropout can be repeated exactly."""
    seed = 0
    for number in numbers:
        seed = (seed * 0x9E3779B97F4A7C15 + number + 1) % 2**63
    return seed
