# SPDX-License-Identifier: BSD-3-Clause
"""A fixture that calls the command line in this process, and what its tests share."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shlex import split
from typing import NamedTuple

import pytest

from paceline.cli import main
from paceline.trace.schema import Trace

SCRIPT = Path(sys.executable).parent / "paceline"

LATENCY = ("--latency", "50ms + 10% exp:300ms")

SMALL = ("--workers", "3", "--steps", "20", *LATENCY)
"""Options for a simulation that takes no time."""

SLOW = "45ms + exp:5ms + 5% exp:500ms; worker 7 x1.8"
"""The latency of eight workers of which the last is always slow."""


class Answer(NamedTuple):
    """The result of a call of the command line."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> object:
        return json.loads(self.out)

    @property
    def words(self) -> str:
        """Standard output in one line."""
        return " ".join(self.out.split())


Call = Callable[..., Answer]

Simulate = Callable[..., Trace]


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Call:
    """Return a function that calls the command line in a temporary folder."""
    monkeypatch.chdir(tmp_path)

    def call_it(*words: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["paceline", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        code = end.value.code or 0
        assert isinstance(code, int)
        return Answer(code, *capsys.readouterr())

    return call_it


def call_script(*words: str, **options: object) -> Answer:
    """Call the installed script in a subprocess."""
    done = subprocess.run([SCRIPT, *words], capture_output=True, text=True, check=False, **options)
    return Answer(done.returncode, done.stdout, done.stderr)


def one_line(answer: Answer, code: int) -> str:
    """Check that the answer is one line of error, and return it."""
    assert answer.code == code
    assert answer.out == ""
    assert re.fullmatch(r"paceline: [^\n]+\n", answer.err), answer.err
    assert "Traceback" not in answer.err
    return answer.err


def refuse_wrong_input(call: Call, folder: Path, wrong: tuple[str, int, str]) -> None:
    """Check that a wrong command gives one line that names the cause, and writes nothing.

    `wrong`: the command, its exit code, and what the line must contain.
    """
    before = sorted(folder.iterdir())
    words, code, named = wrong
    assert named in one_line(call(*split(words)), code)
    assert sorted(folder.iterdir()) == before
