# SPDX-License-Identifier: BSD-3-Clause
"""The output of processes, as it is shown and as it is saved."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from selectors import DefaultSelector
from typing import TextIO

import pytest

from paceline.run.launch.launcher import Launcher
from paceline.run.launch.output import BAR_S, LINE_BYTES_MAX, Output
from paceline.run.settings import Settings
from paceline.spec import RunSpec

LATER = BAR_S / 2


class Shown:
    """A screen that records its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str, to: TextIO) -> None:
        """Record the line without the name of its process."""
        self.lines.append(text.removeprefix("worker 0  | "))

    def tick(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Printing:
    """A process that prints."""

    def __init__(self, folder: Path) -> None:
        self.screen = Shown()
        self.selector = DefaultSelector()
        self.output = Output(self.selector, self.screen, folder / "output")
        self._ends = self.output.open_pipes("worker 0")
        self._stream = next(key.data for key in self.selector.get_map().values() if key.data.to)
        self._log = folder / "output" / "worker-0.log"

    def __call__(self, data: bytes) -> list[str]:
        """Print this, and return what is shown immediately."""
        os.write(self._ends.out, data)
        self.output.read(self._stream)
        return self._shown()

    def be_quiet_on_stderr(self) -> None:
        """Print to standard error from now on, as a quiet process."""
        self._stream.to, self._stream.is_quiet = sys.stderr, True

    def at(self, now: float) -> list[str]:
        """Return what is shown at this time, without new output."""
        self.output.tick(now)
        return self._shown()

    def end(self) -> list[str]:
        """Return what is shown when the process exits."""
        for fd in (self._ends.out, self._ends.err, self._ends.failure):
            os.close(fd)
        self.output.drain("worker 0")
        return self._shown()

    def saved(self) -> list[str]:
        """Return the lines of its file."""
        return self._log.read_text().split("\n")[:-1]

    def _shown(self) -> list[str]:
        lines, self.screen.lines = self.screen.lines, []
        return lines


@pytest.fixture
def printing(tmp_path: Path) -> Iterator[Callable[[], Printing]]:
    """Start a process that prints, with its own folder."""
    made: list[Printing] = []

    def begin() -> Printing:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Printing(folder))
        return made[-1]

    yield begin
    for one in made:
        one.output.close()
        one.selector.close()


def test_progress_bar_is_shown_sometimes_and_saved_completely(printing):
    out = printing()
    assert out(b"\r 1 %") == out(b"\r 2 %") == out(b"\r 3 %") == []
    assert out.at(LATER) == [" 3 %"]
    assert out(b"\r 4 %") == out(b"\r 5 %") == []
    assert out.at(2 * LATER) == []
    assert out.at(3 * LATER) == [" 5 %"]
    assert out.at(9 * LATER) == []  # it hasn't changed
    assert out(b"\r 6 %\nnext\n") == [" 6 %", "next"]
    assert out.at(9 * LATER) == []
    assert out.saved() == [" 1 %", " 2 %", " 3 %", " 4 %", " 5 %", " 6 %", "next"]


def test_complete_bar_is_shown_once(printing):
    out = printing()
    out(b"\r100 %")
    assert out.at(0.0) == ["100 %"]
    assert out(b"\n") == []
    assert out(b"100 %\n") == ["100 %"]  # a new line
    assert out.saved() == ["100 %", "100 %"]


def test_bar_with_trailing_carriage_returns_is_shown(printing):
    out = printing()
    assert out(b" 1 %\r") == out(b" 2 %\r") == []
    assert out.at(0.0) == [" 2 %"]
    assert out(b" 3 %\r") == []
    assert out.end() == [" 3 %"]
    assert out.saved() == [" 1 %", " 2 %", " 3 %"]


def test_unfinished_line_is_not_a_bar(printing):
    out = printing()
    assert out(b"loading") == out.at(BAR_S) == []
    assert out(b" ... done\n") == ["loading ... done"]
    assert out(b"the last one") == []
    assert out.end() == ["the last one"]


def test_erased_bar_leaves_no_empty_line(printing):
    out = printing()
    out(b"\r100 %")
    assert out(b"\r     \r") == []
    assert out(b"done\n") == ["done"]
    assert out.saved() == ["100 %", "done"]


def test_nested_bars_are_shown_sometimes(printing):
    """For nested loops tqdm writes: down, the bar, and up again."""
    out = printing()
    assert out(b"\repoch 0/2\n\rstep 0/9\x1b[A") == ["epoch 0/2"]
    for step in range(1, 9):
        assert out(b"\n\rstep %d/9\x1b[A" % step) == []
    assert out.at(0.0) == ["step 8/9"]
    assert out(b"\repoch 1/2") == []
    assert out(b"\n\rstep 0/9\x1b[A") == ["epoch 1/2"]
    assert out.saved() == ["epoch 0/2", *(f"step {step}/9" for step in range(9)), "epoch 1/2"]


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (b"\r 1 %\r 2 %\r 3 %\n", []),
        (b"\r100 %\n", []),
        (b" 1 %\r 2 %\r 3 %\r\n", []),
        (b"\r 1 %\r 2 %\na warning\n", ["a warning"]),
        (b"\r 1 %\r 2 %\r     \ra warning\n\r 3 %\n", ["a warning"]),
        (b"\r 1 %\r     \r\na warning\n", ["a warning"]),
    ],
)
@pytest.mark.parametrize("pieces", [1, 100])
def test_errors_of_a_quiet_process_are_shown_but_not_its_bars(printing, printed, shown, pieces):
    quiet = printing()
    quiet.be_quiet_on_stderr()
    size = max(1, len(printed) // pieces)
    lines = []
    for start in range(0, len(printed), size):
        lines += quiet(printed[start : start + size]) + quiet.at(start * BAR_S)
    assert [line for line in lines if line] == shown
    assert quiet.saved()


def test_lines_of_a_quiet_process_may_end_as_on_windows(printing):
    quiet = printing()
    quiet.be_quiet_on_stderr()
    assert quiet(b"a warning\r\nof two lines\r\n") == ["a warning", "of two lines"]


@pytest.mark.parametrize("end", [b"", b"\n", b"\r", b"\r\n"])
def test_result_does_not_depend_on_how_output_is_split(printing, end):
    text = b"a\r\n\n\rb\rc\nd\r\re\x1b[A\n\rf\n  \r\ng\rh" + end
    whole, pieces = printing(), printing()
    shown = whole(text) + whole.end()
    assert shown == ["a", "", "c", "f", "", "h"]
    shown_of_pieces = [line for at in range(len(text)) for line in pieces(text[at : at + 1])]
    assert shown_of_pieces + pieces.end() == shown
    assert whole.saved() == pieces.saved() == ["a", "", "b", "c", "d", "e", "f", "", "g", "h"]


def test_output_without_line_breaks_is_passed_on_in_linear_time(printing):
    """It arrives in many pieces; looking at the whole line with each would take minutes."""
    process = printing()
    pieces = 1 << 15
    shown = [line for _ in range(pieces) for line in process(b"x" * 1024)] + process.end()
    assert "".join(shown) == "x" * 1024 * pieces
    assert max(map(len, shown)) <= LINE_BYTES_MAX + 1024
    assert process.saved() == shown


def test_bar_without_line_breaks_is_still_a_bar(printing):
    process = printing()
    assert process(b"\r10%") == []
    assert process(b" done") == []
    assert process.at(LATER) == ["10% done"]
    assert process.end() == []


def test_launcher_shows_bars(script, tmp_path, forkserver):
    """The worker completes the bar once it was shown."""
    source = """
import os, time
model = nn.Linear(1, 1)
run = paceline.join()
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
optimizer.step()
os.write(1, b"\\r 50 %")
while not (OUT / "seen").exists():
    time.sleep(0.01)
os.write(1, b"\\r100 %\\n")
"""

    class Watching(Shown):
        def line(self, text: str, to: TextIO) -> None:
            super().line(text, to)
            if " 50 %" in self.lines:
                (tmp_path / "seen").touch()

    screen = Watching()
    settings = Settings(
        spec=RunSpec(workers=1, steps=1), script=str(script(source)), arguments=(str(tmp_path),)
    )
    (tmp_path / "run").mkdir()
    assert Launcher(settings, tmp_path / "run", forkserver).run(screen) == 0
    bar = [line for line in screen.lines if line.endswith("%")]
    assert bar == [" 50 %", "100 %"]
