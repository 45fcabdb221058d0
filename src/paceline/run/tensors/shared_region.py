# SPDX-License-Identifier: BSD-3-Clause
"""Shared memory between processes of one host.

A region is an anonymous file in memory. Its descriptor is sent over the control connection, and
both sides map it. Because it has no name, nothing is left behind when a process is killed, and the
size of /dev/shm doesn't limit it. It is sealed against shrinking, so no peer can take away memory
that another process uses.
"""

import fcntl
import mmap
import os
import warnings
from errno import EMFILE, ENFILE

import torch

from paceline.errors import ProtocolError, SpecError
from paceline.run.tensors.memory_limits import spare_bytes

__all__ = ["Region"]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class _NotMapped(ProtocolError):
    """Raised when the OS refuses to map a region received from a peer."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"cannot map a peer's memory: {error.strerror}")
        self.errno = error.errno


class Region:
    """Memory that several processes share."""

    def __init__(self, fd: int, size: int | None = None, *, writable: bool = True) -> None:
        """Map a descriptor, which the caller closes: its first `size` bytes, or all of it.

        Raises ProtocolError if it isn't sealed memory of at least this size.
        """
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            status = os.fstat(fd)
            there = min(status.st_size, status.st_blocks * 512)  # filling holes takes our memory
            flags = mmap.MAP_SHARED
            if size is None:
                size = there  # the peer chose it, so touch only the pages that are read
            else:
                flags |= mmap.MAP_POPULATE  # otherwise the first step faults in every page
            if not sealed or there < max(size, 1):
                raise ProtocolError(
                    f"expected at least {max(size, 1)} bytes of sealed memory, got {there} bytes"
                    f"{'' if sealed else ', not sealed'}"
                )
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self._map = mmap.mmap(fd, max(size, 1), flags=flags, prot=protection)
        except OSError as error:
            raise _NotMapped(error) from None
        self.size = size

    @classmethod
    def create(cls, size: int, what: str) -> tuple["Region", int]:
        """Create a region of zeros; return it and its descriptor. `what` names it in errors."""
        spare = spare_bytes()
        if size > spare:
            raise _no_memory(size, what, f", {spare / 1e6:.0f} MB available")
        fd = -1
        try:
            fd = os.memfd_create(f"paceline-{what}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            # Reserve it now: too little memory raises an error here, but crashes the process later.
            os.posix_fallocate(fd, 0, max(size, 1))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, size), fd
        except (OSError, _NotMapped) as error:
            if fd >= 0:
                os.close(fd)
            if error.errno in (EMFILE, ENFILE):
                raise _too_many_files(what) from None
            raise _no_memory(size, what, f" ({os.strerror(error.errno or 0)})") from None

    def tensor(self, dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
        """Return a flat tensor on this memory, from this byte on, with its own storage."""
        if count == 0:
            return torch.empty(0, dtype=dtype)
        with warnings.catch_warnings():
            # The server's memory is read-only on purpose.
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)


def _no_memory(size: int, what: str, details: str) -> SpecError:
    return SpecError(
        f"not enough shared memory for the {what}: need {size / 1e6:.0f} MB{details}; use a "
        "machine with more memory, fewer workers or a smaller model"
    )


def _too_many_files(what: str) -> SpecError:
    return SpecError(
        f"too many open files to share memory for the {what}; raise the limit (ulimit -n), or use "
        "fewer workers"
    )
