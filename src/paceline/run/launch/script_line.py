# SPDX-License-Identifier: BSD-3-Clause
"""The line of the script in a stack that Python's fault handler wrote.

The process hangs, or it has crashed. A script that writes to a worker's parameters, which are
read-only memory, is killed by SIGSEGV. No exception can be raised for that, but the fault handler
names the line.
"""

import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["ScriptLine", "innermost_line"]

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in ', re.MULTILINE)


class ScriptLine(NamedTuple):
    """A line of the script, or of a module that it uses."""

    file: str  # without its folder
    line: int
    source: str  # "" if the file can't be read

    def __str__(self) -> str:
        return f"{self.file}:{self.line}{f' (`{self.source}`)' if self.source else ''}"


def innermost_line(report: str, folder: Path) -> ScriptLine | None:
    """Return the line at which a process was; None if the report names none.

    It is the last line that was reached in this folder, which has the script, or else in any file.
    Large tensors are changed by threads of torch, which have no lines: then it is a line of another
    thread, which waits for them.
    """
    frames = [(Path(file), int(line)) for file, line in _FRAME.findall(report)]
    if not frames:
        return None
    path, line = next((frame for frame in frames if _is_own(frame[0], folder)), frames[0])
    return ScriptLine(path.name, line, _source(path, line))


def _is_own(path: Path, folder: Path) -> bool:
    return path.is_relative_to(folder) and "site-packages" not in path.parts


def _source(path: Path, line: int) -> str:
    try:
        return path.read_text(encoding="utf-8").splitlines()[line - 1].strip()
    except (OSError, UnicodeDecodeError, IndexError):
        return ""
