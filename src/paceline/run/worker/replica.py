# SPDX-License-Identifier: BSD-3-Clause
"""A worker's tensors: its models point at the server's parameters, its gradients at its slot.

The parameters of the script's models are pointed at the memory in which the server wrote them: to
load a version is to point at another place, or to do nothing where the server made the update in
place. That memory is for reading only. Gradients are moved to the slot as the backward pass makes
them, one parameter at a time, and measured while they are in the cache.

Parameters on another device, and those that a module changes by itself, are copied instead.
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

__all__ = ["Replica"]


Home = tuple[dict[str, Tensor | None], str]  # where a module keeps a buffer, and as what


class Replica:
    """The tensors of one worker."""

    def __init__(
        self, common: TrainingState, models: Sequence[nn.Module], stage: bool = False
    ) -> None:
        """With `stage` all parameters are treated as if they were on another device."""
        self.models = models
        self._common = common
        self._is_detached = False
        self._at: Views | None = None  # where the parameters point at
        self._addresses: list[list[int]] = []  # of the parameters, by optimizer
        self._pointed: list[tuple[int, int, Tensor]] = []
        self._copied: list[tuple[int, int, Tensor]] = []
        self._staged: set[int] = set()
        self._measured: dict[Tensor, _Measured] = {}  # large gradients, by where they lie
        self._buffers = _homes(common.buffers, models)
        self._counters = _homes(common.counters, models)
        copied_ids = {id(tensor) for tensor in _written_by_modules(models)}
        for i, own in enumerate(common.parameters):
            for j, parameter in enumerate(own):
                if stage or parameter.device.type != "cpu":
                    self._staged.add(id(parameter))
                moves = id(parameter) in copied_ids | self._staged
                (self._copied if moves else self._pointed).append((i, j, parameter))

    @torch.no_grad()
    def load_constants(self, constants: Sequence[Tensor]) -> None:
        """Load the parameters that no optimizer steps; they never change."""
        for own, value in zip(self._common.constants, constants, strict=True):
            own.copy_(value)

    def set_slot(self, slot: Views) -> None:
        """Put gradients there from now on."""
        self._slot = slot
        self._measured.clear()

    @torch.no_grad()
    def load(self, views: Views) -> None:
        """Load the parameters and buffers of the version in this memory."""
        if views is not self._at:
            self._at = views
            self.load_again()
            self._addresses = [[p.data_ptr() for p in own] for own in self._common.parameters]
        else:
            self._copy_from(views)
        if views.buffers:
            torch._foreach_copy_(_kept(self._buffers), views.buffers)
        if views.counters:
            torch._foreach_copy_(_kept(self._counters), views.counters)

    @torch.no_grad()
    def load_again(self) -> None:
        """Have the parameters that were loaded last, whatever was put in their place."""
        assert self._at is not None
        for i, j, parameter in self._pointed:
            parameter.data = self._at.parameters[i][j]
        self._copy_from(self._at)

    @torch.no_grad()
    def detach(self) -> None:
        """The run is over: the parameters are ours to change. They lie in the slot from now on."""
        assert self._at is not None
        for i, own in enumerate(self._common.parameters):
            for parameter in own:
                parameter.grad = None
            for there, here in zip(self._at.flats[i], self._slot.flats[i], strict=True):
                here.copy_(there)
        self._at, self._slot = self._slot, self._at
        self._is_detached = True
        self.load_again()

    def _copy_from(self, views: Views) -> None:
        for i, j, parameter in self._copied:
            parameter.copy_(views.parameters[i][j])

    def fill_gaps(self) -> None:
        """Give parameters that have no gradient one of zeros, for scripts that look at it."""
        for i, own in enumerate(self._common.parameters):
            for j, parameter in enumerate(own):
                if parameter.grad is None and parameter.requires_grad:
                    away = id(parameter) in self._staged or self._is_detached
                    view = self._slot.parameters[i][j]
                    parameter.grad = torch.zeros_like(parameter) if away else view.zero_()

    def on_gradients(self, then: Callable[[int], None]) -> None:
        """Move each new gradient to the slot; then call with the number of its optimizer."""
        for i, own in enumerate(self._common.parameters):
            for j, parameter in enumerate(own):
                if parameter.requires_grad:
                    self._watch(parameter, i, j, then)

    def _watch(
        self, parameter: Tensor, optimizer: int, number: int, then: Callable[[int], None]
    ) -> None:
        waits = id(parameter) in self._staged or parameter.nbytes <= SMALL_BYTES

        def on_gradient(parameter: Tensor) -> None:
            if not waits and not self._is_detached:
                grad, view = parameter.grad, self._slot.parameters[optimizer][number]
                # One that has a graph of its own (create_graph) must stay what it is.
                if grad is not view and grad is not None and not grad.requires_grad:
                    _check(grad, view)
                    self._measured[view] = _move(grad, view)
                    parameter.grad = view
            then(optimizer)

        # torch has no types for this, so:
        parameter.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]

    def collect(self, optimizer: int) -> tuple[tuple[int, ...], float]:
        """See that everything is in the slot.

        Returns the parameters of this optimizer that have no gradient, and the squared norm of all
        others; it is not finite if any number among them is not, or a buffer was spoilt.
        """
        unused, targets, grads = [], [], []
        views = self._slot.parameters[optimizer]
        own = self._common.parameters[optimizer]
        if [parameter.data_ptr() for parameter in own] != self._addresses[optimizer]:
            raise SpecError(
                "a parameter lies elsewhere than run.prepare() had put it, as after model.to() or "
                "parameter.data = ...; what it holds now is not what the run trains: do that before"
            )
        for j, parameter in enumerate(own):
            grad, view = parameter.grad, views[j]
            if grad is None:
                unused.append(j)
                view.zero_()
            elif grad is not view:
                _check(grad, view)
                targets.append(view)
                grads.append(grad.detach() if grad.requires_grad else grad)
        if grads:
            torch._foreach_copy_(targets, grads)
        sq_norm = sum(map(square, self._slot.small_flats[optimizer]))
        sq_norm += sum(self._square_of(view) for view in views if view.nbytes > SMALL_BYTES)
        if self._slot.buffers:
            torch._foreach_copy_(self._slot.buffers, _kept(self._buffers))
        if self._slot.counters:
            torch._foreach_copy_(self._slot.counters, _kept(self._counters))
        if isfinite(sq_norm) and self._has_spoilt_buffers():
            sq_norm = nan
        return tuple(unused), sq_norm

    def _has_spoilt_buffers(self) -> bool:
        """Whether a NaN has come into the buffers; one that was there before is the script's."""
        assert self._at is not None
        return _has_nan(self._slot.buffer_flats) and not _has_nan(self._at.buffer_flats)

    def _square_of(self, view: Tensor) -> float:
        """The squared norm of what lies there, measured again only if the script has changed it."""
        now = flat(view)
        known = self._measured.get(view)
        # Some things change a tensor unseen (GradScaler, `grad.data`): look at the first block too.
        if (
            known is None
            or known.edition != view._version
            or known.first != square(blocks(now)[0])
            or known.first == 0
            or not isfinite(known.sq_norm)
        ):
            return square(now)
        return known.sq_norm


class _Measured(NamedTuple):
    """What a gradient in the slot was like when it had been moved there."""

    edition: int  # of its memory: how often torch had seen it change
    first: float  # the squared norm of its first block
    sq_norm: float


def _move(grad: Tensor, view: Tensor) -> _Measured:
    """Copy a gradient there, and measure each block of it on the way."""
    if grad.stride() != view.stride():
        view.copy_(grad)
        grad = view
    squares = []
    for source, target in zip(blocks(flat(grad)), blocks(flat(view)), strict=True):
        if grad is not view:
            target.copy_(source)
        squares.append(square(source))
    return _Measured(view._version, squares[0], sum(squares))


def _check(grad: Tensor, view: Tensor) -> None:
    if grad.is_sparse:
        raise SpecError("a sparse gradient cannot be exchanged; make the layer with sparse=False")
    if grad.shape != view.shape or grad.dtype != view.dtype:
        raise SpecError(
            f"a parameter was {view.dtype}{list(view.shape)} in run.prepare() and its gradient is "
            f"{grad.dtype}{list(grad.shape)} now; a model cannot change its shape during a run"
        )


def _homes(buffers: Sequence[Tensor], models: Iterable[nn.Module]) -> list[Home]:
    """Where these are kept: a module may put another tensor in the place of a buffer."""
    found: dict[int, Home] = {
        id(buffer): (module._buffers, name)
        for model in models
        for module in model.modules()
        for name, buffer in module._buffers.items()
    }
    homes = [found[id(buffer)] for buffer in buffers]
    for (home, name), buffer in zip(homes, buffers, strict=True):
        if 0 in buffer.stride():  # expanded, so there is not a place for each number
            home[name] = buffer.contiguous()
    return homes


def _kept(homes: list[Home]) -> list[Tensor]:
    return [home[name] for home, name in homes]  # type: ignore[misc] # none of them is None


def _has_nan(flats: list[Tensor]) -> bool:
    return any(isnan(square(one)) for one in flats)


def _written_by_modules(models: Iterable[nn.Module]) -> list[Tensor]:
    """Parameters that a module changes in its forward pass, so that each worker needs its own."""
    return [
        module.weight
        for model in models
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    ]
