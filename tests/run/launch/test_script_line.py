# SPDX-License-Identifier: BSD-3-Clause
"""The line at which a process crashed, from real and made-up reports of the fault handler."""

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.run.launch.script_line import ScriptLine, innermost_line

CRASH = """
import faulthandler, os, signal, sys

def crash():
    os.kill(os.getpid(), signal.SIGSEGV)

faulthandler.enable()
"""
CAUSE = ScriptLine("script.py", 5, "os.kill(os.getpid(), signal.SIGSEGV)")


@pytest.mark.parametrize("call", ["crash()", "list(map(lambda _: crash(), [1]))"])
def test_line_of_a_real_report_is_found(tmp_path, call):
    path = tmp_path / "script.py"
    path.write_text(CRASH + call)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    found = innermost_line(done.stderr, tmp_path)
    assert found == CAUSE
    assert str(found) == "script.py:5 (`os.kill(os.getpid(), signal.SIGSEGV)`)"


IN_A_LIBRARY = """Fatal Python error: Segmentation fault

Current thread 0x00007f5d0c1d5740 (most recent call first):
  File "/nowhere/lib/python3.11/site-packages/torch/nn/init.py", line 19 in normal_
  File "/home/me/train.py", line 7 in reset
  File "/home/me/train.py", line 9 in <module>
"""

IN_A_THREAD_OF_TORCH = """Fatal Python error: Segmentation fault

Current thread 0x00007f5d0c1d5740 (most recent call first):
  <no Python frame>

Thread 0x00007f5d0c1d5741 (most recent call first):
  File "/nowhere/lib/python3.11/threading.py", line 5 in wait
  File "/nowhere/lib/python3.11/threading.py", line 8 in run

Thread 0x00007f5d0c1d5742 (most recent call first):
  File "/home/me/train.py", line 3 in clip
  File "/home/me/train.py", line 9 in <module>

Extension modules: numpy._core._multiarray_umath (total: 1)
"""


@pytest.mark.parametrize(
    ("report", "folder", "expected"),
    [
        (IN_A_LIBRARY, "/home/me", ScriptLine("train.py", 7, "")),
        (IN_A_LIBRARY, "/home/you", ScriptLine("init.py", 19, "")),
        (IN_A_THREAD_OF_TORCH, "/home/me", ScriptLine("train.py", 3, "")),
        (IN_A_THREAD_OF_TORCH, "/home/you", ScriptLine("threading.py", 5, "")),
        ("", "/home/me", None),
        ("Fatal Python error: Segmentation fault\n\n<no Python frame>\n", "/home/me", None),
    ],
    ids=["library", "other folder", "thread", "no own frame", "nothing", "no frame"],
)
def test_innermost_line_of_the_script_is_named(report, folder, expected):
    assert innermost_line(report, Path(folder)) == expected


def test_line_of_an_unreadable_file_has_no_source():
    assert str(ScriptLine("train.py", 7, "")) == "train.py:7"
