# SPDX-License-Identifier: BSD-3-Clause
"""Add gradient norms to the trace of a short pilot run; the planner estimates noise from them."""

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor, nn

from paceline.lab.models.normalization import set_groups
from paceline.lab.problem import Draw, Problem
from paceline.lab.recipe import Recipe
from paceline.lab.threads import one_thread
from paceline.lab.training import Training
from paceline.lab.updates_of_trace import schedule
from paceline.trace.schema import Gradient, Record, Trace, Update

__all__ = ["with_norms"]


def with_norms(trace: Trace, problem: Problem, recipe: Recipe, every: int = 1) -> Trace:
    """Train by the trace of a `sync` run, and return the trace with squared gradient norms.

    `every`: compute norms in every n-th update only, starting with the first. Each gradient must
    then be computed separately, which takes several times as long.
    """
    steps = schedule(trace)
    training = Training(problem, steps, recipe)
    own: dict[tuple[int, int], float] = {}  # by worker and version
    averaged: dict[int, float] = {}  # by update
    with one_thread():
        for step in steps[::every]:
            training.run(step.update - 1)
            draws = [part.draw for part in step.parts]
            norms, averaged[step.update] = _norms(problem, training.model, draws)
            own |= {(d.worker, step.update - 1): n for d, n in zip(draws, norms, strict=True)}
    records: list[Record] = []
    for record in trace.records:
        match record:
            case Gradient():
                norm = own.get((record.worker, record.version))
                records.append(msgspec.structs.replace(record, sq_norm=norm))
            case Update():
                norm = averaged.get(record.update)
                records.append(msgspec.structs.replace(record, sq_norm=norm))
            case _:
                records.append(record)
    return Trace(trace.header, records)


def _norms(problem: Problem, model: nn.Module, draws: Sequence[Draw]) -> tuple[list[float], float]:
    """Return the squared norm of each draw's gradient, and of their average."""
    parameters = list(model.parameters())
    total = [torch.zeros_like(parameter) for parameter in parameters]
    set_groups(model, 1)
    norms = []
    for draw in draws:
        grads = torch.autograd.grad(problem.losses(model, [draw])[0], parameters)
        torch._foreach_add_(total, grads)
        norms.append(_squared_norm(grads))
    return norms, _squared_norm(total) / len(draws) ** 2


def _squared_norm(tensors: Sequence[Tensor]) -> float:
    return float(sum(tensor.double().square().sum() for tensor in tensors))
