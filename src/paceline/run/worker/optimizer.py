# SPDX-License-Identifier: BSD-3-Clause
"""The optimizer that a worker's script holds: it steps on the server.

`pace` turns an optimizer into one that is also of its own class, so schedulers, clipping,
`GradScaler` and whatever else looks at it find what they expect; only what would change parameters
here goes to the server instead.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch.optim import Optimizer

from paceline.errors import SpecError

__all__ = ["Paced", "Pacer", "pace"]


class Pacer(Protocol):
    """What a paced optimizer needs of its run."""

    def push(self, optimizer: int) -> None:
        """Give what was computed to the server, and wait as the rule says."""

    def discard(self, optimizer: int) -> None:
        """What was computed for this optimizer is thrown away."""

    def optimizer_state(self, optimizer: int) -> dict[str, Any]:
        """The state of the optimizer on the server."""

    def load_optimizer_state(self, optimizer: int, state: dict[str, Any]) -> None:
        """Load a state into the optimizer on the server."""


class Paced(Optimizer):
    """An optimizer whose steps are updates of the run. Made by `pace`, never by itself."""

    _pacer: Pacer
    _number: int
    _has_own_zero_grad: bool
    _step_supports_amp_scaling = False  # so that a GradScaler divides the gradients itself
    _opt_called = True  # schedulers look whether this or `step` was called; they are stepped for us

    # What a closure returns is what `step` would return, and there is none, so:
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Push the gradient, wait as the policy says, load the new parameters."""
        if closure is not None:
            raise SpecError(
                "optimizer.step() takes no closure here, for the step is made on the server; "
                "compute the loss and its gradient before, and call step()"
            )
        self._pacer.push(self._number)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined] # or schedulers would warn

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ever; and what was computed and never pushed does not count."""
        self._pacer.discard(self._number)
        if not set_to_none or self._has_own_zero_grad:
            super().zero_grad(set_to_none)
            return
        # What Optimizer does, without its profiling: that takes longer than all the rest.
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer on the server."""
        return self._pacer.optimizer_state(self._number)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state into the optimizer on the server."""
        self._pacer.load_optimizer_state(self._number, state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: all processes of a run must agree on what is trained."""
        raise SpecError("add all groups of parameters before run.prepare(); later is too late")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: a copy would step nothing."""
        raise SpecError("an optimizer of a run cannot be copied or pickled; use its state_dict()")

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Refused: there are no steps here that it could be called at."""
        raise SpecError("register hooks before run.prepare(): they are called where the step is")

    register_step_post_hook = register_step_pre_hook


def pace(optimizer: Optimizer, number: int, pacer: Pacer) -> None:
    """Make the optimizer push to `pacer` instead of stepping."""
    kind = type(optimizer)
    # Not what a scheduler put in front of it, nor what a fused optimizer says of itself.
    for name in ("step", "_step_supports_amp_scaling"):
        optimizer.__dict__.pop(name, None)
    optimizer.__class__ = type(kind.__name__, (Paced, kind), {"__doc__": kind.__doc__})
    optimizer.__dict__.update(
        _pacer=pacer, _number=number, _has_own_zero_grad=kind.zero_grad is not Optimizer.zero_grad
    )
