# SPDX-License-Identifier: BSD-3-Clause
"""Files that appear whole or not at all."""

import pytest

from paceline.files import atomic_write


def test_a_file_appears_when_it_is_whole(tmp_path):
    path = tmp_path / "one"
    path.write_text("old")
    with atomic_write(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_what_was_there_stays_where_writing_fails(tmp_path):
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


def test_what_a_killed_process_left_is_written_over(tmp_path):
    (tmp_path / ".one.partial").write_text("half of it")
    with atomic_write(tmp_path / "one") as partial:
        partial.write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_several_processes_may_write_the_same_where_they_say_so(tmp_path):
    path = tmp_path / "one"
    with atomic_write(path, alone=False) as mine, atomic_write(path) as another:
        assert mine != another
        mine.write_text("new")
        another.write_text("new")
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "no" / "one") as partial:
        partial.write_text("new")
