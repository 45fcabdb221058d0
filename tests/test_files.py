# SPDX-License-Identifier: BSD-3-Clause
"""Atomic writes: readers see the whole file or none of it."""

import pytest

from paceline.files import atomic_write


def test_file_appears_only_when_it_is_complete(tmp_path):
    path = tmp_path / "one"
    path.write_text("old")
    with atomic_write(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_old_file_stays_if_writing_fails(tmp_path):
    path = tmp_path / "one"
    path.write_text("old")

    def fail():
        with atomic_write(path) as partial:
            partial.write_text("half of it")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_leftover_of_a_killed_process_is_overwritten(tmp_path):
    (tmp_path / ".one.partial").write_text("half of it")
    with atomic_write(tmp_path / "one") as partial:
        partial.write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_several_processes_may_write_the_same_file(tmp_path):
    path = tmp_path / "one"
    with atomic_write(path, alone=False) as mine, atomic_write(path) as another:
        assert mine != another
        mine.write_text("new")
        another.write_text("new")
    assert list(tmp_path.iterdir()) == [path]


def test_missing_folder_raises_the_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "no" / "one") as partial:
        partial.write_text("new")
