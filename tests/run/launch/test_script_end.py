# SPDX-License-Identifier: BSD-3-Clause
"""How scripts end that plain Python executes."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, os, sys
from paceline.errors import SpecError
from paceline.run.launch.child import call_at_success, end_cleanly_at
from paceline.run.launch.script_end import ScriptEnd

class Ended(StopIteration):
    def __str__(self):
        return "the loader has ended"

def finish(has_failed):
    print("failed" if has_failed else "succeeded", flush=True)
    return int(os.environ["CODE"])

end_cleanly_at(Ended)
call_at_success(lambda: print("left", flush=True))
atexit.register(print, "earlier hook")
ScriptEnd(sys.argv[0], finish).watch()
"""


@pytest.fixture
def end(tmp_path):
    """Return a function that executes a script which ends like this."""

    def execute(source, code=0):
        path = tmp_path / "script.py"
        path.write_text(PROGRAM + source)
        done = subprocess.run(
            [sys.executable, path],
            capture_output=True,
            text=True,
            env={"CODE": str(code)},
            check=False,
        )
        return done.returncode, done.stdout.splitlines(), done.stderr

    return execute


def test_script_that_reaches_its_end_leaves_the_run_first(end):
    assert end("") == (0, ["left", "succeeded", "earlier hook"], "")


def test_exit_code_of_the_run_becomes_that_of_the_process(end):
    assert end("", code=6) == (6, ["left", "succeeded", "earlier hook"], "")


def test_script_that_raises_does_not_leave_as_if_it_had_ended(end):
    code, out, err = end("raise KeyError('lost')", code=6)
    assert (code, out) == (1, ["failed", "earlier hook"])
    assert "Traceback" in err
    assert err.endswith("KeyError: 'lost'\n")


def test_our_own_error_is_one_sentence_with_the_line_of_the_script(end):
    code, out, err = end("raise SpecError('load weights before run.prepare()')")
    assert (code, out) == (2, ["failed", "earlier hook"])
    assert err == f"script.py:{PROGRAM.count(chr(10)) + 1}: load weights before run.prepare()\n"


def test_end_of_a_loader_is_the_end_of_the_script(end):
    """Also if Python has replaced it, because it left a generator."""
    expected = (0, ["left", "succeeded", "earlier hook"], "the loader has ended\n")
    assert end("raise Ended") == expected
    assert end("def g():\n    raise Ended\n    yield\nnext(g())") == expected


def test_process_that_the_script_forks_ends_without_these_calls(end):
    """It runs the hooks of Python as well."""
    source = "if (pid := os.fork()) == 0:\n    sys.exit(0)\nos.waitpid(pid, 0)\n"
    assert end(source) == (0, ["earlier hook", "left", "succeeded", "earlier hook"], "")
