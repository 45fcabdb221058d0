# SPDX-License-Identifier: BSD-3-Clause
"""A worker's tensors: parameters that point at the server's memory, gradients in the slot.

The parameters of the script's models point at the memory to which the server writes them. To load a
version, the worker points them at another buffer, or does nothing if the server made the update in
place. That memory is read-only. Gradients move to the slot as the backward pass computes them, one
parameter at a time, and their norm is measured while they are in the cache.

Parameters on another device, and those that a module changes itself, are copied instead.
"""

from collections.abc import Callable, Iterable, Sequence
from math import isfinite, isnan, nan
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.errors import SpecError
from paceline.run.tensors.layout import (
    SMALL_BYTES,
    TrainingState,
    Views,
    flat,
)
from paceline.run.tensors.sums import blocks, square
from paceline.run.worker.backward_passes import BackwardPasses
from paceline.run.worker.replaced_parameters import ReplacedParameters

__all__ = ["Replica"]


BufferEntry = tuple[dict[str, Tensor | None], str]  # a module's dictionary of buffers, and a name


class Replica:
    """The tensors of one worker."""

    def __init__(
        self, state: TrainingState, models: Sequence[nn.Module], stage: bool = False
    ) -> None:
        """With `stage`, treat all parameters as if they were on another device."""
        self.models = models
        self.optimizers = state.optimizers
        self._state = state
        self._is_detached = False
        self._newest: Views | None = None  # the version that was loaded last
        # By optimizer:
        self._at: list[Views | None] = [None] * len(state.parameters)  # what they point at
        self._addresses: list[list[int]] = [[] for _ in state.parameters]
        self._pointed: list[list[tuple[int, Tensor]]] = [[] for _ in state.parameters]
        self._copied: list[list[tuple[int, Tensor]]] = [[] for _ in state.parameters]
        self._staged: set[int] = set()
        self._measured: dict[Tensor, _Measured] = {}  # large gradients, by their view
        self._passes = [BackwardPasses(own) for own in state.parameters]
        all_parameters = [p for own in (*state.parameters, state.constants) for p in own]
        self._replaced = ReplacedParameters(models, all_parameters)
        self._buffers = _entries_of(state.buffers, models)
        self._counters = _entries_of(state.counters, models)
        copied_ids = {id(tensor) for tensor in _written_by_modules(models)}
        for i, own in enumerate(state.parameters):
            for j, parameter in enumerate(own):
                if stage or parameter.device.type != "cpu":
                    self._staged.add(id(parameter))
                is_copied = id(parameter) in copied_ids | self._staged
                (self._copied if is_copied else self._pointed)[i].append((j, parameter))

    @torch.no_grad()
    def load_constants(self, constants: Sequence[Tensor]) -> None:
        """Load the parameters that no optimizer steps; they never change."""
        for own, value in zip(self._state.constants, constants, strict=True):
            own.data.copy_(value)

    def set_slot(self, slot: Views) -> None:
        """Move gradients to this slot from now on."""
        self._slot = slot
        self._measured.clear()

    @torch.no_grad()
    def load(self, views: Views, optimizer: int | None = None) -> None:
        """Load the parameters and buffers of the version in this memory.

        With `optimizer`, load only the parameters of this one: the others stay as they are, because
        the script may be between a forward and a backward pass that use them. Does nothing after
        `leave`.
        """
        if self._is_detached:
            return
        self._newest = views
        for i in range(len(self._at)) if optimizer is None else (optimizer,):
            if self._at[i] is views:
                self._copy(i, views)
            else:
                self._at[i] = views
                self._point(i, views)
                self._addresses[i] = [p.data_ptr() for p in self._state.parameters[i]]
        _copy_unnoticed(views.buffers, self._buffers)
        _copy_unnoticed(views.counters, self._counters)

    @torch.no_grad()
    def load_again(self) -> None:
        """Load the current version again, in case the script has replaced its parameters."""
        for i, views in enumerate(self._at):
            assert views is not None
            self._point(i, views)

    @torch.no_grad()
    def detach(self) -> None:
        """Give the script parameters that it may change, because the run is over.

        Their memory is the slot.
        """
        if self._is_detached:
            return
        assert self._newest is not None
        self._drop_gradients()
        for newest, slot in zip(self._newest.flats, self._slot.flats, strict=True):
            for source, target in zip(newest, slot, strict=True):
                target.copy_(source)
        self._at = [self._slot] * len(self._at)
        self._slot = self._newest
        self._is_detached = True
        self.load_again()

    @torch.no_grad()
    def leave(self) -> None:
        """Give the script parameters of its own, because it has finished its training.

        The run goes on without it, but the script can't train with these parameters.
        """
        if self._is_detached:
            return
        self._is_detached = True
        self._drop_gradients()
        for pointed in self._pointed:
            for _, parameter in pointed:
                parameter.data = parameter.data.clone()

    def _drop_gradients(self) -> None:
        for own in self._state.parameters:
            for parameter in own:
                parameter.grad = None

    def _point(self, optimizer: int, views: Views) -> None:
        """Point the parameters of an optimizer at this memory, and copy those that can't."""
        for j, parameter in self._pointed[optimizer]:
            parameter.data = views.parameters[optimizer][j]
        self._copy(optimizer, views)

    def _copy(self, optimizer: int, views: Views) -> None:
        for j, parameter in self._copied[optimizer]:
            parameter.data.copy_(views.parameters[optimizer][j])

    def fill_gaps(self) -> None:
        """Give every parameter without a gradient one of zeros, for scripts that read it."""
        for i, own in enumerate(self._state.parameters):
            for j, parameter in enumerate(own):
                if parameter.grad is None and parameter.requires_grad:
                    is_separate = id(parameter) in self._staged or self._is_detached
                    view = self._slot.parameters[i][j]
                    parameter.grad = torch.zeros_like(parameter) if is_separate else view.zero_()

    def on_gradients(
        self, callback: Callable[[int], None], on_reset: Callable[[int], None] = lambda _: None
    ) -> None:
        """Move each new gradient to the slot, then call back with the number of its optimizer.

        `on_reset` is called before that if the script has reset the gradients of the optimizer.
        """
        self._on_gradient, self._on_reset = callback, on_reset
        for i, own in enumerate(self._state.parameters):
            for j, parameter in enumerate(own):
                if parameter.requires_grad:
                    self._add_hook(parameter, i, j)

    def start_over(self, optimizer: int) -> None:
        """Note that the script resets the gradients of this optimizer."""
        self._passes[optimizer].start_over()

    def _add_hook(self, parameter: Tensor, optimizer: int, number: int) -> None:
        is_collected = id(parameter) in self._staged or parameter.nbytes <= SMALL_BYTES
        passes = self._passes[optimizer]

        def on_gradient(parameter: Tensor) -> None:
            if passes.has_reset(number):
                self._on_reset(optimizer)
            if not is_collected and not self._is_detached:
                grad, view = parameter.grad, self._slot.parameters[optimizer][number]
                # A gradient that has a graph (create_graph) must stay the same tensor.
                if grad is not view and grad is not None and not grad.requires_grad:
                    self._check(grad, optimizer, number)
                    self._measured[view] = _move(grad, view)
                    parameter.grad = view
            self._on_gradient(optimizer)

        parameter.register_post_accumulate_grad_hook(on_gradient)

    def collect(self, optimizer: int) -> tuple[tuple[int, ...], float]:
        """Complete the gradient of this optimizer in the slot.

        Returns its parameters that have no gradient, and the squared norm of the others. The norm
        isn't finite if a number in the gradient isn't, or if a module buffer has become NaN.
        """
        unused, targets, grads = [], [], []
        views = self._slot.parameters[optimizer]
        own = self._state.parameters[optimizer]
        if self._is_detached:
            raise SpecError(
                "optimizer.step() was called after weights were loaded with load_state_dict(): "
                "the server owns the parameters, so load weights before run.prepare(), or after "
                "the last step"
            )
        self._replaced.check()
        addresses = [parameter.data_ptr() for parameter in own]
        if addresses != self._addresses[optimizer]:
            raise self._moved(optimizer, addresses)
        for j, parameter in enumerate(own):
            grad, view = parameter.grad, views[j]
            if grad is None:
                unused.append(j)
                view.zero_()
            elif grad is not view:
                self._check(grad, optimizer, j)
                targets.append(view)
                grads.append(grad.detach() if grad.requires_grad else grad)
        if grads:
            torch._foreach_copy_(targets, grads)
        sq_norm = sum(map(square, self._slot.small_flats[optimizer]))
        sq_norm += sum(self._square_of(view) for view in views if view.nbytes > SMALL_BYTES)
        if self._slot.buffers:
            torch._foreach_copy_(self._slot.buffers, _tensors_in(self._buffers))
        if self._slot.counters:
            torch._foreach_copy_(self._slot.counters, _tensors_in(self._counters))
        if isfinite(sq_norm) and self._has_new_nan():
            sq_norm = nan
        return tuple(unused), sq_norm

    def _has_new_nan(self) -> bool:
        """Return whether this turn put a NaN into the module buffers."""
        assert self._newest is not None
        return _has_nan(self._slot.buffer_flats) and not _has_nan(self._newest.buffer_flats)

    def _square_of(self, view: Tensor) -> float:
        """Return the squared norm of a gradient; measure it again only if it has changed."""
        now = flat(view)
        known = self._measured.get(view)
        # GradScaler and `grad.data` change a tensor unnoticed, so compare the first block, too.
        if (
            known is None
            or known.edition != view._version
            or known.first != square(blocks(now)[0])
            or known.first == 0
            or not isfinite(known.sq_norm)
        ):
            return square(now)
        return known.sq_norm

    def _check(self, grad: Tensor, optimizer: int, number: int) -> None:
        """Raise SpecError if the gradient can't be moved to the slot."""
        view = self._slot.parameters[optimizer][number]
        if grad.is_sparse:
            raise SpecError(
                f"the gradient of {self._name(optimizer, number)} is sparse, which a run can't "
                "exchange; create the layer with sparse=False"
            )
        if grad.shape != view.shape or grad.dtype != view.dtype:
            raise SpecError(
                f"{self._name(optimizer, number)} was {view.dtype}{list(view.shape)} in "
                f"run.prepare(), but its gradient is {grad.dtype}{list(grad.shape)}; a model can't "
                "change its shape or type during a run"
            )

    def _moved(self, optimizer: int, addresses: list[int]) -> SpecError:
        pairs = zip(addresses, self._addresses[optimizer], strict=True)
        number = next(number for number, (now, before) in enumerate(pairs) if now != before)
        return SpecError(
            f"{self._name(optimizer, number)} was moved after run.prepare(), as model.to() and "
            "parameter.data = ... do, so the run no longer trains it; move it before run.prepare()"
        )

    def _name(self, optimizer: int, number: int) -> str:
        spec = self._state.spec.optimizers[optimizer].parameters[number]
        return f"parameter {spec.name!r}"


class _Measured(NamedTuple):
    """Measurements of a gradient when it was moved to the slot."""

    edition: int  # torch's count of changes to the tensor
    first: float  # squared norm of its first block
    sq_norm: float


def _move(grad: Tensor, view: Tensor) -> _Measured:
    """Copy a gradient to the slot, and measure each block on the way."""
    if grad.stride() != view.stride():
        view.copy_(grad)
        grad = view
    squares = []
    for source, target in zip(blocks(flat(grad)), blocks(flat(view)), strict=True):
        if grad is not view:
            target.copy_(source)
        squares.append(square(source))
    return _Measured(view._version, squares[0], sum(squares))


def _entries_of(buffers: Sequence[Tensor], models: Iterable[nn.Module]) -> list[BufferEntry]:
    """Return where modules keep these buffers: a module may replace the tensor there."""
    found: dict[int, BufferEntry] = {
        id(buffer): (module._buffers, name)
        for model in models
        for module in model.modules()
        for name, buffer in module._buffers.items()
    }
    entries = [found[id(buffer)] for buffer in buffers]
    for (own, name), buffer in zip(entries, buffers, strict=True):
        if 0 in buffer.stride():  # expanded: several elements share one number
            own[name] = buffer.contiguous()
    return entries


def _tensors_in(entries: list[BufferEntry]) -> list[Tensor]:
    return [own[name] for own, name in entries]  # type: ignore[misc] # none of them is None


def _copy_unnoticed(values: Sequence[Tensor], entries: list[BufferEntry]) -> None:
    """Copy the values into the buffers, and leave torch's counts of their changes as they are.

    A graph of an earlier forward pass may still need its backward pass, as the generator's does
    after the step of the discriminator. Autograd refuses it if a count has changed, although batch
    norm computes its gradient from the batch, not from the buffers.
    """
    if values:
        torch._foreach_copy_([buffer.data for buffer in _tensors_in(entries)], list(values))


def _has_nan(flats: list[Tensor]) -> bool:
    return any(isnan(square(one)) for one in flats)


def _written_by_modules(models: Iterable[nn.Module]) -> list[Tensor]:
    """Return the parameters that a module changes in its forward pass: each worker needs a copy."""
    return [
        module.weight
        for model in models
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    ]
