# SPDX-License-Identifier: BSD-3-Clause
"""The versions that the agent of a host has received, in memory that its workers map.

The head says which versions are still in use. The memory of all others is free for the next.

If a worker loads only the parameters of one optimizer, it gets a buffer of its own: a copy of the
version that it has, into which these parameters are received.
"""

from dataclasses import dataclass

from torch import Tensor

from paceline.errors import ProtocolError
from paceline.run.net.host_messages import HostVersion
from paceline.run.net.messages import Assignment, RunEnded
from paceline.run.net.shared_memory import SharedMemoryStore
from paceline.run.tensors.layout import Views
from paceline.run.tensors.version_buffers import ParameterBuffer

__all__ = ["HostVersions"]


@dataclass
class _Version:
    """A version that is being received, or has been."""

    message: HostVersion
    buffer: ParameterBuffer
    is_complete: bool = False


class HostVersions:
    """The versions of one agent."""

    def __init__(self, store: SharedMemoryStore) -> None:
        self._store = store
        self._free: list[ParameterBuffer] = []
        self._shared: dict[int, _Version] = {}  # by payload
        self._own: dict[int, _Version] = {}  # by worker: those that only it loads
        self._current: dict[int, ParameterBuffer] = {}  # by worker: what it computes with

    def begin(self, message: HostVersion) -> Views:
        """Return the memory into which to receive a version; raises ProtocolError."""
        for payload in [one for one in self._shared if one not in message.keep]:
            self._free.append(self._shared.pop(payload).buffer)
        if message.worker is None:
            buffer = self._free.pop() if self._free else self._store.new_buffer()
            self._shared[message.payload] = _Version(message, buffer)
        else:
            buffer = self._own_buffer(message.worker)
            self._own[message.worker] = _Version(message, buffer)
        return buffer.views

    def _own_buffer(self, worker: int) -> ParameterBuffer:
        """Return the buffer of a worker, with the parameters that it has now."""
        current = self._current.get(worker)
        if current is None:
            raise ProtocolError(f"worker {worker} has no version yet, and can't load a part of one")
        own = self._own.get(worker)
        buffer = self._store.new_buffer() if own is None else own.buffer
        if buffer is not current:
            for target, source in zip(_flats(buffer.views), _flats(current.views), strict=True):
                target.copy_(source)
        return buffer

    def complete(self, message: HostVersion) -> None:
        """Note that all of a version has arrived."""
        if message.worker is None:
            version = self._shared.get(message.payload)
        else:
            version = self._own.get(message.worker)
        if version is not None and version.message is message:  # somebody still wants it
            version.is_complete = True

    def drop(self, message: HostVersion) -> None:
        """Note that a version won't arrive: nobody wants it any more."""
        version = self._shared.pop(message.payload, None)
        if version is not None:
            self._free.append(version.buffer)

    def find(self, worker: int, message: Assignment | RunEnded) -> ParameterBuffer | None:
        """Return the version that a message to a worker names; None: it hasn't arrived yet."""
        is_last = isinstance(message, RunEnded)
        optimizer = None if isinstance(message, RunEnded) else message.optimizer
        own = self._own.get(worker)
        versions = list(self._shared.values()) if optimizer is None else [own] if own else []
        for version in versions:
            told = version.message
            is_it = (told.version, told.is_last, told.optimizer) == (
                message.version,
                is_last,
                optimizer,
            )
            if is_it and version.is_complete:
                self._current[worker] = version.buffer
                return version.buffer
        return None

    def forget(self, worker: int) -> None:
        """Note that a worker is gone."""
        self._current.pop(worker, None)
        own = self._own.pop(worker, None)
        if own is not None:
            self._free.append(own.buffer)


def _flats(views: Views) -> list[Tensor]:
    flats = [one for own in views.flats for one in own]
    return [*flats, *views.buffer_flats, *views.counter_flats]
