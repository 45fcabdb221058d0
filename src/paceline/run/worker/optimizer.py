# SPDX-License-Identifier: BSD-3-Clause
"""The optimizer in a worker's script, whose steps happen on the server.

`pace` replaces an optimizer's class with a subclass of it, so schedulers, gradient clipping,
`GradScaler` and anything else that inspects the optimizer find what they expect. Only the methods
that would change parameters talk to the server instead.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch.optim import Optimizer

from paceline.errors import SpecError

__all__ = ["Paced", "Pacer", "pace"]


class Pacer(Protocol):
    """What a paced optimizer needs from its run."""

    def push(self, optimizer: int) -> None:
        """Report the gradient of this optimizer, wait as the policy says, load the next version."""

    def discard(self, optimizer: int) -> None:
        """Forget which batches the gradient of this optimizer was computed on."""

    def optimizer_state(self, optimizer: int) -> dict[str, Any]:
        """Return the state of the server's optimizer, with the options as the script has them."""

    def load_optimizer_state(self, optimizer: int, state: dict[str, Any]) -> None:
        """Load a state into the server's optimizer."""


class Paced(Optimizer):
    """An optimizer whose steps are updates of the run; `pace` makes one."""

    _pacer: Pacer
    _number: int
    _has_own_zero_grad: bool
    _step_supports_amp_scaling = False  # so GradScaler unscales the gradients itself
    _opt_called = True  # schedulers warn if `step` wasn't called; the server calls it

    # The base class returns what a closure returns, and closures aren't allowed here, so:
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Push the gradient, wait as the policy says, load the new parameters."""
        if closure is not None:
            raise SpecError(
                "optimizer.step() takes no closure in a run, because the server makes the step; "
                "compute the loss and its gradient first, then call step()"
            )
        self._pacer.push(self._number)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined] # or schedulers warn

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; batches of a gradient that was never pushed don't count."""
        self._pacer.discard(self._number)
        if not set_to_none or self._has_own_zero_grad:
            super().zero_grad(set_to_none)
            return
        # What Optimizer does, without its profiling, which takes longer than the rest.
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the server's optimizer, with the options as the script has them."""
        return self._pacer.optimizer_state(self._number)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state into the server's optimizer."""
        self._pacer.load_optimizer_state(self._number, state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse, because all processes of a run must train the same parameters."""
        raise SpecError(
            "parameter groups can't be added during a run; add them before run.prepare()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse, because a copy would not step anything."""
        raise SpecError("a prepared optimizer can't be copied or pickled; use its state_dict()")

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Refuse, because no step happens in this process."""
        raise SpecError(
            "register step hooks before run.prepare(): they run with the step, on the server"
        )

    register_step_post_hook = register_step_pre_hook


def pace(optimizer: Optimizer, number: int, pacer: Pacer) -> None:
    """Make this optimizer push to `pacer` instead of stepping; `number` is its place in the run."""
    kind = type(optimizer)
    # A scheduler wraps `step`, and a fused optimizer declares AMP support, in the instance itself.
    for name in ("step", "_step_supports_amp_scaling"):
        optimizer.__dict__.pop(name, None)
    optimizer.__class__ = type(kind.__name__, (Paced, kind), {"__doc__": kind.__doc__})
    optimizer.__dict__.update(
        _pacer=pacer, _number=number, _has_own_zero_grad=kind.zero_grad is not Optimizer.zero_grad
    )
