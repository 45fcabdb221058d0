# SPDX-License-Identifier: BSD-3-Clause
"""Scripts in the styles of well-known examples need only three statements, and alone nothing else.

`tests/scripts` has each of them twice: `plain.py` as its author wrote it, and `paced.py` with
Paceline. Alone, with plain `python`, both give the same results bit for bit.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from plain_python import PlainPython
from script_facts import MEANT, SCRIPTS, facts_in, measured_twice

PAGE = Path(__file__).parents[1] / "docs" / "migrating.md"
DIFFS = re.findall(r"^```diff\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)

every_script = pytest.mark.parametrize("name", MEANT)


@pytest.fixture(scope="session")
def python() -> Iterator[PlainPython]:
    with PlainPython() as plain:
        yield plain


def _kind(node: ast.AST) -> str | None:
    """Return which of our three statements this is; None if it is none of them."""
    if not isinstance(node, ast.Import | ast.Assign):
        return None
    text = ast.unparse(node)
    if text == "import paceline":
        return "import"
    if text == "run = paceline.join()":
        return "join"
    if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("run.prepare("):
        return "prepare"
    return None


def _code(lines: list[str]) -> list[str]:
    """Return the lines that aren't blank; formatters put blank lines around imports."""
    return [line for line in lines if line.strip()]


@every_script
def test_script_differs_from_the_plain_one_by_three_statements(name: str) -> None:
    plain = (SCRIPTS / name / "plain.py").read_text().splitlines()
    paced = (SCRIPTS / name / "paced.py").read_text().splitlines()
    added = [node for node in ast.walk(ast.parse("\n".join(paced))) if _kind(node)]
    ours = {line for node in added for line in range(node.lineno, node.end_lineno + 1)}
    others = [line for number, line in enumerate(paced, 1) if number not in ours]

    assert sorted(map(_kind, added)) == ["import", "join", "prepare"]
    assert _code(others) == _code(plain)
    assert not any("paceline" in line or "run." in line for line in plain)


@every_script
def test_prepared_objects_keep_their_names(name: str) -> None:
    tree = ast.parse((SCRIPTS / name / "paced.py").read_text())
    [prepare] = [node for node in ast.walk(tree) if _kind(node) == "prepare"]
    [target] = prepare.targets
    assert ast.unparse(prepare.value) == f"run.prepare{ast.unparse(target)}"


@every_script
def test_script_alone_equals_the_plain_one_bit_for_bit(
    name: str, python: PlainPython, tmp_path: Path
) -> None:
    files = {}
    for kind in ("plain", "paced"):
        folder = tmp_path / kind
        folder.mkdir()
        ended = python.run(SCRIPTS / name / f"{kind}.py", folder)
        assert ended.code == 0, ended.err
        files[kind] = {path.name: path.read_bytes() for path in folder.iterdir()}

    facts = facts_in(ended.out.splitlines())
    assert facts is not None
    MEANT[name](facts)
    quality = measured_twice(facts)
    if quality is not None:
        MEANT[name]({**facts, "before": facts[quality]})  # others trained while this worker joined
        with pytest.raises(AssertionError):  # an untrained model isn't good enough
            MEANT[name]({**facts, quality: facts["before"]})
    assert facts.get("loss_of_best") == facts.get("best_loss")
    assert files["paced"].keys() == files["plain"].keys()
    assert [each for each in files["plain"] if files["paced"][each] != files["plain"][each]] == []
    assert len(files["plain"]) >= 3  # its output, and at least one file with weights


def test_every_script_is_tested() -> None:
    assert {path.parent.name for path in SCRIPTS.glob("*/*.py")} == set(MEANT)


def _side(diff: str, sign: str) -> str:
    """Return the lines of the old ("-") or the new ("+") side."""
    return "\n".join(line[1:] for line in diff.splitlines() if line[:1] in ("", " ", sign))


def test_page_on_migrating_shows_three_migrations() -> None:
    assert len(DIFFS) == 3
    plain, ddp, accelerate = DIFFS
    assert [line[:1] for line in plain.splitlines()].count("-") == 0
    assert "DistributedDataParallel" in ddp
    assert "Accelerator" in accelerate


@pytest.mark.parametrize("number", range(len(DIFFS)))
def test_migrated_script_runs(number: int, python: PlainPython, tmp_path: Path) -> None:
    compile(_side(DIFFS[number], "-"), PAGE.name, "exec")
    script = tmp_path / "script.py"
    script.write_text(_side(DIFFS[number], "+"))
    ended = python.run(script, tmp_path)
    assert ended.code == 0, ended.err
    assert (tmp_path / "model.pt").exists()
