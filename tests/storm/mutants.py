# SPDX-License-Identifier: BSD-3-Clause
"""Bugs that are planted into the real code, to show that storms find them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec

from paceline import files
from paceline.admission import AdmissionQueue
from paceline.core.events import Fate
from paceline.leases import LeaseBook
from paceline.run.launch.part_servers import PartServers
from paceline.run.launch.supervisor import Supervisor
from paceline.run.net.payload_stream import PayloadReceiver
from paceline.run.server.checkpointer import Checkpointer
from paceline.run.server.executor import Executor
from paceline.run.server.head_shard import HeadShard
from paceline.run.server.other_servers import OtherServers
from paceline.run.server.recorder import Recorder
from paceline.run.server.roster import Roster
from paceline.run.server.server import Server
from paceline.run.server.transfers import Transfers
from paceline.run.server.waiting_for import WaitingFor
from paceline.run.tensors.shard import Shard
from paceline.run.tensors.sums import PendingUpdate, WeightedSum
from paceline.run.tensors.version_buffers import VersionBuffers
from paceline.run.worker.replica import Replica
from paceline.run.worker.worker import Worker

__all__ = ["MUTANTS", "Mutant"]


FIRST_SEED = 10_000
STORMS_MAX = 300  # each bug is found within this many storms


class Mutant(NamedTuple):
    """A method or function of the runtime that is replaced by a wrong one."""

    what: str  # is wrong
    owner: type | ModuleType
    name: str
    wrong: Callable[[Any], Any]  # makes the wrong one from the right one
    found_in: int  # the storm that finds it, counted from 1

    @property
    def seeds(self) -> list[int]:
        """The seeds to try: first the one that is known to find it, then the others."""
        return [FIRST_SEED + self.found_in - 1, *range(FIRST_SEED, FIRST_SEED + STORMS_MAX)]

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Have the bug inside the context."""
        right = vars(self.owner)[self.name]
        wrong = self.wrong(right)
        with ExitStack() as stack:
            for owner in self._owners(right):
                stack.enter_context(patch.object(owner, self.name, wrong))
            yield

    def _owners(self, right: Any) -> list[type | ModuleType]:
        """Return the class, or all modules that have imported the function."""
        if isinstance(self.owner, type):
            return [self.owner]
        modules = [module for name, module in sys.modules.items() if name.startswith("paceline")]
        return [module for module in modules if vars(module).get(self.name) is right]


def _nothing(right: Any) -> Any:
    del right
    return lambda *_, **__: None


def _false(right: Any) -> Any:
    del right
    return lambda *_, **__: False


def _first_weight_only(right: Any) -> Any:
    """Every gradient counts the same, however many samples it has."""

    def give(self: Any, worker: int, number: int, slot: Any, weight: float) -> None:
        del weight
        right(self, worker, number, slot, 1.0)

    return give


def _stale_load(right: Any) -> Any:
    """A worker that was late keeps the parameters that it has."""

    def load(self: Any, views: Any, optimizer: int | None = None) -> None:
        self.loads = getattr(self, "loads", 0) + 1
        if self.loads % 5 != 4:
            right(self, views, optimizer)

    return load


def _forgets_undone(right: Any) -> Any:
    """A restored run never leases the batches that weren't done."""

    def restore(self: Any, plain: Any) -> None:
        right(self, [(done, following, []) for done, following, _ in plain])

    return restore


def _unrecorded(right: Any) -> Any:
    """A checkpoint is written before the records that it refers to."""
    del right

    def save(self: Any, snapshot: Any) -> None:
        self._archive.save(snapshot, self._positions, self._trace.sync)

    return save


def _unsynced(right: Any) -> Any:
    """A checkpoint is synced before the records that it refers to."""
    del right

    def save(self: Any, snapshot: Any) -> None:
        self._trace.flush()
        self._archive.save(snapshot, self._positions, lambda: None)

    return save


def _next_version(right: Any) -> Any:
    """A checkpoint says that it is one version newer than it is."""

    def saved(self: Any) -> Any:
        found = right(self)
        return replace(found, version=found.version + 1)

    return saved


def _cyclic(right: Any) -> Any:
    """An update refers to itself, so its slots stay until Python collects garbage."""

    def init(self: Any, allocate: Any) -> None:
        right(self, allocate)
        self.itself = self

    return init


def _other_fate(right: Any) -> Any:
    """Workers are told of another reason for which their gradients were dropped."""

    def set_fate(self: Any, peer: Any, notice: Any, update: int | None) -> None:
        if notice.fate is not Fate.ACCEPTED:
            other = Fate.STALE if notice.fate is Fate.LATE else Fate.LATE
            notice = msgspec.structs.replace(notice, fate=other)
        right(self, peer, notice, update)

    return set_fate


def _closed_unsynced(right: Any) -> Any:
    """The end of the trace is written, but not synced."""
    del right

    def close(self: Any) -> None:
        self.flush()
        self._file.close()

    return close


def _atomic_write(right: Any, *, syncs_file: bool = True, syncs_folder: bool = True) -> Any:
    """Write a file under a temporary name, and forget to sync something."""
    del right

    @contextmanager
    def write(path: Path, *, alone: bool = True, disk: Any = files.DISK) -> Iterator[Any]:
        del alone
        unfinished = path.with_name(f".{path.name}.partial")
        with disk.open(unfinished, "wb") as file:
            yield file
            if syncs_file:
                file.sync()
        disk.replace(unfinished, path)
        if syncs_folder:
            disk.sync_folder(path.parent)

    return write


def _unsynced_file(right: Any) -> Any:
    return _atomic_write(right, syncs_file=False)


def _unsynced_folder(right: Any) -> Any:
    return _atomic_write(right, syncs_folder=False)


def _empty(right: Any) -> Any:
    del right
    return lambda *_: {}


def _no_list(right: Any) -> Any:
    del right
    return lambda *_: []


def _all_at_once(right: Any) -> Any:
    """A payload arrives with its first chunk."""

    def end_if_complete(self: Any) -> Any:
        self._chunks = None
        return right(self)

    return end_if_complete


def _admits_worthless(right: Any) -> Any:
    """A gradient that would not count is sent, and ends its turn, as if it did."""

    def take_worthless(self: Any) -> Any:
        return [(peer, report) for peer, report in right(self) if report.turn % 3]

    return take_worthless


def _expects_none(right: Any) -> Any:
    """A gradient counts before other servers have their parts of it."""

    def expect(*args: Any) -> int:
        right(*args)
        return 0

    return expect


def _only_on_head(right: Any) -> Any:
    del right
    return Shard.release_slot


MUTANTS = (
    Mutant("batches of a dead worker aren't leased again", LeaseBook, "release", _nothing, 4),
    Mutant("a restored run forgets undone batches", LeaseBook, "restore", _forgets_undone, 3),
    Mutant("buffers are written while workers read", VersionBuffers, "begin_update", _false, 2),
    Mutant("gradients aren't weighted by samples", WeightedSum, "give", _first_weight_only, 1),
    Mutant("workers skip loading a version", Replica, "load", _stale_load, 3),
    Mutant("the result isn't written", Checkpointer, "export", _nothing, 2),
    Mutant("timers never fire", Server, "_fire_timers", _nothing, 64),
    Mutant("a checkpoint has the wrong version", Executor, "_saved", _next_version, 1),
    Mutant("workers aren't told of the end", Executor, "send_end", _nothing, 1),
    Mutant("processes aren't restarted", Supervisor, "_may_start", _false, 3),
    Mutant("a worker that lost the server doesn't rejoin", Worker, "rejoin", _nothing, 3),
    Mutant("files aren't synced before they are renamed", files, "atomic_write", _unsynced_file, 1),
    Mutant("folders aren't synced after a rename", files, "atomic_write", _unsynced_folder, 7),
    Mutant("a checkpoint overtakes the trace", Checkpointer, "_save", _unrecorded, 188),
    Mutant("a checkpoint is synced before the trace", Checkpointer, "_save", _unsynced, 93),
    Mutant("the end of the trace isn't synced", Recorder, "close", _closed_unsynced, 2),
    Mutant("slots of dead workers stay referenced", PendingUpdate, "__init__", _cyclic, 1),
    Mutant("workers are told a wrong fate", Roster, "set_fate", _other_fate, 3),
    Mutant("buffers are never published", Shard, "_publish_buffers", _nothing, 1),
    Mutant(
        "workers are never killed after the end", Supervisor, "_end_late_workers", _nothing, 112
    ),
    Mutant("a worker that hangs is never named", WaitingFor, "check", _empty, 46),
    Mutant("gradients that won't count stay announced", Transfers, "take_worthless", _no_list, 109),
    Mutant("turns of such gradients don't end", Transfers, "take_worthless", _admits_worthless, 93),
    Mutant("nobody is admitted", AdmissionQueue, "admit", _no_list, 1),
    Mutant("a gradient of a dead worker stays announced", Transfers, "forget", _nothing, 29),
    Mutant("payloads end too early", PayloadReceiver, "_end_if_complete", _all_at_once, 1),
    Mutant("the parts of other servers aren't awaited", OtherServers, "expect", _expects_none, 1),
    Mutant("other servers don't release slots", HeadShard, "release_slot", _only_on_head, 15),
    Mutant("other servers aren't loaded", HeadShard, "send_parts", _nothing, 1),
    Mutant("stopped servers but the head stay", PartServers, "end_frozen", _nothing, 5),
)
