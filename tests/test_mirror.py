# SPDX-License-Identifier: BSD-3-Clause
"""Every test file mirrors a module and carries its name, and every module has a test file.

`src/paceline/run/server/roster.py` is tested by `tests/run/server/test_roster.py`. More files about
the same module are named after their topic: `test_roster_<topic>.py`.
"""

from pathlib import Path

import paceline

SRC = Path(paceline.__file__).parent
TESTS = Path(__file__).parent

ABOUT_THE_PROJECT = {
    "test_doc_code.py",
    "test_docs.py",
    "test_docs_clusters.py",
    "test_docs_figures.py",
    "test_docs_lab.py",
    "test_docs_launchers.py",
    "test_docs_pilots.py",
    "test_docs_results.py",
    "test_docs_scale.py",
    "test_examples.py",
    "test_exports.py",
    "test_hosts.py",
    "test_layers.py",
    "test_mirror.py",
    "test_packaging.py",
    "test_scripts.py",
    "test_scripts_in_a_run.py",
    "test_size.py",
    "test_storm.py",
    "test_storm_mutants.py",
    "test_storm_world.py",
}
"""Tests of the project as a whole, which mirror no module."""


def modules(folder):
    """Return the names of the modules and packages in a folder of the source."""
    if not folder.is_dir():
        return set()
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    return files | {path.parent.name for path in folder.glob("*/__init__.py")}


def has_name_of(module, stem):
    """Return whether a test file with this stem carries the name of the module."""
    return stem == f"test_{module}" or stem.startswith(f"test_{module}_")


def test_every_test_file_carries_the_name_of_a_module():
    files = [path.relative_to(TESTS) for path in sorted(TESTS.rglob("test_*.py"))]
    strays = [
        str(file)
        for file in files
        if str(file) not in ABOUT_THE_PROJECT
        and not any(has_name_of(module, file.stem) for module in modules(SRC / file.parent))
    ]
    assert strays == []


def test_every_module_has_a_test_file_of_its_name():
    untested = []
    for path in sorted(SRC.rglob("*.py")):
        if path.stem in ("__init__", "__main__"):
            continue
        folder = path.relative_to(SRC).parent
        tests = (TESTS / folder).glob("test_*.py")
        if not any(has_name_of(path.stem, test.stem) for test in tests):
            untested.append(str(folder / path.stem))
    assert untested == []
