# SPDX-License-Identifier: BSD-3-Clause
"""What is public, that importing it is light, and what every file of the source begins with."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

SOURCE = Path(paceline.__file__).parent

PUBLIC = [
    "Async",
    "Backup",
    "BatchSync",
    "Cluster",
    "Deadline",
    "Delayed",
    "InternalError",
    "PacelineError",
    "PeerLost",
    "Policy",
    "ProtocolError",
    "RunSpec",
    "SoftSync",
    "SpecError",
    "Ssp",
    "Sync",
    "TraceError",
    "convergence",
    "join",
    "parse_policy",
    "plan",
    "read_trace",
    "simulate",
    "summarize",
    "write_trace",
]
"""Whoever changes this list changes what users may rely on: it belongs in the change log."""


def loaded_after(program: str, *modules: str) -> list[str]:
    """Which of the modules a fresh interpreter has loaded after the program."""
    tail = f"\nimport sys; print('loaded', [m for m in {modules!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program + tail], capture_output=True, text=True, check=True
    )
    found: list[str] = ast.literal_eval(done.stdout.splitlines()[-1].removeprefix("loaded "))
    return found


def test_the_public_names_are_these() -> None:
    assert paceline.__all__ == PUBLIC
    assert len(PUBLIC) <= 25


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_there(name: str) -> None:
    assert getattr(paceline, name) is getattr(paceline, name)


def test_the_public_names_are_all_that_is_listed() -> None:
    assert dir(paceline) == sorted(PUBLIC)


def test_a_name_that_is_not_public_is_not_there() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        paceline.nonsense  # noqa: B018 - reading it is the test


def test_type_checkers_see_every_public_name() -> None:
    """They read the imports, not `__getattr__`."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in imports for alias in node.names}
    assert set(PUBLIC) <= names


def test_importing_paceline_imports_nothing_heavy() -> None:
    heavy = ("numpy", "torch", "msgspec", "scipy", "matplotlib", "rich", "typer")
    assert loaded_after("import paceline", *heavy) == []


def test_what_counts_as_heavy_would_be_seen() -> None:
    assert loaded_after("import paceline; paceline.simulate", "numpy", "torch") == ["numpy"]


def calls(*lines: str) -> str:
    """A program that calls the command line with the words of each line."""
    return (
        "import sys\n"
        "from paceline.cli import main\n"
        f"for line in {lines!r}:\n"
        "    sys.argv = ['paceline', *line.split()]\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as end:\n"
        "        assert not end.code\n"
    )


def test_help_imports_nothing_heavy() -> None:
    program = calls(
        "--help", "simulate --help", "plan --help", "trace --help", "trace check --help"
    )
    heavy = ("numpy", "torch", "scipy", "matplotlib", "msgspec")
    assert loaded_after(program, *heavy) == []


def test_simulating_and_planning_need_no_torch() -> None:
    program = calls("simulate --workers 2 --steps 5", "plan --workers 20")
    assert loaded_after(program, "torch", "numpy") == ["numpy"]


FILES = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_the_source_begins_with_its_licence_and_what_it_is(file: str) -> None:
    text = (SOURCE / file).read_text()
    assert text.startswith("# SPDX-License-Identifier: BSD-3-Clause\n")
    assert ast.get_docstring(ast.parse(text))
