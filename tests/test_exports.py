# SPDX-License-Identifier: BSD-3-Clause
"""What is public, how light it is to import, and what every source file starts with."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

SOURCE = Path(paceline.__file__).parent

PUBLIC = [
    "CheckpointError",
    "Cluster",
    "Fate",
    "InternalError",
    "PacelineError",
    "PeerLost",
    "Plan",
    "Policy",
    "ProtocolError",
    "Run",
    "RunSpec",
    "SpecError",
    "Trace",
    "TraceError",
    "__version__",
    "convergence",
    "join",
    "parse_policy",
    "plan",
    "read_trace",
    "simulate",
    "summarize",
    "write_trace",
]
"""Users rely on these names. A change to this list goes into CHANGELOG.md."""


def loaded_after(program: str, *modules: str) -> list[str]:
    """Run a program in a fresh interpreter; return which of the modules it has loaded."""
    tail = f"\nimport sys; print('loaded', [m for m in {modules!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program + tail], capture_output=True, text=True, check=True
    )
    found: list[str] = ast.literal_eval(done.stdout.splitlines()[-1].removeprefix("loaded "))
    return found


def test_public_names_are_these() -> None:
    assert paceline.__all__ == PUBLIC
    assert len(PUBLIC) <= 25


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_exists(name: str) -> None:
    assert getattr(paceline, name) is getattr(paceline, name)


def test_dir_lists_exactly_the_public_names() -> None:
    assert dir(paceline) == sorted(PUBLIC)


def test_other_names_raise_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        paceline.nonsense  # noqa: B018 - reading it is the test


def test_type_checkers_see_every_public_name() -> None:
    """Type checkers read the imports, not `__getattr__`."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {alias.asname or alias.name for node in imports for alias in node.names}
    assert set(PUBLIC) <= names


def test_importing_paceline_loads_no_dependency() -> None:
    heavy = ("numpy", "torch", "msgspec", "scipy", "matplotlib", "rich", "typer")
    assert loaded_after("import paceline", *heavy) == []


def test_loaded_after_sees_a_loaded_module() -> None:
    assert loaded_after("import paceline; paceline.simulate", "numpy", "torch") == ["numpy"]


def calls(*lines: str) -> str:
    """Return a program that calls the command line once per line."""
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


def test_help_loads_nothing_heavy() -> None:
    program = calls(
        "--help", "simulate --help", "plan --help", "trace --help", "trace check --help"
    )
    heavy = ("numpy", "torch", "scipy", "matplotlib", "msgspec")
    assert loaded_after(program, *heavy) == []


def test_simulate_and_plan_load_numpy_but_not_torch() -> None:
    program = calls("simulate --workers 2 --steps 5", "plan --workers 20")
    assert loaded_after(program, "torch", "numpy") == ["numpy"]


FILES = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES)
def test_source_file_starts_with_its_licence_and_a_docstring(file: str) -> None:
    text = (SOURCE / file).read_text()
    assert text.startswith("# SPDX-License-Identifier: BSD-3-Clause\n")
    assert ast.get_docstring(ast.parse(text))
