# SPDX-License-Identifier: BSD-3-Clause
"""The weights that a run must have, computed from its trace and the gradients of its workers."""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.core.events import Fate
from paceline.run.settings import Settings
from paceline.trace.schema import Gap, Gradient, Restored, Trace, Update
from storm.script import Computed, make_model, make_optimizer

__all__ = ["Reference", "State", "momentum_in"]

FRESH = ("sync", "backup", "batchsync", "deadline")  # rules that never use another version
TOLERANCE = 1e-9  # the weights are doubles, so only the order of additions differs


class State(NamedTuple):
    """The tensors of one version; a part that is None isn't known, or doesn't exist."""

    parameters: list[Tensor]
    mean: Tensor | None = None  # the buffer of the model
    average: list[Tensor] | None = None  # the moving average of the parameters
    momentum: list[Tensor] | None = None

    def difference(self, other: State) -> str:
        """Return the first part that both have and in which they differ; "" if there is none."""
        for what in self._fields:
            own, others = getattr(self, what), getattr(other, what)
            if own is not None and others is not None and not _is_close(own, others):
                return what
        return ""


def _is_close(one: Tensor | list[Tensor], other: Tensor | list[Tensor]) -> bool:
    """Return whether tensors are equal, but for the order in which they were computed."""
    if isinstance(one, Tensor):
        one, other = [one], [other]  # type: ignore[list-item] # then it is a tensor, too
    return all(
        torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )


class Reference:
    """Plain training with the gradients that the trace says were used."""

    def __init__(
        self, trace: Trace, computed: dict[tuple[int, int], Computed], settings: Settings
    ) -> None:
        self._computed = computed
        self._is_fresh = trace.header.policy.startswith(FRESH)
        self._clip_norm, self._ema = settings.clip_norm, settings.ema
        model = make_model()
        self._parameters = [p.detach().clone() for p in model.parameters()]
        self._mean = model.mean.clone()
        self._average = [p.clone() for p in self._parameters]
        self._optimizer = make_optimizer(self._parameters)
        self._accepted: dict[int, list[Gradient]] = defaultdict(list)  # by update
        self._states: dict[int, tuple[State, Any]] = {}  # by version; with the optimizer's state
        self._is_lost = False  # the trace has a gap, so the weights after it aren't known
        self.problems: list[str] = []
        self._save(0)
        for record in trace.records:
            match record:
                case Gradient(fate=Fate.ACCEPTED):
                    self._accepted[record.version + record.staleness + 1].append(record)
                    self._check_start(record)
                case Update():
                    self._update(record)
                case Restored():
                    self._accepted.clear()
                    self._restore(record.version)
                case Gap():
                    self._lose()
                case _:
                    pass

    def difference(self, version: int, found: State) -> str:
        """Return what isn't as it must be at this version, as it was made last; "": nothing."""
        if version in self._states:
            return self._states[version][0].difference(found)
        return "" if self._is_lost else "the version, which was never made,"

    def knows(self, version: int) -> bool:
        """Return whether it knows what this version must be."""
        return version in self._states

    def _check_start(self, gradient: Gradient) -> None:
        """Check that the worker computed with the version that it reported."""
        computed = self._computed.get((gradient.worker, gradient.turn))
        if computed is None:
            self.problems.append(f"{gradient} was accepted but never computed")
        elif computed.version != gradient.version:
            self.problems.append(f"{gradient} was computed at version {computed.version}")
        elif what := self.difference(gradient.version, State(computed.parameters, computed.mean)):
            self.problems.append(f"{gradient} was computed with other values: {what}")

    def _update(self, update: Update) -> None:
        stale = [g for g in self._accepted.get(update.update, ()) if g.staleness]
        if stale and self._is_fresh:
            self.problems.append(f"{update} used the stale gradient {stale[0]}")
        if self._is_lost:
            self._states.pop(update.update, None)
            return
        accepted = self._accepted.pop(update.update, [])
        if sorted(g.worker for g in accepted) != sorted(update.contributors):
            self.problems.append(f"{update} was made of {accepted}")
            return
        if update.sq_norm is not None:
            self._step(update, accepted)
        self._save(update.update)

    def _step(self, update: Update, accepted: list[Gradient]) -> None:
        average = [torch.zeros_like(p) for p in self._parameters]
        mean = torch.zeros_like(self._mean)
        for gradient, (weight, scale) in zip(accepted, update.weighted(), strict=True):
            computed = self._computed[gradient.worker, gradient.turn]
            for total, part in zip(average, computed.gradient, strict=True):
                total.add_(part, alpha=weight * scale)
            mean.add_(computed.new_mean, alpha=weight)
        norm = sqrt(sum(float(part.square().sum()) for part in average))
        if self._clip_norm is not None and norm > self._clip_norm:
            for part in average:
                part.mul_(self._clip_norm / (norm + 1e-6))
        for parameter, part in zip(self._parameters, average, strict=True):
            parameter.grad = part
        self._optimizer.step()
        self._mean = torch.where(mean.isfinite(), mean, self._mean)
        if self._ema is not None:
            for own, parameter in zip(self._average, self._parameters, strict=True):
                own.lerp_(parameter, 1 - self._ema)

    def _lose(self) -> None:
        """Note that records are missing: later versions may have been made again meanwhile."""
        self._is_lost = True
        self._states = {v: state for v, state in self._states.items() if v <= self._version}

    def _save(self, version: int) -> None:
        self._version = version
        optimizer = deepcopy(self._optimizer.state_dict())
        state = State(
            [p.detach().clone() for p in self._parameters],
            self._mean.clone(),
            None if self._ema is None else [part.clone() for part in self._average],
            momentum_in(optimizer),
        )
        self._states[version] = (state, optimizer)

    def _restore(self, version: int) -> None:
        if version not in self._states:
            if not self._is_lost:
                self.problems.append(f"restored version {version}, which was never made")
            return
        self._is_lost, self._version = False, version
        state, optimizer = self._states[version]
        for own, value in zip(self._parameters, state.parameters, strict=True):
            own.copy_(value)
        assert state.mean is not None
        self._mean = state.mean.clone()
        self._average = [part.clone() for part in state.average or ()]
        self._optimizer.load_state_dict(deepcopy(optimizer))


def momentum_in(optimizer: dict[str, Any]) -> list[Tensor] | None:
    """Return the momentum in the state of an optimizer; None if it hasn't stepped."""
    states = optimizer["state"]
    return [states[key]["momentum_buffer"] for key in sorted(states)] if states else None
