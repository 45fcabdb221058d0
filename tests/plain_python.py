# SPDX-License-Identifier: BSD-3-Clause
"""Scripts in processes of plain Python, as if a user had typed `python script.py`.

A process imports torch once and forks a process per script, because the import takes longer than
most scripts. It never imports Paceline, so a script without Paceline runs without it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple, Self

__all__ = ["Finished", "PlainPython"]

# Creating an optimizer imports torch._dynamo, which takes as long as importing torch.
_PROGRAM = """
import json, os, runpy, sys, traceback
import torch, torch._dynamo

def execute(path, folder, arguments):
    os.chdir(folder)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), fd)
    sys.argv = [path, *arguments]
    sys.path[0] = os.path.dirname(path)
    code = 1
    try:
        runpy.run_path(path, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        execute(*json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Finished(NamedTuple):
    """The result of a script."""

    code: int
    out: str
    err: str


class PlainPython:
    """Runs scripts, one after the other. The process starts with the first of them."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.communicate()  # closes its input, and waits for its end

    def run(self, script: Path, folder: Path, *arguments: str) -> Finished:
        """Run the script in this folder, which also gets its output; wait for its end."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},  # more threads are slower here
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(
            json.dumps([str(script), str(folder), arguments]), file=self._process.stdin, flush=True
        )
        code = int(self._process.stdout.readline())
        out, err = ((folder / name).read_text() for name in ("stdout", "stderr"))
        return Finished(code, out, err)
