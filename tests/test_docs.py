# SPDX-License-Identifier: BSD-3-Clause
"""The documentation is true: links work, commands work, and shown output is real output.

Every line in a fenced block that starts with `paceline`, or with `$ paceline`, is run. The commands
of one block share a folder, so a command can read what an earlier one wrote. Simulations are cut to
20 updates, except in a block that opens with "console checked": there, each shown line must be in
the real output, in the same order, and a line of three dots stands for lines that are left out. Add
`# not run` to a command that can't run here. A block that opens with "sh on host 0" is run by
test_docs_clusters.py. Python with `>>>` runs as a doctest.
"""

import doctest
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec import structs
from typer.testing import CliRunner

from paceline import Cluster, RunSpec, simulate
from paceline.cli import app
from paceline.cli.end_of_run import report_lines
from paceline.trace.schema import Gradient, Update

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]

_FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)[^)]*\)")
_EXTERNAL = ("http://", "https://", "mailto:")


@dataclass(frozen=True)
class Block:
    """A fenced code block of a page."""

    page: Path
    line: int
    kind: str  # the words after the opening fence
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def commands(self) -> list[str]:
        if " on " in self.kind:
            return []  # test_docs_clusters.py runs these on several hosts
        joined = self.text.replace("\\\n", " ")
        lines = (line.strip().removeprefix("$ ") for line in joined.splitlines())
        return [x for x in lines if x.startswith("paceline ") and "# not run" not in x]

    @property
    def shown(self) -> list[str]:
        """Return the output that the page shows, ignoring table borders and extra spaces."""
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


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ +(.*)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _is_broken(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return not target.exists() or (anchor != "" and anchor not in _anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_images_and_anchors_exist(page: Path) -> None:
    prose = _FENCE.sub("", page.read_text())
    links = [link for link in _LINK.findall(prose) if not link.startswith(_EXTERNAL)]
    assert [link for link in links if _is_broken(page, link)] == []


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_source_files_that_are_named_exist(page: Path) -> None:
    """A name is relative to the repository, to the package, or to its `run` package.

    A file that the page tells its reader to write needn't exist.
    """
    folders = [ROOT, ROOT / "src" / "paceline", ROOT / "src" / "paceline" / "run"]
    named = re.findall(r"(?<!Write )`(\w+(?:/\w+)+\.py)`", _FENCE.sub("", page.read_text()))
    assert [name for name in named if not any((each / name).exists() for each in folders)] == []


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.commands], ids=str)
def test_shown_commands_work_and_print_what_is_shown(
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


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_shown_python_prints_what_is_shown(page: Path) -> None:
    """The blocks of a page run one after the other, in one namespace."""
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(verbose=False)
    names: dict[str, object] = {}
    failures: list[str] = []
    for block in (b for b in BLOCKS if b.page == page and b.kind == "python"):
        test = parser.get_doctest(block.text, names, str(block), str(page), block.line)
        runner.run(test, out=failures.append, clear_globs=False)
        names = test.globs
    assert not failures, "".join(failures)


def _quickstart() -> list[str]:
    """Return the lines of the README's diff."""
    [diff] = [b.text for b in BLOCKS if b.page.name == "README.md" and b.kind == "diff"]
    return diff.splitlines()


def test_quickstart_adds_exactly_three_lines_to_a_plain_script() -> None:
    changed = [line for line in _quickstart() if line.startswith(("+", "-"))]
    assert [line.split()[0] for line in changed] == ["+import", "+run", "+model,"]


def test_quickstart_is_the_first_example() -> None:
    """Every line of the diff is in examples/digits.py, in the same order."""
    example = iter((ROOT / "examples" / "digits.py").read_text().splitlines())
    lines = [line[1:] for line in _quickstart() if line.strip() not in ("", "...")]
    assert [line for line in lines if line not in example] == []


def _masked(text: str) -> str:
    """Replace numbers with their units by "#", and line breaks by spaces."""
    return " ".join(re.sub(r"\d[\d.,]*( (ms|s|min|%)(?!\w))?", "#", text).split())


def test_report_in_the_readme_has_the_current_wording() -> None:
    """A simulation of the same command gives the same sentences with other numbers."""
    [block] = [b for b in BLOCKS if b.page.name == "README.md" and "$ paceline run" in b.text]
    command, *output = block.text.splitlines()
    words = shlex.split(command, comments=True)
    given = {name: words[words.index(name) + 1] for name in words if name.startswith("--")}
    spec = RunSpec(workers=int(given["--workers"]), steps=int(given["--steps"]))
    trace = simulate(given["--policy"], Cluster.parse(given["--latency"]), spec)
    # A real run also records gradient norms.
    norms = {Gradient: 1.7, Update: 1.0}
    trace.records[:] = [
        structs.replace(r, sq_norm=norms[type(r)]) if type(r) in norms else r for r in trace.records
    ]
    report = _masked("\n".join(report_lines(trace, Path("runs/digits-1/trace.jsonl"))))
    prose = "\n".join("..." if "  " in line else line for line in output)  # tables have two spaces
    sentences = [_masked(part) for part in prose.split("...") if part.strip()]
    assert len(sentences) >= 2
    assert [sentence for sentence in sentences if sentence not in report] == []


def test_map_of_the_code_names_every_module() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| `([\w/]+)/` \| (.*) \|$", text, re.MULTILINE)
    missing = []
    for package, files in rows:
        folder = ROOT / "src" / "paceline" / ("" if package == "paceline" else package)
        names = set(re.findall(r"`(\w+)/?`", files))
        if package != "lab":  # its experiments are many
            modules = {path.stem for path in folder.iterdir() if path.suffix == ".py"}
            modules |= names & {path.name for path in folder.iterdir() if path.is_dir()}
            modules -= {"__init__"} - names
            missing += [f"{package}/{name}" for name in sorted(modules - names)]
            missing += [f"no {package}/{name}" for name in sorted(names - modules)]
    assert len(rows) == 14
    assert missing == []
