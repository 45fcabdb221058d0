# SPDX-License-Identifier: BSD-3-Clause
"""A training function becomes a script, and leaves its result next to it."""

import runpy

import pytest

from paceline.run.launch.forkserver import modules_of
from paceline.run.launch.pickled_function import RESULT, SCRIPT, pack, unpack


def test_script_calls_the_function_and_leaves_its_result(tmp_path):
    factor = 2  # a closure, which only cloudpickle can pack
    for name, content in pack(lambda number: {"answer": factor * number}, (21,)).items():
        (tmp_path / name).write_bytes(content)
    runpy.run_path(str(tmp_path / SCRIPT), run_name="__main__")
    assert unpack((tmp_path / RESULT).read_bytes()) == {"answer": 42}


def test_fork_server_does_not_load_ray(tmp_path):
    for name, content in pack(print, ()).items():
        (tmp_path / name).write_bytes(content)
    assert modules_of(tmp_path / SCRIPT) == []


def test_function_that_raises_leaves_no_result(tmp_path):
    for name, content in pack(lambda: 1 / 0, ()).items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ZeroDivisionError):
        runpy.run_path(str(tmp_path / SCRIPT), run_name="__main__")
    assert not (tmp_path / RESULT).exists()
