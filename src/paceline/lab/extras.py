# SPDX-License-Identifier: BSD-3-Clause
"""Load the packages that only the lab needs, which the extra `paceline[lab]` installs.

Modules of the lab don't import these packages at the top. They call `load` where they use one, so
that `import paceline.lab` and the command line work without the extra. If a package is missing, the
error names the command that installs it.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from paceline.errors import SpecError

__all__ = ["check_installed", "load"]

PACKAGES = {"matplotlib": "matplotlib", "PIL": "pillow", "scipy": "scipy"}
"""The name that each package is imported by, and the name that pip knows it by."""


def load(module: str) -> Any:
    """Import a module of one of the lab's optional packages, such as "scipy.optimize".

    Raises SpecError if the package isn't installed.
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # the package is there, but something that it needs is not
        raise _missing(package) from None


def check_installed() -> None:
    """Raise SpecError if one of the packages is missing, before hours of training depend on it."""
    for package in PACKAGES:
        if find_spec(package) is None:
            raise _missing(package)


def _missing(package: str) -> SpecError:
    return SpecError(
        f"the lab needs {PACKAGES[package]}, which is not installed; "
        "install it with: pip install 'paceline[lab]'"
    )
