# SPDX-License-Identifier: BSD-3-Clause
"""Notice that a script has replaced parameters of its models, or the modules that have them.

The run would go on training the old ones. So each step compares where modules keep their parameters
and their parts with where they kept them in `run.prepare()`. That takes less time than looking up
the addresses of the parameters; only if something has changed are the models searched again.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from paceline.errors import SpecError

__all__ = ["ReplacedParameters"]

Entry = tuple[dict[str, Any], str, object]  # a module's dictionary, a name, and what it has there


class ReplacedParameters:
    """The parameters of the models, and the places where modules keep them."""

    def __init__(self, models: Sequence[nn.Module], parameters: Iterable[Tensor]) -> None:
        """`parameters`: all that the run knows, whether it trains them or not."""
        self._models = models
        # It keeps them, so that no new parameter gets the id of one that is gone.
        self._known = {id(parameter): parameter for parameter in parameters}
        self._entries = self._find_entries()

    def _find_entries(self) -> list[Entry]:
        found: list[Entry] = []
        for module in {m: None for model in self._models for m in model.modules()}:
            own: dict[str, Any] = module._parameters
            found += [(own, name, one) for name, one in own.items() if one is not None]
            parts: dict[str, Any] = module._modules
            found += [(parts, name, part) for name, part in parts.items() if _has_parameters(part)]
        return found

    def check(self) -> None:
        """Raise SpecError if the models have a parameter that the run doesn't know."""
        for own, name, one in self._entries:
            if own.get(name) is not one:
                self._search()
                return

    def _search(self) -> None:
        for model in self._models:
            for name, parameter in model.named_parameters():
                if id(parameter) not in self._known:
                    raise SpecError(
                        f"parameter {name!r} was replaced after run.prepare(), as model[0] = ... "
                        "and module.weight = ... do, so the run doesn't train it; replace it "
                        "before run.prepare()"
                    )
        self._entries = self._find_entries()  # it was removed, or moved to another module


def _has_parameters(part: nn.Module | None) -> bool:
    return part is not None and next(part.parameters(), None) is not None
