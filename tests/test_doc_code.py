# SPDX-License-Identifier: BSD-3-Clause
"""The code in the documentation runs, and the README's commands print what it shows."""

import re
import shlex
from pathlib import Path
from textwrap import dedent

import pytest

from paceline import Cluster, RunSpec
from paceline.cli import app, main
from paceline.core.decider import Decider
from paceline.sim.shell import Shell

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def blocks(page, language):
    text = (ROOT / page).read_text()
    return [dedent(body) for _, kind, body in BLOCK.findall(text) if kind == language]


def has_plain_python(page):
    return any(">>>" not in block for block in blocks(page, "python"))


PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
# tests/lab/test_lab_page.py runs the code of docs/lab.md, which needs a data set.
PYTHON_PAGES = sorted(page for page in PAGES if has_plain_python(page) and page != "docs/lab.md")


def test_python_pages_are_found():
    assert {"CONTRIBUTING.md", "docs/design.md", "docs/runtime.md"} <= set(PYTHON_PAGES)


@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_every_python_block_runs(page):
    names = {"__name__": "page"}
    for block in blocks(page, "python"):
        if ">>>" not in block:  # test_docs.py runs those
            exec(compile(block, page, "exec"), names)


@pytest.mark.parametrize(
    ("page", "rule", "value"),
    [("docs/design.md", "Growing", 20), ("CONTRIBUTING.md", "Quorum", 0.75)],
)
def test_example_rule_keeps_every_invariant_while_workers_die(page, rule, value):
    names = {"__name__": "page"}
    exec(compile(blocks(page, "python")[0], page, "exec"), names)
    cluster = Cluster.parse("exp:20ms,shift=50ms", faults="kill any every 500ms for 300ms")
    decider = Decider(names[rule](value), RunSpec(workers=4, steps=100))
    handle = decider.handle

    def checked(event):
        actions = handle(event)
        decider.check()
        return actions

    decider.handle = checked
    records = Shell(decider, cluster, lambda update: None).run()

    assert records[-1].version == 100


def shown(block):
    """Return the commands of a console block, each with the output shown below it."""
    commands = []
    for line in block.splitlines():
        if line.startswith("$ "):
            commands.append((line.removeprefix("$ "), []))
        else:
            commands[-1][1].append(line.rstrip())
    return commands


CONSOLE = [each for block in blocks("README.md", "console") for each in shown(block)]


@pytest.mark.parametrize(
    ("command", "output"), [c for c in CONSOLE if c[0].startswith("paceline ")]
)
def test_readme_command_prints_what_the_readme_shows(command, output, capsys, monkeypatch):
    """A line of three dots in the README stands for any number of lines."""
    monkeypatch.setattr("sys.argv", shlex.split(command))

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code in (0, None)
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    parts = re.split(r"^\.\.\.$", "\n".join(output), flags=re.MULTILINE)
    assert re.fullmatch(".*".join(map(re.escape, parts)), printed, re.DOTALL)


def test_readme_has_commands_and_all_are_known():
    verbs = {c.split()[1] for c, _ in CONSOLE if c.startswith("paceline ")}

    assert verbs
    assert verbs <= {command.callback.__name__ for command in app.registered_commands}
