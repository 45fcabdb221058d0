# SPDX-License-Identifier: BSD-3-Clause
"""What a script finds in a forked process, and how its end is reported."""

import pytest

from paceline.run.launch.child import decode_failure, encode_failure


def test_script_finds_the_usual_environment(fork, tmp_path):
    source = """
import os, sys
print(sys.argv[1:], sys.path[0], os.getcwd(), __name__, __file__)
print([sys.stdin.read()], open("/proc/self/comm").read().strip(), os.getsid(0) == os.getpid())
print("to the other", file=sys.stderr)
"""
    (tmp_path / "elsewhere").mkdir()
    one = fork(source, arguments=("--lr", "ö", ""), folder=str(tmp_path / "elsewhere"))
    out, err, failure = one.output()
    assert out.decode().splitlines() == [
        f"['--lr', 'ö', ''] {tmp_path} {tmp_path}/elsewhere __main__ {tmp_path}/script.py",
        "[''] paceline-w3 True",
    ]
    assert (err, failure) == (b"to the other\n", b"")
    assert one.code() == 0


@pytest.mark.parametrize(
    ("source", "code", "err", "failure"),
    [
        ("", 0, "", ""),
        ("import sys; sys.exit()", 0, "", ""),
        ("import sys; sys.exit(7)", 7, "", ""),
        ("import sys; sys.exit(-1)", 255, "", ""),
        ("import sys; sys.exit('no luck')", 1, "no luck\n", ""),
        ("raise ValueError('no luck')", 1, "", "ValueError: no luck"),
        ("raise KeyboardInterrupt", 1, "", "KeyboardInterrupt"),
        ("import paceline; raise paceline.SpecError('no luck')", 2, "", "script.py:1: no luck"),
        ("def", 1, "", "SyntaxError: invalid syntax"),
        ("import os; os.kill(os.getpid(), 9)", -9, "", ""),
        ("import os; os.kill(os.getpid(), 2)", -2, "", ""),
        ("import os; os.kill(os.getpid(), 15)", -15, "", ""),
    ],
)
def test_exit_code_and_failure_are_reported(fork, source, code, err, failure):
    one = fork(source)
    printed = one.output()
    assert one.code() == code
    assert printed[1].decode() == err
    text, error_code = decode_failure(printed[2]) if printed[2] else ("", 0)
    assert error_code == (code if failure else 0)
    assert text.rstrip("\n").endswith(failure)
    assert bool(text) is bool(failure)
    assert "runpy" not in text
    assert "forkserver" not in text


CLEAN_END = """
from paceline.run.launch.child import end_cleanly_at

class Done(StopIteration):
    pass

end_cleanly_at(Done)

def raise_it(error):
    raise error
    yield
"""


@pytest.mark.parametrize("last", ["raise Done('over')", "next(raise_it(Done('over')))"])
def test_expected_exception_ends_a_script_cleanly(fork, last):
    one = fork(CLEAN_END + last)
    out, err, failure = one.output()
    assert one.code() == 0
    assert (out, err, failure) == (b"", b"over\n", b"")


@pytest.mark.parametrize("last", ["raise StopIteration", "next(raise_it(StopIteration()))"])
def test_other_exception_ends_it_with_a_traceback(fork, last):
    one = fork(CLEAN_END + last)
    assert b"StopIteration" in one.output()[2]
    assert one.code() == 1


def test_our_own_error_is_one_line_that_names_the_calling_line(fork, tmp_path):
    beside = "import paceline\n\ndef go():\n    paceline.RunSpec(workers=0)\n"
    (tmp_path / "beside.py").write_text(beside, encoding="utf-8")
    _, _, failure = fork("import beside\nbeside.go()\n").output()
    assert failure == encode_failure("beside.py:4: workers must be >= 1, got 0\n", 2)


def test_internal_error_keeps_its_traceback(fork):
    _, _, failure = fork("from paceline import errors\nraise errors.InternalError('oh')\n").output()
    text, code = decode_failure(failure)
    first, *_, last = text.splitlines()
    assert code == 70
    assert first == "Traceback (most recent call last):"
    assert last == "paceline.errors.InternalError: oh"


def test_exit_handlers_and_threads_run_to_their_end(fork):
    source = """
import atexit, threading, time
atexit.register(print, "at the exit")
threading.Thread(target=lambda: (time.sleep(0.05), print("a thread"))).start()
print("no end of line", end=" ")
"""
    one = fork(source)
    assert one.output()[0] == b"no end of line a thread\nat the exit\n"
    assert one.code() == 0
