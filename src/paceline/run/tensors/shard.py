# SPDX-License-Identifier: BSD-3-Clause
"""The tensors of a run: average accepted gradients, step the optimizers, publish versions.

Theory of operation
    An update is made in phases, so that several shards can make one update together:

    add(update, gradient)       keep an accepted gradient, which stays in its slot
    reduce(decided) -> norm     average as the core decided; return the squared norm
    step(update, scale)         step the optimizers along the average, times `scale`
    publish(update)             the new version exists, with its buffers and averaged weights

    The caller may clip the gradient (`scale`), or call `skip(update)` instead of `step` and
    `publish`: the version is made without a step.

The shard makes no decisions. A run with several servers has one on each: `HeadShard` does the same
in all of them.
"""

from collections.abc import Iterable
from math import isfinite
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.core.events import ApplyUpdate
from paceline.errors import CheckpointError, ProtocolError
from paceline.run.tensors.group_options import all_options
from paceline.run.tensors.layout import TrainingState, Views, difference
from paceline.run.tensors.optimizer_states import load_checked, load_exactly
from paceline.run.tensors.schedules import Schedules
from paceline.run.tensors.state_spec import OptionChange, StateSpec
from paceline.run.tensors.sums import PendingUpdate, SlotGradient, Squares, combined, spoiled
from paceline.run.tensors.trial_step import FAILURES
from paceline.run.tensors.version_buffers import BufferStore, ParameterBuffer, VersionBuffers

__all__ = ["Shard", "infinite_ones", "limit_threads"]

HALF = (torch.float16, torch.bfloat16)
# Below this, waiting for a second thread on a busy machine costs more than it saves (measured).
WORTH_THREADS_BYTES = 32 * 2**20
WARY_UPDATES = 100  # how long to look for the sender of a bad gradient whose slot was in use again


class Shard:
    """Parameters, buffers and optimizers of a run."""

    def __init__(
        self,
        state: TrainingState,
        schedulers: Iterable[LRScheduler],
        store: BufferStore,
        *,
        versions_kept: int = 1,
        ema: float | None = None,
        apart: bool = False,
    ) -> None:
        """Make the script's own tensors version 0.

        `versions_kept`: how many of the newest versions may still be assigned. `ema`: keep
        a moving average of the weights with this decay. `apart`: a worker may read the parameters
        of each optimizer from another version.
        """
        self._everything = tuple(range(len(state.parameters) + 1))  # the last one is the buffers
        self._is_apart = apart and len(state.parameters) > 1
        self.state = state
        self.version = 0
        self.average: list[list[Tensor]] | None = None
        """The moving average of the weights, by optimizer; not None iff the run keeps one."""
        self.first_options = all_options(state.optimizers)
        """The options in the script when the run first began."""
        self._ema = ema
        self._versions_kept = versions_kept
        self._store = store
        self.schedules = Schedules(state.optimizers, schedulers)
        self._pending: dict[int, PendingUpdate] = {}  # by update
        self._averages: dict[int, Views] = {}  # of the update being made, by optimizer
        self._decided: ApplyUpdate | None = None  # likewise
        self._free_accumulators: list[Views] = []
        self._wary_updates = 0  # left in which each gradient is checked before its slot is reused
        self._buffers = VersionBuffers(store, versions_kept)
        self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        state, views = self.state, self._buffers.current.views
        for own, values in zip(state.parameters, views.parameters, strict=True):
            _copy(own, values)
        _copy(state.buffers, views.buffers)
        _copy(state.counters, views.counters)
        _copy(state.constants, self._store.constants)
        self._point_parameters_at(views)
        self._buffers.reset(0)
        self._infinite = infinite_ones(views.parameters)
        if self._ema is not None:
            self.average = [[_widened(p).clone() for p in own] for own in views.parameters]

    @property
    def size_bytes(self) -> int:
        """How much memory one version takes."""
        return self._store.size_bytes

    # --------------------------------------------------------------------------------- versions

    @property
    def whole(self) -> TrainingState:
        """What the run trains; another server may have a part of it."""
        return self.state

    def send_parts(self) -> None:
        """Give other servers their parts; there are none."""

    @property
    def newest(self) -> ParameterBuffer:
        """The buffer of the newest version."""
        return self._buffers.current

    def buffer_of(self, version: int) -> ParameterBuffer:
        """Return the buffer of a version that may still be assigned."""
        return self._buffers.of(version)

    def add_reader(
        self, worker: int, version: int, optimizer: int | None = None
    ) -> ParameterBuffer:
        """Return the buffer of a version; it stays unchanged until `remove_reader`.

        With `optimizer`, the worker reads the parameters of this optimizer and the buffers from it,
        and everything else where it did before.
        """
        return self._buffers.add_reader(worker, version, self._sections(optimizer))

    def remove_reader(self, worker: int, optimizer: int | None = None) -> None:
        """Note that the worker no longer computes with any version.

        With `optimizer`, it still reads the parameters of the other ones, if it may.
        """
        whole = optimizer is None or not self._is_apart
        self._buffers.remove_reader(worker, None if whole else self._sections(optimizer))

    def loads_only(self, optimizer: int | None) -> int | None:
        """Return the optimizer whose parameters a worker loads after a step of it; None: all."""
        return optimizer if self._is_apart else None

    def _sections(self, optimizer: int | None) -> tuple[int, ...]:
        """Return the sections that a worker reads, or an update of this optimizer changes."""
        return self._everything if optimizer is None else (optimizer, self._everything[-1])

    def _point_parameters_at(self, views: Views) -> None:
        for own, values in zip(self.state.parameters, views.parameters, strict=True):
            for parameter, value in zip(own, values, strict=True):
                parameter.data = value

    # ---------------------------------------------------------------------------------- updates

    def optimizers_of(self, update: int) -> list[int]:
        """Return the optimizers that an update is for; none if it has no gradient yet."""
        pending = self._pending.get(update)
        return [] if pending is None else pending.optimizers

    def add(self, update: int, gradient: SlotGradient) -> None:
        """Keep an accepted gradient for an update; it stays in its slot until that is needed."""
        if update not in self._pending:
            self._pending[update] = PendingUpdate(self._accumulator)
        self._pending[update].give(gradient)

    def _accumulator(self) -> Views:
        if self._free_accumulators:
            return self._free_accumulators.pop()
        return self._store.new_accumulator()

    @torch.no_grad()
    def sum_early(self, update: int, limit: float) -> None:
        """Add the gradients of workers below `limit` to the sum of an update that isn't due."""
        if update in self._pending:
            self._pending[update].add_early(limit)

    def release_slot(self, worker: int) -> None:
        """Add what is still in a worker's slot to its sum, because the slot is needed."""
        if self._pending:
            with torch.no_grad():
                for pending in self._pending.values():
                    pending.add_worker(worker, check=self._wary_updates > 0)

    def reduce(self, decided: ApplyUpdate) -> float:
        """Average the contributions with the decided weights; return the squared norm.

        The norm isn't finite if any element of the average isn't.
        """
        return combined([self.measure(decided)])

    @torch.no_grad()
    def measure(self, decided: ApplyUpdate) -> Squares:
        """Average the contributions with the decided weights; return the squares of all blocks."""
        self._decided = decided
        averages = self._pending[decided.update].average(decided)
        self._averages = {index: views for index, (views, _) in averages.items()}
        return {index: squares for index, (_, squares) in averages.items()}

    @torch.no_grad()
    def step(self, update: int, scale: float = 1.0) -> None:
        """Step the optimizers along the reduced gradient, times `scale`."""
        self._begin_version(update)
        pending = self._pending[update]
        for index, views in self._averages.items():
            unused = pending.unused[index]
            grads = views.parameters[index]
            for i, parameter in enumerate(self.state.parameters[index]):
                parameter.grad = None if i in unused else grads[i]
            if scale != 1.0:
                torch._foreach_mul_(views.flats[index], scale)
            if grads:  # otherwise other servers have all of its parameters
                self.state.optimizers[index].step()
            self.schedules.count_step(index, pending.contributions(index))

    def workers_to_blame(self, update: int) -> list[int]:
        """Return the contributors whose gradients aren't finite, because their average isn't.

        If none can be found, the sum has overflowed, or the slot of a bad gradient is already in
        use again. In case it is the latter, later gradients are checked before their slots are.
        """
        found = self._pending[update].workers_with_bad_gradients()
        self._wary_updates = 0 if found else WARY_UPDATES
        return found

    def _begin_version(self, update: int) -> None:
        """Move the parameters to memory that no worker reads."""
        old = self._buffers.current.views
        changing = {section for index in self._averages for section in self._sections(index)}
        if self._buffers.begin_update(update, changing):
            new = self._buffers.current.views
            for source, target in zip(old.flats, new.flats, strict=True):
                _copy(source, target)
            _copy(old.buffer_flats, new.buffer_flats)
            _copy(old.counter_flats, new.counter_flats)
            self._point_parameters_at(new)

    @torch.no_grad()
    def publish(self, update: int) -> list[int] | None:
        """Make the stepped parameters the newest version, with its buffers and average.

        Buffer elements that would become NaN or infinite stay as they are. If there are any,
        returns the workers that sent them, as far as can be seen; otherwise None.
        """
        pending, views = self._pending[update], self._buffers.current.views
        bad_buffers_from = self._publish_buffers(pending, views.buffer_flats)
        _copy(pending.counters, views.counter_flats)
        if self.average is not None and self._ema is not None:
            for means, own in zip(self.average, views.parameters, strict=True):
                if own:  # one of several servers may have no parameters of an optimizer
                    torch._foreach_lerp_(means, [_widened(p) for p in own], 1 - self._ema)
        self._end_update(update)
        self._wary_updates = max(0, self._wary_updates - 1)
        return bad_buffers_from

    def _publish_buffers(self, pending: PendingUpdate, buffers: list[Tensor]) -> list[int] | None:
        assert self._decided is not None
        averaged, sq_norm = pending.average_buffers(self._decided)
        if isfinite(sq_norm):
            _copy(averaged, buffers)
            return None
        # A buffer may be infinite from the start, as the mask of an attention layer is.
        bad = [spoiled(now, before) for now, before in zip(averaged, buffers, strict=True)]
        is_bad = any(bool(elements.any()) for elements in bad)
        found = pending.workers_with_bad_buffers(buffers) if is_bad else None
        for now, before, elements in zip(averaged, buffers, bad, strict=True):
            before.copy_(torch.where(elements, before, now))
        return found

    def skip(self, update: int) -> None:
        """Make a new version without a step, and forget the gradients."""
        self._end_update(update)

    def _end_update(self, update: int) -> None:
        memory = self._pending.pop(update).memory
        if memory is not None:
            self._free_accumulators.append(memory)
        for index in self._averages:
            for parameter in self.state.parameters[index]:
                parameter.grad = None  # it may be in the slot of a worker that has left
        self._averages, self._decided = {}, None
        self.version = update
        self._buffers.end_update(update)

    # ------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next update depends on, for a checkpoint; no copies."""
        views = self.newest.views
        updates = list(self._pending.values())
        pending = [
            [worker for update in updates for worker in update.workers(index)]
            for index in range(len(self.state.optimizers))
        ]
        return {
            "contents": msgspec.to_builtins(self.state.spec),
            "schedules": self.schedules.state_dict(pending),
            "infinite": self._infinite,
            "buffers": views.buffers,
            "counters": views.counters,
            "constants": self.state.constants,
            "first_options": [msgspec.structs.astuple(one) for one in self.first_options],
            **self.part_dict(),
        }

    def part_dict(self) -> dict[str, Any]:
        """Return what `load_part` loads; no copies."""
        return {
            "parameters": self.newest.views.parameters,
            "average": self.average,
            "optimizers": [optimizer.state_dict() for optimizer in self.state.optimizers],
        }

    def load_state_dict(self, version: int, saved: dict[str, Any]) -> None:
        """Continue from a checkpoint; raises CheckpointError if it belongs to another script."""
        mismatch = difference(msgspec.convert(saved["contents"], StateSpec), self.whole.spec)
        if mismatch:
            raise CheckpointError(f"the checkpoint is not of this script: {mismatch}")
        try:
            self._load(version, saved)
        except FAILURES as error:
            raise CheckpointError(f"the checkpoint is not of this script: {error}") from None

    @torch.no_grad()
    def _load(self, version: int, saved: dict[str, Any]) -> None:
        state, views = self.state, self.newest.views
        _copy(saved["buffers"], views.buffers)
        _copy(saved["counters"], views.counters)
        _copy(saved["constants"], state.constants)
        _copy(saved["constants"], self._store.constants)
        if "first_options" in saved:  # the checkpoint may be older than this
            self.first_options = msgspec.convert(saved["first_options"], tuple[OptionChange, ...])
        self.schedules.load_state_dict(saved["schedules"])
        # Last, because bringing the schedulers forward overwrites options of the saved state.
        self.load_part(version, saved)

    @torch.no_grad()
    def load_part(self, version: int, saved: dict[str, Any]) -> None:
        """Continue from the parameters, averages and states of optimizers that were saved."""
        for own, values in zip(self.newest.views.parameters, saved["parameters"], strict=True):
            _copy(values, own)
        if self.average is not None:  # the run that was saved may have kept none
            averages = saved["average"] or saved["parameters"]
            for means, values in zip(self.average, averages, strict=True):
                _copy(values, means)
        self.version = version
        self._buffers.reset(version)
        for index, optimizer in enumerate(self.state.optimizers):
            if self.state.parameters[index]:  # otherwise other servers have all of its parameters
                load_exactly(optimizer, self.state.parameters[index], saved["optimizers"][index])

    def averages(self) -> list[list[Tensor]] | None:
        """Return the moving average of the weights; None if the run keeps none."""
        return self.average

    def optimizer_state(self, index: int) -> dict[str, Any]:
        """Return the state of an optimizer; raises ProtocolError if there is no such optimizer."""
        return self._optimizer(index).state_dict()

    def load_optimizer_state(self, index: int, state: Any) -> None:
        """Load a worker's state of an optimizer; raises ProtocolError if it can't be used."""
        optimizer = self._optimizer(index)
        names = [spec.name for spec in self.state.spec.optimizers[index].parameters]
        parameters = dict(zip(names, self.state.parameters[index], strict=True))
        load_checked(optimizer, parameters, state)

    def _optimizer(self, index: int) -> Optimizer:
        if index >= len(self.state.optimizers):
            raise ProtocolError(f"there is no optimizer {index}")
        return self.state.optimizers[index]


def limit_threads(size_bytes: int) -> None:
    """Have this process compute with one thread if all parameters together are small.

    All servers of a run decide alike, because norms depend on the number of threads, in their last
    bits.
    """
    if size_bytes < WORTH_THREADS_BYTES:
        torch.set_num_threads(1)


def infinite_ones(parameters: list[list[Tensor]]) -> list[list[int]]:
    """Return which parameters of each optimizer contain infinity, but no NaN."""
    return [
        [i for i, value in enumerate(own) if value.isinf().any() and not value.isnan().any()]
        for own in parameters
    ]


def _widened(parameter: Tensor) -> Tensor:
    """Return the parameter in a type precise enough for small changes of an average."""
    return parameter.float() if parameter.dtype in HALF else parameter


def _copy(sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=False):
        target.copy_(source)
