# SPDX-License-Identifier: BSD-3-Clause
"""Parameter buffers: which memory holds which version, and which workers read it.

A version of the parameters is in a buffer that workers read. A buffer is never written while a
worker reads it: an update is made in place when no worker computes with the newest version, and
otherwise in a free buffer, into which the parameters are copied first. So there are never more
buffers than workers plus the versions that the policy keeps, and a single one if all workers wait
for the update.

A worker may read the parameters of each optimizer from another version. Then a buffer may be
written, too, if nobody reads those of its parameters that change; and there are up to as many
buffers for each worker as there are optimizers.
"""

from collections.abc import Collection
from typing import NamedTuple, Protocol

from torch import Tensor

from paceline.run.tensors.layout import Views

__all__ = ["BufferStore", "ParameterBuffer", "VersionBuffers"]


WHOLE = (0,)  # a buffer that is read and written as a whole has one section


class ParameterBuffer(NamedTuple):
    """Memory that holds one version of the parameters and buffers."""

    number: int
    views: Views


class BufferStore(Protocol):
    """Where the memory of a shard comes from."""

    @property
    def size_bytes(self) -> int:
        """The size of a buffer."""

    @property
    def constants(self) -> list[Tensor]:
        """Memory for the parameters that no optimizer steps; workers can see it."""

    def new_buffer(self) -> ParameterBuffer:
        """Allocate a buffer that workers can see; raises SpecError if there is no memory."""

    def new_accumulator(self) -> Views:
        """Allocate memory for sums, which only the server sees."""


class VersionBuffers:
    """The buffers of a shard."""

    def __init__(self, store: BufferStore, versions_kept: int) -> None:
        """`versions_kept`: how many of the newest versions may still be assigned."""
        self._store = store
        self._versions_kept = versions_kept
        self._all: list[ParameterBuffer] = []
        self._by_version: dict[int, ParameterBuffer] = {}
        self._by_reader: dict[int, dict[int, ParameterBuffer]] = {}  # and by section
        self.current = self._allocate()
        """The buffer that holds the newest version, or in which the next one is being made."""

    def __len__(self) -> int:
        return len(self._all)

    def _allocate(self) -> ParameterBuffer:
        buffer = self._store.new_buffer()
        self._all.append(buffer)
        return buffer

    def of(self, version: int) -> ParameterBuffer:
        """Return the buffer of a version that may still be assigned."""
        return self._by_version[version]

    def reset(self, version: int) -> None:
        """Note that the current buffer holds this version, and that no other version exists."""
        self._by_version = {version: self.current}

    def add_reader(
        self, worker: int, version: int, sections: Collection[int] = WHOLE
    ) -> ParameterBuffer:
        """Return the buffer of a version; these sections of it stay unchanged.

        They do until `remove_reader`, or until the worker reads them from another buffer.
        """
        buffer = self._by_version[version]
        self._by_reader.setdefault(worker, {}).update(dict.fromkeys(sections, buffer))
        return buffer

    def remove_reader(self, worker: int, sections: Collection[int] | None = None) -> None:
        """Note that the worker no longer reads these sections of any version; None: all."""
        if sections is None:
            self._by_reader.pop(worker, None)
        elif worker in self._by_reader:
            for section in sections:
                self._by_reader[worker].pop(section, None)

    def begin_update(self, update: int, sections: Collection[int] = WHOLE) -> bool:
        """Make `current` a buffer whose sections may be written; return whether it is another one.

        If it is, the caller copies the parameters from the old one. It always calls `end_update`.
        """
        for version in [v for v in self._by_version if v <= update - self._versions_kept]:
            del self._by_version[version]
        in_use = {buffer.number for buffer in self._by_version.values()}
        read = [item for by_section in self._by_reader.values() for item in by_section.items()]
        changing = {buffer.number for section, buffer in read if section in sections}
        if self.current.number not in in_use | changing:
            return False
        in_use |= {buffer.number for _, buffer in read}
        free = next((buffer for buffer in self._all if buffer.number not in in_use), None)
        self.current = free or self._allocate()
        return True

    def end_update(self, update: int) -> None:
        """Note that the current buffer now holds this version."""
        for version in [v for v in self._by_version if v <= update - self._versions_kept]:
            del self._by_version[version]
        self._by_version[update] = self.current
