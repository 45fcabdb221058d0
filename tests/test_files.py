# SPDX-License-Identifier: BSD-3-Clause
"""Files are written whole; atomic writes show readers the whole file or none of it."""

import errno
import os
import resource

import pytest

from paceline.files import DISK, Disk, DiskFile, atomic_write


def test_file_appears_only_when_it_is_complete(tmp_path):
    path = tmp_path / "one"
    path.write_text("old")
    with atomic_write(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_old_file_stays_if_writing_fails(tmp_path):
    path = tmp_path / "one"
    path.write_text("old")

    def fail():
        with atomic_write(path) as file:
            file.write(b"half of it")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_leftover_of_a_killed_process_is_overwritten(tmp_path):
    (tmp_path / ".one.partial").write_text("half of it, and more")
    with atomic_write(tmp_path / "one") as file:
        file.write(b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    assert (tmp_path / "one").read_text() == "new"


def test_several_processes_may_write_the_same_file(tmp_path):
    path = tmp_path / "one"
    with atomic_write(path, alone=False) as mine, atomic_write(path) as another:
        assert mine.name != another.name
        mine.write(b"new")
        another.write(b"new")
    assert list(tmp_path.iterdir()) == [path]


def test_missing_folder_raises_the_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "no" / "one"):
        pass


class LoggingFile(DiskFile):
    """A file that notes what is done to it."""

    log: list[str]

    def write(self, data, /):
        self.log.append("write")
        return super().write(data)

    def sync(self):
        self.log.append("sync")
        super().sync()


class LoggingDisk(Disk):
    """A disk that notes what is done to it, and fails at the given step."""

    def __init__(self, fails_at=""):
        self.log = []
        self._fails_at = fails_at

    def open(self, path, mode, permissions=0o666):
        file = LoggingFile(path, mode)
        file.log = self.log
        return file

    def replace(self, source, target):
        self.log.append("replace")
        if self._fails_at == "replace":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().replace(source, target)

    def unlink(self, path):
        self.log.append("unlink")
        super().unlink(path)

    def sync_folder(self, path):
        self.log.append("sync folder")
        super().sync_folder(path)


def test_file_is_synced_before_it_is_renamed_and_its_name_afterwards(tmp_path):
    disk = LoggingDisk()
    with atomic_write(tmp_path / "one", disk=disk) as file:
        file.write(b"new")
    assert disk.log == ["write", "sync", "replace", "sync folder"]


def test_temporary_file_is_removed_if_it_cannot_be_renamed(tmp_path):
    disk = LoggingDisk(fails_at="replace")
    with pytest.raises(OSError, match="No space left"), atomic_write(tmp_path / "one", disk=disk):
        pass
    assert disk.log == ["sync", "replace", "unlink"]
    assert list(tmp_path.iterdir()) == []


def test_write_that_the_system_cuts_short_is_an_error(tmp_path):
    """At the limit of a file's size the system writes a part, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with (
            DISK.open(tmp_path / "one", "wb") as file,
            pytest.raises(OSError, match="File too large"),
        ):
            file.write(bytes(11))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "one").stat().st_size == 10


def test_write_returns_the_number_of_bytes(tmp_path):
    with DISK.open(tmp_path / "one", "wb") as file:
        assert file.write(b"") == 0
        assert file.write(memoryview(b"abcdefgh").cast("I")) == 8
    assert (tmp_path / "one").read_bytes() == b"abcdefgh"


def test_permissions_hold_from_the_beginning(tmp_path):
    with DISK.open(tmp_path / "one", "xb", permissions=0o600):
        assert (tmp_path / "one").stat().st_mode & 0o777 == 0o600


def test_names_can_be_removed_and_created_twice(tmp_path):
    for _ in range(2):
        DISK.make_folder(tmp_path / "folder")
        DISK.unlink(tmp_path / "one")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_time_of_the_last_write_is_that_of_the_wall_clock(tmp_path):
    (tmp_path / "one").touch()
    os.utime(tmp_path / "one", (5.0, 7.0))
    assert DISK.modified_at(tmp_path / "one") == 7.0
