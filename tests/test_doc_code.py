# SPDX-License-Identifier: BSD-3-Clause
"""The code in the README and in docs/ runs, and its outputs are what is shown."""

import re
import shlex
from pathlib import Path

import pytest

from paceline import Cluster, RunSpec
from paceline.cli import app, main
from paceline.core.decider import Decider
from paceline.sim.shell import Shell

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page, language):
    text = (ROOT / page).read_text()
    return [body for kind, body in BLOCK.findall(text) if kind == language]


@pytest.mark.parametrize("page", ["README.md", "docs/design.md", "docs/runtime.md"])
def test_every_python_block_runs(page):
    names = {"__name__": "page"}
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), names)


def test_the_rule_of_the_design_page_keeps_every_invariant_when_all_goes_wrong():
    names = {"__name__": "page"}
    exec(compile(blocks("docs/design.md", "python")[0], "docs/design.md", "exec"), names)
    cluster = Cluster.parse("exp:20ms,shift=50ms", faults="kill any every 500ms for 300ms")
    decider = Decider(names["Growing"](20), RunSpec(workers=4, steps=100))
    handle = decider.handle

    def checked(event):
        actions = handle(event)
        decider.check()
        return actions

    decider.handle = checked
    records = Shell(decider, cluster, lambda update: None).run()

    assert records[-1].version == 100


def shown(block):
    """The commands of a console block, each with the output that is shown below it."""
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
def test_a_command_of_the_readme_prints_what_the_readme_shows(command, output, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", shlex.split(command))

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code in (0, None)
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed == output


def test_the_readme_has_commands_and_all_are_known():
    verbs = {c.split()[1] for c, _ in CONSOLE if c.startswith("paceline ")}

    assert verbs
    assert verbs <= {command.callback.__name__ for command in app.registered_commands}
