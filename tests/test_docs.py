# SPDX-License-Identifier: BSD-3-Clause
"""What README.md and docs/*.md promise: their links lead somewhere, what they show works.

In fenced blocks every line that begins with `paceline`, or with that after a `$`, is run. Those of
one block share a folder, so that one may read what another has written, and simulations make few
updates. Add `# not run` to a line that cannot be run here. In a block that is opened with
"console checked" nothing is shortened, and each line that is shown must be in the real output, in
that order; a line of three dots stands for what is left out. Python with `>>>` is run as well.
"""

import doctest
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)[^)]*\)")
_ELSEWHERE = ("http://", "https://", "mailto:", "#")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    kind: str  # what stands after the fence
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def commands(self) -> list[str]:
        joined = self.text.replace("\\\n", " ")
        lines = (line.strip().removeprefix("$ ") for line in joined.splitlines())
        return [x for x in lines if x.startswith("paceline ") and "# not run" not in x]

    @property
    def shown(self) -> list[str]:
        """The output that the page shows; a box or a space more or less does not matter."""
        lines = (line for line in self.text.splitlines() if not line.startswith("$ "))
        return [_plain(line) for line in lines if line.strip() != "..."]


def _blocks() -> list[Block]:
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[2].strip(), found[3])
        for page in PAGES
        for text in [page.read_text()]
        for found in _FENCE.finditer(text)
    ]


def _plain(line: str) -> str:
    return " ".join(re.sub(r"[│┃|]", " ", line).split())


BLOCKS = _blocks()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_image_exists(page: Path) -> None:
    prose = _FENCE.sub("", page.read_text())
    links = [link for link in _LINK.findall(prose) if not link.startswith(_ELSEWHERE)]
    missing = [link for link in links if not (page.parent / link.partition("#")[0]).exists()]
    assert missing == []


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.commands], ids=str)
def test_every_command_that_is_shown_works(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checked = block.kind == "console checked"
    output: list[str] = []
    for command in block.commands:
        arguments = shlex.split(command, comments=True)[1:]
        if arguments[0] == "simulate" and not checked:
            arguments += ["--steps", "20"]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, f"{command}\n{result.output}{result.exception or ''}"
        output += map(_plain, result.output.splitlines())
    if checked:
        lines = iter(output)
        missing = [shown for shown in block.shown if shown not in lines]
        assert missing == [], "\n".join(output)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_that_is_shown_gives_what_is_shown(page: Path) -> None:
    """The blocks of a page follow each other, as if typed one after the other."""
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(verbose=False)
    names: dict[str, object] = {}
    failures: list[str] = []
    for block in (b for b in BLOCKS if b.page == page and b.kind == "python"):
        test = parser.get_doctest(block.text, names, str(block), str(page), block.line)
        runner.run(test, out=failures.append, clear_globs=False)
        names = test.globs
    assert not failures, "".join(failures)


def test_the_quick_start_of_the_readme_is_the_first_example():
    example = (ROOT / "examples" / "digits.py").read_text()
    code = example[example.index("import torch\n") :]
    assert code in [block.text for block in _blocks() if block.kind == "python"]
