# SPDX-License-Identifier: BSD-3-Clause
"""Tensors between processes of one host: memory that has no name.

A region is an anonymous file in memory; its descriptor travels over the control connection and both
sides map it. Having no name, nothing of it is left behind whatever is killed, and the size of
/dev/shm does not bound it. It is sealed against shrinking, so that no peer can pull the memory away
from under another.
"""

import fcntl
import mmap
import os
import warnings
from errno import EMFILE, ENFILE

import torch

from paceline.errors import ProtocolError, SpecError
from paceline.run.tensors.memory import spare_bytes

__all__ = ["Region"]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class _NotMapped(ProtocolError):
    """The system will not map this memory, of which it is said that a peer has given it."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"cannot map the memory of a peer: {error.strerror}")
        self.errno = error.errno


class Region:
    """Memory that several processes see."""

    def __init__(self, fd: int, size: int | None = None, *, writable: bool = True) -> None:
        """Map a descriptor, which stays the caller's, so far or all of it.

        Raises ProtocolError if it is not sealed memory of that size.
        """
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            status = os.fstat(fd)
            there = min(status.st_size, status.st_blocks * 512)  # holes would be filled from ours
            flags = mmap.MAP_SHARED
            if size is None:
                size = there  # the peer's choice, so no more of it is touched than is read
            else:
                flags |= mmap.MAP_POPULATE  # or the first step would pay for every page
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
        """Make one of zeros; return it and its descriptor. `what` names it in the error."""
        spare = spare_bytes()
        if size > spare:
            raise _too_much(size, what, f", {spare / 1e6:.0f} MB are left")
        fd = -1
        try:
            fd = os.memfd_create(f"paceline-{what}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            # Reserved now, so that too little memory is an error here and not a crash later.
            os.posix_fallocate(fd, 0, max(size, 1))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, size), fd
        except (OSError, _NotMapped) as error:
            if fd >= 0:
                os.close(fd)
            if error.errno in (EMFILE, ENFILE):
                raise _too_many_files(what) from None
            raise _too_much(size, what, f" ({os.strerror(error.errno or 0)})") from None

    def tensor(self, dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
        """A flat tensor on this memory, with a storage of its own, from a byte on."""
        if count == 0:
            return torch.empty(0, dtype=dtype)
        with warnings.catch_warnings():
            # That memory is for reading only is meant: it is the server's.
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)


def _too_much(size: int, what: str, left: str = "") -> SpecError:
    return SpecError(
        f"{size / 1e6:.0f} MB of shared memory for the {what} cannot be had{left}; give the "
        "machine more memory, or use fewer workers or a smaller model"
    )


def _too_many_files(what: str) -> SpecError:
    return SpecError(
        f"shared memory for the {what} cannot be had, for too many files are open; raise the limit "
        "(ulimit -n), or use fewer workers"
    )
