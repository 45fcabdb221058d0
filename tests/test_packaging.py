# SPDX-License-Identifier: BSD-3-Clause
"""The wheel works in an empty environment, outside the checkout, with the base dependencies alone.

The environment has the new wheel and links to exactly the packages that the wheel requires. So a
dependency that pyproject.toml doesn't declare, or declares only in an extra, is missing there.
"""

import os
import subprocess
import sys
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import paceline

ROOT = Path(__file__).parents[1]
EXTRA_PACKAGES = ("matplotlib", "PIL", "scipy", "sklearn")

SCRIPT = """
import torch
import paceline

data = torch.utils.data.TensorDataset(torch.randn(64, 4))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = paceline.join()
model, optimizer, loader = run.prepare(model, optimizer, loader)
while not run.finished:
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
if run.is_first:
    print("paceline is", paceline.__file__)
"""


class Installed:
    """An environment that has the wheel; commands run in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "env" / "bin"
        self.elsewhere = folder / "elsewhere"
        self.elsewhere.mkdir()

    def run(self, program: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        return subprocess.run(
            [self.bin / program, *words],
            cwd=self.elsewhere,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


def requirements(wheel_requires: list[str]) -> dict[str, Distribution]:
    """Return what these requirements need, directly and indirectly, without any extra."""
    found: dict[str, Distribution] = {}
    waiting = list(wheel_requires)
    while waiting:
        requirement = Requirement(waiting.pop())
        name = requirement.name.lower()
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found[name] = distribution(name)
        waiting += found[name].requires or []
    return found


def link(found: Distribution, site_packages: Path) -> None:
    """Make everything that a distribution has installed importable from `site_packages`."""
    for top in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
        target = Path(str(found.locate_file(top)))
        if target.exists() and not (site_packages / top).exists():
            (site_packages / top).symlink_to(target)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Build a wheel and install it into an empty environment."""
    folder = tmp_path_factory.mktemp("packaging")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(build, check=True, capture_output=True, timeout=60)
    [wheel] = folder.glob("*.whl")
    venv.create(folder / "env")
    python = folder / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, wheel], check=True, capture_output=True, timeout=60)
    [site_packages] = (folder / "env" / "lib").glob("python*/site-packages")
    [metadata] = site_packages.glob("paceline-*.dist-info")
    for each in requirements(Distribution.at(metadata).requires or []).values():
        link(each, site_packages)
    return Installed(folder)


def test_wheel_has_the_package_its_types_and_its_version(installed: Installed) -> None:
    program = (
        "import paceline, pathlib; folder = pathlib.Path(paceline.__file__).parent; "
        "print(folder, paceline.__version__, (folder / 'py.typed').exists())"
    )
    done = installed.run("python", "-c", program)
    folder, version, is_typed = done.stdout.split()
    assert Path(folder).is_relative_to(installed.bin.parent)
    assert (version, is_typed) == (paceline.__version__, "True")


def test_environment_has_no_package_of_an_extra(installed: Installed) -> None:
    program = f"import importlib.util; print([*map(importlib.util.find_spec, {EXTRA_PACKAGES!r})])"
    assert installed.run("python", "-c", program).stdout == "[None, None, None, None]\n"


def test_paceline_and_python_m_paceline_are_the_same(installed: Installed) -> None:
    by_name = installed.run("paceline", "--version")
    by_module = installed.run("python", "-m", "paceline", "--version")
    assert by_name.stdout == by_module.stdout == f"{paceline.__version__}\n"


def test_simulate_needs_no_extra(installed: Installed) -> None:
    done = installed.run("paceline", "simulate", "-w", "3", "--steps", "5", "-p", "backup:1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "backup:1" in done.stdout


def test_plan_needs_no_extra(installed: Installed) -> None:
    done = installed.run("python", "-m", "paceline", "plan", "-w", "4")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Use " in done.stdout


def test_lab_list_needs_no_extra(installed: Installed) -> None:
    done = installed.run("paceline", "lab", "list")
    assert (done.returncode, done.stderr) == (0, "")
    assert "inception" in done.stdout


def test_training_needs_no_extra(installed: Installed) -> None:
    (installed.elsewhere / "train.py").write_text(SCRIPT)
    done = installed.run("paceline", "run", "-w", "2", "-p", "backup:1", "--steps", "5", "train.py")
    assert done.returncode == 0, done.stderr
    assert f"paceline is {installed.bin.parent}" in done.stdout
    assert (installed.elsewhere / "runs" / "train-1" / "weights.pt").exists()


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        ("simulate -p sync --plot rules.png", "plot"),
        ("plan -w 4 --plot plan.png", "plot"),
        ("compare -w 2 train.py", "plot"),
        ("lab run staleness --quick", "lab"),
        ("lab figures staleness", "lab"),
    ],
)
def test_missing_extra_is_one_line_with_the_command_that_installs_it(
    words: str, extra: str, installed: Installed
) -> None:
    (installed.elsewhere / "train.py").write_text(SCRIPT)
    done = installed.run("paceline", *words.split())
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("paceline: ")
    assert line.endswith(f"install it with: pip install 'paceline[{extra}]'")
