# SPDX-License-Identifier: BSD-3-Clause
"""The names for Ray programs are in a module of their own, which needs Ray."""

import subprocess
import sys

import paceline.ray

WITHOUT_RAY = """
import sys
sys.modules["ray"] = None
try:
    import paceline.ray
except ModuleNotFoundError as error:
    print(error)
"""


def test_names_are_there():
    assert sorted(paceline.ray.__all__) == ["Placement", "Trained", "run"]
    assert all(hasattr(paceline.ray, name) for name in paceline.ray.__all__)


def test_machine_without_ray_gets_the_line_that_installs_it():
    words = [sys.executable, "-c", WITHOUT_RAY]
    ran = subprocess.run(words, capture_output=True, text=True, check=True)
    assert ran.stdout == (
        "paceline.ray needs Ray, which is not installed; "
        "install it with: pip install 'paceline[ray]'\n"
    )


def test_package_itself_does_not_import_ray():
    source = "import sys, paceline, paceline.cli; print('ray' in sys.modules)"
    words = [sys.executable, "-c", source]
    ran = subprocess.run(words, capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
