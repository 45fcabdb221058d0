# SPDX-License-Identifier: BSD-3-Clause
"""Import a user's own rule, written as MODULE:CLASS.

The module is searched as Python searches a script's imports: first in the given folders, then
among the installed packages. Once it is imported, every later use in this process finds it.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

from paceline.core.policy import Policy
from paceline.errors import SpecError

__all__ = ["Folders", "import_policy", "split_own"]

Folders = Sequence[str | Path]
"""Where to look for a module besides the installed packages; "" is the current folder."""

_OWN = re.compile(r"(?P<module>[^\W\d][\w.]*):(?P<name>[^\W\d]\w*)(?P<rest>:.*)?", re.DOTALL)


def split_own(text: str) -> tuple[str, str, str] | None:
    """Split "module:Class:values" into its parts, of which the last may be empty.

    Return None for any other text, such as "backup:2".
    """
    found = _OWN.fullmatch(text.strip())
    return None if found is None else (found["module"], found["name"], (found["rest"] or "")[1:])


def import_policy(module: str, name: str, folders: Folders) -> type[Policy]:
    """Return the class `name` of this module; raise SpecError if it isn't there or isn't a rule."""
    if module == "__main__":
        raise SpecError(
            f"the class {name} was defined in a script or a notebook, which can't be imported; "
            "define it in a module of its own"
        )
    paths = [str(Path(folder).absolute()) for folder in folders or ("",)]
    with _first_on_path(paths):
        imported = _import(module, paths)
    kind = getattr(imported, name, None)
    place = f"module {module} ({getattr(imported, '__file__', None) or 'built in'})"
    if kind is None:
        raise SpecError(f"{place} has no class {name}")
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        raise SpecError(f"{name} in {place} must be a class that derives from paceline.Policy")
    return kind


def _import(module: str, paths: list[str]) -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise SpecError(f"module {module} can't be imported: {error}") from error
        where = " or ".join(dict.fromkeys(paths))
        raise SpecError(
            f"there is no module {error.name} in {where}, and none of that name is installed"
        ) from None
    except Exception as error:  # a user's module may raise anything
        raise SpecError(
            f"module {module} can't be imported: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def _first_on_path(paths: list[str]) -> Iterator[None]:
    """Search these folders before all others; later imports of ours must not find their files."""
    before = list(sys.path)
    sys.path[:0] = paths
    try:
        yield
    finally:
        sys.path[:] = before
