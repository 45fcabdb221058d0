# SPDX-License-Identifier: BSD-3-Clause
"""The disk of a simulated host: it can be full, slow or broken, and lose what wasn't synced.

The files are real ones in a temporary folder, so that readers need not know. What a power failure
would leave of them is remembered: the content of each file when it was synced last, and the names
in each folder when that was synced last.

Other threads and processes may run before any operation, and a process that is killed there has
done only a part of its write.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.files import Disk, DiskFile
from storm.world import Process, World

__all__ = ["StormDisk"]

YIELD = 0.3  # how often others run before an operation
OPEN_MAX = 8  # files that a process may have open at a time


@dataclass(eq=False)
class Inode:
    """A file, whatever its name."""

    path: Path  # its present name
    synced: bytes = b""  # its content when it was synced last
    modified_at: float = 0.0  # when it was written last, as the wall clock counts


@dataclass
class Folder:
    """The names in a folder."""

    synced: dict[str, Inode] = field(default_factory=dict)
    now: dict[str, Inode] = field(default_factory=dict)
    changes: list[dict[str, Inode]] = field(default_factory=list)  # all states since the last sync


class StormFile(DiskFile):
    """An open file."""

    def __init__(self, disk: StormDisk, inode: Inode, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._disk = disk
        self._inode = inode

    def write(self, data: Any, /) -> int:
        """Write all of the data, or a part of it if the process is killed or the disk is full."""
        whole, task = memoryview(data).cast("B"), self._disk.world.current
        if task is not None:
            task.on_torn = lambda: self._tear(whole)
        try:
            self._disk.work("write")
        except OSError:
            self._tear(whole)
            raise
        finally:
            if task is not None:
                task.on_torn = None
        self._inode.modified_at = self._disk.world.wall_time()
        return super().write(whole)

    def _tear(self, whole: memoryview) -> None:
        """Write only the first part of the data."""
        self._disk.torn_writes += 1
        self._inode.modified_at = self._disk.world.wall_time()
        super().write(whole[: self._disk.world.random.randint(0, len(whole))])

    def truncate(self, size: int | None = None, /) -> int:
        """Truncate the file."""
        self._disk.work("truncate")
        self._inode.modified_at = self._disk.world.wall_time()
        return super().truncate(size)

    def sync(self) -> None:
        """Make the content durable."""
        self._disk.work("sync")
        self._inode.synced = self._inode.path.read_bytes()


class StormDisk(Disk):
    """A disk on which things go wrong."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_full = False
        self.slow_s = 0.0  # how long an operation takes at most
        self.sync_s = 0.0  # how long it takes to sync something
        self.busy_until = 0.0  # when the last operation that takes long ends
        self.torn_writes = 0  # how many writes were done in part only
        self._folders: dict[Path, Folder] = {}
        self._open: list[StormFile] = []

    def work(self, what: str) -> None:
        """Do something that takes time and may fail."""
        world = self.world
        world.touch()
        if world.current is not None:
            is_very_slow = self.sync_s and what == "sync"
            takes_s = self.sync_s if is_very_slow else world.random.random() * self.slow_s
            if takes_s:
                self.busy_until = max(self.busy_until, world.now + takes_s)
                process = world.process
                process.disk_waits += 1
                try:
                    world.sleep(takes_s)
                finally:
                    process.disk_waits -= 1
            elif world.random.random() < YIELD:
                world.let_others_run()
        if self.is_full and what in ("open", "write", "folder"):
            self.world.note(f"DISK is full: {what} fails")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open(
        self, path: Path, mode: Literal["wb", "xb", "r+b"], permissions: int = 0o666
    ) -> DiskFile:
        """Open a file to write to."""
        self.work("open" if mode != "r+b" or not path.exists() else "open again")
        folder = self._folder(path.parent)
        inode = folder.now.get(path.name)
        if inode is None:
            inode = folder.now[path.name] = Inode(path, modified_at=self.world.wall_time())
            self._changed(folder)
        file = StormFile(self, inode, path, mode)
        self._open = [other for other in self._open if not other.closed] + [file]
        if self.world.current is not None:
            self._own(self.world.process, file)
        return file

    def _own(self, process: Process, file: StormFile) -> None:
        """Note that a process has opened a file, and whether it has too many."""
        process.open_files = [other for other in process.open_files if not other.closed] + [file]
        if len(process.open_files) > OPEN_MAX:
            names = ", ".join(str(other.name) for other in process.open_files)
            self.world.leaks.append(f"{process.name} has too many open files: {names}")

    def replace(self, source: Path, target: Path) -> None:
        """Move a file to another name."""
        self.work("replace")
        super().replace(source, target)
        folder = self._folder(source.parent)
        assert source.parent == target.parent
        inode = folder.now.pop(source.name)
        inode.path = target
        folder.now[target.name] = inode
        self._changed(folder)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        self.work("unlink")
        super().unlink(path)
        folder = self._folder(path.parent)
        if folder.now.pop(path.name, None) is not None:
            self._changed(folder)

    def make_folder(self, path: Path) -> None:
        """Create a folder."""
        self.work("folder")
        super().make_folder(path)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        self.work("sync")
        folder = self._folder(path)
        folder.synced, folder.changes = dict(folder.now), []

    def modified_at(self, path: Path) -> float:
        """Return when a file was last written; raises FileNotFoundError if there is none."""
        inode = self._folder(path.parent).now.get(path.name)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return inode.modified_at

    def _folder(self, path: Path) -> Folder:
        return self._folders.setdefault(path, Folder())

    @staticmethod
    def _changed(folder: Folder) -> None:
        folder.changes.append(dict(folder.now))

    # --------------------------------------------------------------------------------- disasters

    def lose_power(self) -> None:
        """Lose what wasn't synced, or keep a part of it, as a disk may."""
        for path, folder in self._folders.items():
            # The names changed one after the other, and the first of these changes may be durable.
            kept = self.world.random.randint(0, len(folder.changes))
            names = folder.changes[kept - 1] if kept else folder.synced
            contents = {name: self._after_power_loss(inode) for name, inode in names.items()}
            for name in folder.now:
                (path / name).unlink(missing_ok=True)
            folder.now = {}
            for name, content in contents.items():
                (path / name).write_bytes(content)
                folder.now[name] = Inode(path / name, content, names[name].modified_at)
            folder.synced, folder.changes = dict(folder.now), []

    def _after_power_loss(self, inode: Inode) -> bytes:
        """Return what is left of a file: what was synced, and perhaps some of what came after."""
        chance = self.world.random
        try:
            now = inode.path.read_bytes()
        except FileNotFoundError:
            return inode.synced
        if now == inode.synced or chance.random() < 0.3:
            return inode.synced
        if not now.startswith(inode.synced):  # it was overwritten: any mixture is possible
            return chance.choice([inode.synced, now, now[: chance.randint(0, len(now))]])
        tail = len(now) - len(inode.synced)
        return now[: len(inode.synced) + chance.randint(0, tail)]

    @property
    def open_files(self) -> list[str]:
        """The names of the files that are open."""
        return [str(file.name) for file in self._open if not file.closed]
