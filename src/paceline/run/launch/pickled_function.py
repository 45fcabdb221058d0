# SPDX-License-Identifier: BSD-3-Clause
"""A training function as a script: files that call it, and the file with what it returned.

The files are next to each other, on every machine. Importing this module imports ray.
"""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray import cloudpickle

__all__ = ["RESULT", "SCRIPT", "call", "pack", "unpack"]

SCRIPT = "function.py"
FUNCTION = "function.pickle"
RESULT = "result.pickle"

# The import is not at the top, where the fork server would find it: forking with Ray is unsafe.
_SOURCE = b"""# Calls the function that paceline.ray.run() was given, which is in function.pickle.
if __name__ == "__main__":
    from paceline.run.launch.pickled_function import call

    call(__file__)
"""


def pack(function: Callable[..., Any], arguments: tuple[Any, ...]) -> dict[str, bytes]:
    """Return the files of a script that calls this function."""
    return {SCRIPT: _SOURCE, FUNCTION: cloudpickle.dumps((function, arguments))}


def call(script: str) -> None:
    """Call the function next to this script, and leave its result there."""
    function, arguments = pickle.loads(Path(script).with_name(FUNCTION).read_bytes())
    value = function(*arguments)
    Path(script).with_name(RESULT).write_bytes(cloudpickle.dumps(value))


def unpack(result: bytes) -> Any:
    """Return what the function returned."""
    return pickle.loads(result)
