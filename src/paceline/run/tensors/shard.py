# SPDX-License-Identifier: BSD-3-Clause
"""The tensors of a run: keep what is given, average it, step the optimizer, publish a version.

The shard does what the server tells it and decides nothing.

A version lies in a *place*, a region that workers read. Nobody writes where somebody still reads:
an update is made in the same place when no worker computes there, otherwise in another one that is
free, into which the parameters are copied first. So there are never more places than workers plus
two, and where all wait for the update there is one.
"""

import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite, sqrt
from time import perf_counter
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import CheckpointError, ProtocolError
from paceline.run.settings import Settings
from paceline.run.tensors.layout import (
    Layout,
    TrainingState,
    Views,
    difference,
    lay_out_constants,
    tensors,
)
from paceline.run.tensors.region import Region
from paceline.run.tensors.sums import PendingUpdate, SlotGradient

__all__ = ["Applied", "ParameterBuffer", "Shard"]

HALF = (torch.float16, torch.bfloat16)
CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True, eq=False)
class ParameterBuffer:
    """Where a version lies."""

    number: int
    views: Views
    fd: int


@dataclass(frozen=True)
class Applied:
    """What an update was like."""

    sq_norm: float  # of the averaged gradient, before clipping
    apply_s: float

    @property
    def is_sound(self) -> bool:
        """Whether the average was finite; otherwise nothing was stepped."""
        return isfinite(self.sq_norm)


class Shard:
    """Parameters, buffers and optimizers of a run."""

    def __init__(
        self,
        common: TrainingState,
        schedulers: Iterable[LRScheduler],
        settings: Settings,
        versions_kept: int,
    ) -> None:
        """`versions_kept`: how many of the newest versions a worker may yet be sent to."""
        self.common = common
        self.layout = Layout.of(common.contents)
        self.version = 0
        self.steps = [0] * len(common.optimizers)
        self._settings = settings
        self._versions_kept = versions_kept
        self._schedulers: list[list[LRScheduler]] = [[] for _ in common.optimizers]
        for scheduler in schedulers:
            self._schedulers[common.optimizers.index(scheduler.optimizer)].append(scheduler)
        self._making: dict[int, PendingUpdate] = {}  # by update
        self._accumulators: list[Views] = []  # that nobody uses
        self._places: list[ParameterBuffer] = []
        self._place_of: dict[int, ParameterBuffer] = {}  # by version
        self._steps_of: dict[int, tuple[int, ...]] = {0: tuple(self.steps)}  # likewise
        self._readers: dict[int, ParameterBuffer] = {}  # by worker
        self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        """The script's own tensors become version 0."""
        common = self.common
        place = self._place_of[0] = self._new_place()
        for own, views in zip(common.parameters, place.views.parameters, strict=True):
            _copy(own, views)
        _copy(common.buffers, place.views.buffers)
        _copy(common.counters, place.views.counters)
        self._point_at(place)
        section, size = lay_out_constants(common.contents)
        region, self.constants_fd = Region.create(size, "constants")
        self._constants = tensors(section, region)
        _copy(common.constants, self._constants)
        self.average: list[list[Tensor]] | None = None
        if self._settings.ema is not None:
            self.average = [[_widened(p).clone() for p in own] for own in place.views.parameters]

    # ----------------------------------------------------------------------------------- places

    def _new_place(self) -> ParameterBuffer:
        region, fd = Region.create(self.layout.size, "parameters")
        place = ParameterBuffer(len(self._places), self.layout.view(region), fd)
        self._places.append(place)
        return place

    def read(self, worker: int, version: int) -> ParameterBuffer:
        """A worker is going to compute at this version; it stays where it is until `leave`."""
        place = self._readers[worker] = self._place_of[version]
        return place

    def leave(self, worker: int) -> None:
        """The worker reads no more."""
        self._readers.pop(worker, None)

    @property
    def newest(self) -> ParameterBuffer:
        """Where the newest version lies."""
        return self._place_of[self.version]

    def steps_at(self, version: int) -> tuple[int, ...]:
        """How often each optimizer had stepped when that version was made."""
        return self._steps_of[version]

    def _point_at(self, place: ParameterBuffer) -> None:
        for own, views in zip(self.common.parameters, place.views.parameters, strict=True):
            for parameter, view in zip(own, views, strict=True):
                parameter.data = view

    def _place_for_next(self) -> ParameterBuffer:
        """Where the next version is made; the parameters of this one are there already."""
        now = self.newest
        for version in [v for v in self._place_of if v <= self.version + 1 - self._versions_kept]:
            del self._place_of[version], self._steps_of[version]
        taken = {*self._place_of.values(), *self._readers.values()}
        if now not in taken:
            return now
        place = next((p for p in self._places if p not in taken), None) or self._new_place()
        for theirs, own in zip(now.views.flats, place.views.flats, strict=True):
            _copy(theirs, own)
        _copy(now.views.buffer_flats, place.views.buffer_flats)
        _copy(now.views.counter_flats, place.views.counter_flats)
        self._point_at(place)
        return place

    # ---------------------------------------------------------------------------------- updates

    def new_slot(self) -> tuple[Views, int]:
        """A slot for a worker's gradients, and its descriptor, which is the caller's to close."""
        region, fd = Region.create(self.layout.size, "slot")
        return self.layout.view(region), fd

    def _accumulator(self) -> Views:
        if self._accumulators:
            return self._accumulators.pop()
        region, fd = Region.create(self.layout.size, "accumulator")
        os.close(fd)
        return self.layout.view(region)

    def optimizer_of(self, update: int) -> int | None:
        """The optimizer that an update is for; None if nothing was given to it yet."""
        making = self._making.get(update)
        return None if making is None else next(iter(making.sums))

    def give(self, update: int, piece: SlotGradient) -> None:
        """Keep an accepted gradient for an update; it stays in its slot until that is needed."""
        if update not in self._making:
            self._making[update] = PendingUpdate(self._accumulator)
        self._making[update].give(piece)

    @torch.no_grad()
    def add_early(self, update: int, limit: float) -> None:
        """Add up what workers below this number have given to an update that is not due yet."""
        if update in self._making:
            self._making[update].add_early(limit)

    def free_slot(self, worker: int) -> None:
        """The worker goes on, or is gone: what still lies in its slot is added up now."""
        if self._making:
            with torch.no_grad():
                for making in self._making.values():
                    making.add(worker)

    @torch.no_grad()
    def apply(self, update: int) -> Applied:
        """Make an update of what was given to it. Where the average is not finite, step nothing."""
        began = perf_counter()
        making = self._making.pop(update)
        place = self.newest
        try:
            place = self._place_for_next()
            averages = {index: total.average() for index, total in making.sums.items()}
            sq_norm = sum(norm for _, norm in averages.values())
            if isfinite(sq_norm):
                for index, average in averages.items():
                    self._step(index, making, average)
                self._publish(making, place)
        finally:  # whatever is raised, by an optimizer of the script say: there is a version
            self.version = update
            self._place_of[update] = place
            self._steps_of[update] = tuple(self.steps)
            if making.memory is not None:
                self._accumulators.append(making.memory)
        return Applied(sq_norm, perf_counter() - began)

    def _step(self, index: int, making: PendingUpdate, average: tuple[Views, float]) -> None:
        """Let one optimizer step along its average."""
        where, sq_norm = average
        unused = making.unused[index]
        grads = where.parameters[index]
        for i, parameter in enumerate(self.common.parameters[index]):
            parameter.grad = None if i in unused else grads[i]
        limit = self._settings.clip_norm
        if limit is not None and sq_norm > limit**2:
            torch._foreach_mul_(where.flats[index], limit / (sqrt(sq_norm) + CLIP_EPSILON))
        self.common.optimizers[index].step()
        for scheduler in self._schedulers[index]:
            scheduler.step()
        self.steps[index] += 1

    def _publish(self, making: PendingUpdate, place: ParameterBuffer) -> None:
        """Have the buffers, and the average of the weights, that belong to the new version."""
        if making.buffers is not None:
            where, _ = making.buffers.average()
            _copy(where.buffer_flats, place.views.buffer_flats)
        _copy(making.counters, place.views.counter_flats)
        if self.average is not None and self._settings.ema is not None:
            for means, own in zip(self.average, place.views.parameters, strict=True):
                torch._foreach_lerp_(means, [_widened(p) for p in own], 1 - self._settings.ema)

    # ------------------------------------------------------------------------------------ state

    def saved(self) -> dict[str, Any]:
        """Everything that the next update depends on, for a checkpoint; nothing is copied."""
        views = self.newest.views
        return {
            "contents": msgspec.to_builtins(self.common.contents),
            "steps": self.steps,
            "parameters": views.parameters,
            "buffers": views.buffers,
            "counters": views.counters,
            "constants": self.common.constants,
            "average": self.average,
            "optimizers": [optimizer.state_dict() for optimizer in self.common.optimizers],
        }

    @torch.no_grad()
    def restore(self, version: int, saved: dict[str, Any]) -> None:
        """Go on from there; raises CheckpointError if that was another script's."""
        common, place = self.common, self.newest
        unlike = difference(
            msgspec.convert(saved["contents"], type(common.contents)), common.contents
        )
        if unlike:
            raise CheckpointError(f"the checkpoint is not of this script: {unlike}")
        for own, values in zip(place.views.parameters, saved["parameters"], strict=True):
            _copy(values, own)
        _copy(saved["buffers"], place.views.buffers)
        _copy(saved["counters"], place.views.counters)
        _copy(saved["constants"], common.constants)
        _copy(saved["constants"], self._constants)
        if self.average is not None:  # there may have been none before
            for means, values in zip(
                self.average, saved["average"] or saved["parameters"], strict=True
            ):
                _copy(values, means)
        self.version, self.steps = version, list(saved["steps"])
        self._place_of, self._steps_of = {version: place}, {version: tuple(self.steps)}
        for index, optimizer in enumerate(common.optimizers):
            try:
                for scheduler in self._schedulers[index]:
                    _catch_up(scheduler, self.steps[index])
                # After that: the schedulers have set what it knows better.
                _load(optimizer, common.parameters[index], saved["optimizers"][index])
            except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
                raise CheckpointError(f"the checkpoint is not of this script: {error}") from None

    @torch.no_grad()
    def state(self, what: str, index: int) -> Any:
        """The state of an optimizer, or the average of the weights by optimizer."""
        if what == "average":
            if self.average is None:
                raise ProtocolError("this run keeps no average of the weights")
            return self.average
        return self._optimizer(index).state_dict()

    def load_state(self, index: int, state: Any) -> None:
        """Load the state of an optimizer; raises ProtocolError if it is not one."""
        optimizer = self._optimizer(index)
        if not isinstance(state, dict) or not {"state", "param_groups"} <= state.keys():
            raise ProtocolError("that is not the state of an optimizer")
        try:
            optimizer.load_state_dict(state)
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
            raise ProtocolError(f"the optimizer cannot load this state: {error}") from None

    def _optimizer(self, index: int) -> Optimizer:
        if index >= len(self.common.optimizers):
            raise ProtocolError(f"there is no optimizer {index}")
        return self.common.optimizers[index]


def _widened(parameter: Tensor) -> Tensor:
    """The parameter with digits enough for an average: small changes vanish in half precision."""
    return parameter.float() if parameter.dtype in HALF else parameter


def _catch_up(scheduler: LRScheduler, steps: int) -> None:
    """Let a scheduler that has just been made be where it was after so many steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer has not stepped in this process
        for _ in range(steps):
            scheduler.step()


def _load(optimizer: Optimizer, parameters: list[Tensor], saved: dict[str, Any]) -> None:
    """Load a state to the bit: torch alone would round it to the types of the parameters."""
    optimizer.load_state_dict(saved)
    for number, parameter in enumerate(parameters):
        loaded = optimizer.state.get(parameter, {})
        for name, value in saved["state"].get(number, {}).items():
            rounded = loaded.get(name)
            if isinstance(rounded, Tensor) and rounded.dtype != value.dtype:
                loaded[name] = value.to(rounded.device)


def _copy(sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=False):
        target.copy_(source)
