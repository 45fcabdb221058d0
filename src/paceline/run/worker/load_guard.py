# SPDX-License-Identifier: BSD-3-Clause
"""Notice `load_state_dict()` on the models of a run.

The guard replaces the method of all modules in this process. A hook on each module would do, too,
but it would become part of a model that the script saves whole.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from torch import nn

__all__ = ["guard_loading"]


def guard_loading(models: Iterable[nn.Module], before: Callable[[], None]) -> None:
    """Call `before`, which may raise, before weights are loaded into these models or their parts.

    Loading into copies of them is not affected.
    """
    guarded = {module for model in models for module in model.modules()}
    plain = nn.Module.load_state_dict

    @wraps(plain)
    def load_state_dict(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        if not guarded.isdisjoint(module.modules()):
            before()
        return plain(module, *arguments, **options)

    # mypy allows no method to be replaced, but subclasses call this one with super().
    nn.Module.load_state_dict = load_state_dict  # type: ignore[assignment, method-assign]
