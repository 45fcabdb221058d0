# SPDX-License-Identifier: BSD-3-Clause
"""Packages of the extra `paceline[lab]`: loaded on use, with a clear error if one is missing."""

import subprocess
import sys

import pytest

from paceline.errors import SpecError
from paceline.lab import extras
from paceline.lab.plotting import new_figure

HINT = "install it with: pip install 'paceline[lab]'"

WITHOUT_THE_EXTRA = """
import sys
for name in ("matplotlib", "PIL", "scipy"):
    sys.modules[name] = None
"""


@pytest.mark.parametrize(
    ("module", "package"),
    [("matplotlib.figure", "matplotlib"), ("PIL.Image", "pillow"), ("scipy.optimize", "scipy")],
)
def test_missing_package_is_one_sentence_with_the_command(monkeypatch, module, package):
    monkeypatch.setitem(sys.modules, module.partition(".")[0], None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    message = f"the lab needs {package}, which is not installed; {HINT}"
    for check in (lambda: extras.load(module), extras.check_installed):
        with pytest.raises(SpecError) as caught:
            check()
        assert str(caught.value) == message


def test_installed_packages_are_loaded():
    extras.check_installed()
    assert extras.load("scipy.special").ndtr(0.0) == 0.5
    assert new_figure(3, 2).get_size_inches().tolist() == [3, 2]


def test_lab_imports_without_the_extra():
    program = f"{WITHOUT_THE_EXTRA}import paceline.lab, paceline.lab.experiments\n"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_command_without_the_extra_ends_with_one_sentence(tmp_path):
    program = (
        f"{WITHOUT_THE_EXTRA}from paceline.cli import main\n"
        "sys.argv = ['paceline', 'lab', 'run', 'stragglers', '--quick']\nmain()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2
    assert HINT in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
