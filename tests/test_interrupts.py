# SPDX-License-Identifier: BSD-3-Clause
"""Ctrl-C never prints a traceback, from the first import of the command line to its exit.

Each test interrupts a process at an exact moment: it sends the signal to itself.
"""

import subprocess
import sys

import pytest

PROGRAM = """
import _signal, os, sys

_signal.signal(2, _signal.default_int_handler)  # whatever the process of the tests does with it

def interrupt(*_):
    os.kill(os.getpid(), 2)

BEFORE
from paceline.__main__ import main
sys.argv[0] = "paceline"
sys.exit(main())
"""

AT_IMPORT = """
sys.addaudithook(lambda event, found: event == "import" and found[0] == NAME and interrupt())
"""

AT_DELETION = """
class Deleted:
    def __del__(self):
        interrupt()

sys.addaudithook(lambda event, found: event == "import" and found[0] == NAME and Deleted())
"""

AT_CALL = """
def profile(frame, event, _):
    if event == "call" and frame.f_code.co_name == NAME:
        sys.setprofile(None)
        interrupt()

sys.setprofile(profile)
"""

AT_EXIT = """
import atexit
atexit.register(interrupt)
"""

COMMAND = ["simulate", "--workers", "2", "--steps", "2", "--policy", "sync"]


def run(before: str, name: str = "") -> subprocess.CompletedProcess[str]:
    program = PROGRAM.replace("BEFORE", before).replace("NAME", repr(name))
    command = [sys.executable, "-c", program, *COMMAND]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def assert_quiet(done: subprocess.CompletedProcess[str]) -> None:
    assert done.stderr == ""
    assert done.returncode == 130


def test_command_that_is_not_interrupted_succeeds() -> None:
    done = run("")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "name",
    [
        "paceline.interrupts",
        "typer",
        "paceline.cli.verb_options",
        "paceline.cli.printing",
        "numpy",
        "numpy._core._multiarray_umath",
        "paceline.watch.summary",
    ],
)
def test_interrupt_while_a_module_is_imported_is_quiet(name: str) -> None:
    assert_quiet(run(AT_IMPORT, name))


def test_interrupt_where_python_ignores_exceptions_is_quiet() -> None:
    """Python prints those that are raised while an object is deleted."""
    assert_quiet(run(AT_DELETION, "typer"))


@pytest.mark.parametrize(
    "name", ["solve_typer_info_defaults", "parse_args", "simulate_all", "print_table"]
)
def test_interrupt_of_a_function_is_quiet(name: str) -> None:
    assert_quiet(run(AT_CALL, name))


def test_interrupt_while_python_exits_is_quiet() -> None:
    done = run(AT_EXIT)
    assert "sync" in done.stdout
    assert_quiet(done)


def test_interrupt_is_ignored_if_it_was_before() -> None:
    """As it is for a job in the background of a shell."""
    done = run("_signal.signal(2, _signal.SIG_IGN)" + AT_IMPORT, "typer")
    assert (done.returncode, done.stderr) == (0, "")


def test_package_imports_nothing_before_the_command_line_handles_interrupts() -> None:
    program = """
import sys
sys.addaudithook(lambda event, found: event == "import" and print(found[0]))
import paceline.__main__
"""
    command = [sys.executable, "-c", program]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.split()[:3] == ["paceline.__main__", "paceline", "importlib"]
