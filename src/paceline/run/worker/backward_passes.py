# SPDX-License-Identifier: BSD-3-Clause
"""Notice that a script has reset gradients by itself, between two backward passes.

`optimizer.zero_grad()` tells the worker that the gradients start over. `model.zero_grad()` and
`p.grad = None` don't, so the worker looks at the gradients when the next backward pass begins.
"""

from collections.abc import Sequence

from torch import Tensor

__all__ = ["BackwardPasses"]


class BackwardPasses:
    """The backward passes that have reached the parameters of one optimizer."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._smallest_first = sorted(range(len(parameters)), key=lambda j: parameters[j].numel())
        self._reached: set[int] = set()  # parameters whose gradient the current pass has computed

    def start_over(self) -> None:
        """Note that the script no longer needs the gradients of earlier passes."""
        self._reached.clear()

    def has_reset(self, number: int) -> bool:
        """Note that a gradient was computed; return whether all others were reset before it.

        Whether the gradient of a lone parameter was reset can't be seen.
        """
        if number not in self._reached:
            self._reached.add(number)
            return False
        self._reached = {number}  # a pass reaches a parameter once, so this is another one
        others = [j for j in self._smallest_first if j != number]
        return bool(others) and not any(_is_set(self._parameters[j].grad) for j in others)


def _is_set(grad: Tensor | None) -> bool:
    return grad is not None and bool(grad.any())
