# SPDX-License-Identifier: BSD-3-Clause
"""The examples train in a run and alone, and are plain PyTorch apart from their `run` lines."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import pytest

from paceline.run.launch.forkserver import ForkServer
from paceline.run.launch.launcher import Launcher
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.watch.audit import audit

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Example:
    """What a script prints and logs."""

    result: str  # pattern of the one line that it prints at the end
    scalars: frozenset[str]  # logged within a few updates
    short: tuple[str, ...] = ("--epochs", "1")  # arguments that make it short when it runs alone


EXAMPLES = {
    "digits": Example(r"test accuracy [\d.]+%", frozenset({"loss", "accuracy"})),
    "chars": Example(r"[\d.]+ bits per character", frozenset({"loss"})),
    "gan": Example(r"energy distance [\d.]+ at first", frozenset({"d_loss", "g_loss"})),
    "cartpole": Example(r"mean return \d+ at first", frozenset({"mean_return"}), ("--steps", "2")),
    "logistic": Example(r"test accuracy [\d.]+%, loss [\d.]+, ", frozenset({"loss"})),
}

RUNS = [
    *((name, "sync", 2) for name in EXAMPLES),
    *((name, "backup:1", 3) for name in EXAMPLES),
    *((name, "async", 2) for name in ("digits", "gan")),
]

# All scripts run in one process, because importing torch takes longer than the rest, and each pass
# over a loader is cut to two batches.
ALONE = """
import itertools, json, runpy, sys
from torch.utils.data import DataLoader
whole = DataLoader.__iter__
DataLoader.__iter__ = lambda self: itertools.islice(whole(self), 2)
for path, *arguments in json.load(sys.stdin):
    print("script", path)
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
"""


def _path(name: str) -> Path:
    return ROOT / "examples" / f"{name}.py"


@pytest.fixture(scope="module")
def forkserver() -> Iterator[ForkServer]:
    """A fork server that has imported scikit-learn, which takes longer than a run."""
    with ForkServer(_path("digits")) as one:
        one.start()
        yield one


@pytest.fixture(scope="module")
def alone(forkserver: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each script prints alone, and (`plain-...`) without its `run` lines."""
    del forkserver  # it imports in the background
    folder = tmp_path_factory.mktemp("plain")
    scripts = []
    for name, example in EXAMPLES.items():
        plain = folder / f"plain-{name}.py"
        plain.write_text(_stripped(_path(name).read_text(encoding="utf-8")), encoding="utf-8")
        scripts += [(str(path), *example.short) for path in (_path(name), plain)]
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", ALONE],
        input=json.dumps(scripts),
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # more threads are slower here
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    parts = re.split(r"^script (.*)\n", ended.stdout, flags=re.MULTILINE)
    return {Path(path).stem: out for path, out in zip(parts[1::2], parts[2::2], strict=True)}


@pytest.mark.parametrize(("name", "policy", "workers"), RUNS)
def test_example_trains_in_a_run(
    name: str,
    policy: str,
    workers: int,
    forkserver: ForkServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    example = EXAMPLES[name]
    spec = RunSpec(workers=workers, steps=6)
    settings = Settings(spec=spec, policy=policy, script=str(_path(name)), restart=False)
    code = Launcher(settings, tmp_path, forkserver).run()
    printed = capsys.readouterr()
    assert code == 0, printed.err
    trace = read_trace(tmp_path / "trace.jsonl")
    audit(trace)
    updates = list(trace.updates())
    assert len(updates) == 6
    logged = [(name, value) for update in updates for name, value in update.scalars.items()]
    assert all(value is not None and isfinite(value) for _, value in logged)
    names = {name for name, _ in logged}
    # Only worker 0 measures the accuracy, and may be too slow to get it into one of six updates.
    sure = example.scalars - (set() if policy == "sync" else {"accuracy"})
    assert sure <= names <= example.scalars
    said = [line for line in printed.out.splitlines() if line.startswith("worker")]
    assert len([line for line in said if re.search(example.result, line)]) == 1
    assert all(line.startswith("worker 0 ") for line in said)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs_alone(name: str, alone: dict[str, str]) -> None:
    assert len(re.findall(EXAMPLES[name].result, alone[name])) == 1


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_without_its_run_lines_is_a_plain_script(name: str, alone: dict[str, str]) -> None:
    source = _path(name).read_text(encoding="utf-8")
    plain = _stripped(source)
    assert not _mentions_run(ast.parse(plain))
    for kept in ("zero_grad()", "backward()", "step()"):
        assert plain.count(kept) >= 1
    assert f"plain-{name}" in alone  # it ran to its end


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_says_how_to_run_it_and_what_it_prints(name: str) -> None:
    text = ast.get_docstring(ast.parse(_path(name).read_text(encoding="utf-8")))
    assert text is not None
    assert re.search(rf"^\$ paceline run .* examples/{name}\.py$", text, re.MULTILINE)
    assert re.search(rf"^worker 0  \| .*{EXAMPLES[name].result}", text, re.MULTILINE)


def test_every_example_is_tested() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)


class _Strip(ast.NodeTransformer):
    """Removes every statement that mentions the run, and everything nested in it."""

    def generic_visit(self, node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.stmt):
            has_body = isinstance(node, ast.For | ast.FunctionDef | ast.ClassDef)
            if _mentions_run(node) and not has_body:
                return None
        return super().generic_visit(node)


def _mentions_run(tree: ast.AST) -> bool:
    return any(
        (isinstance(node, ast.Name) and node.id in ("run", "paceline"))
        or (isinstance(node, ast.alias) and node.name == "paceline")
        for node in ast.walk(tree)
    )


def _stripped(source: str) -> str:
    return ast.unparse(_Strip().visit(ast.parse(source)))
