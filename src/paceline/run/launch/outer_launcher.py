# SPDX-License-Identifier: BSD-3-Clause
"""What a run gets from another launcher, such as torchrun, and what it tells it.

The other launcher starts the workers. Users can't give options to Paceline then, only environment
variables. One of the workers starts `paceline serve` and is told how its server is reached.
"""

import os
import shlex
from pathlib import Path

import msgspec

from paceline.errors import SpecError
from paceline.run.launch.environment import Identity, identity, variables

__all__ = [
    "announce",
    "announce_to",
    "given_options",
    "given_token_file",
    "is_announced",
    "read_announcement",
]

OPTIONS = "PACELINE_OPTIONS"
TOKEN_FILE = "PACELINE_TOKEN_FILE"

_pipes: list[int] = []  # where to announce the server of this process


def given_options() -> list[str]:
    """Return the options of the run, as words of a command line; raise SpecError if they aren't."""
    text = os.environ.get(OPTIONS, "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SpecError(
            f"{OPTIONS} must have options of paceline run, got {text!r}: {error}"
        ) from None


def given_token_file() -> Path | None:
    """Return the file with the token that all processes were given; None: there is none."""
    text = os.environ.get(TOKEN_FILE, "")
    return Path(text).absolute() if text else None


def announce_to(pipe: int) -> None:
    """Let this process, which becomes `paceline serve`, announce its server to a pipe."""
    _pipes.append(pipe)


def is_announced() -> bool:
    """Return whether other processes of this run have another launcher."""
    return bool(_pipes)


def announce(server: Identity) -> None:
    """Announce how the server is reached, if another process wants to know."""
    for pipe in _pipes:
        with open(pipe, "wb", closefd=False) as file:
            file.write(msgspec.json.encode(variables(server)) + b"\n")


def read_announcement(pipe: int) -> Identity | None:
    """Wait for what `announce` writes; None: its process has exited without it."""
    with open(pipe, "rb") as file:
        told = file.readline()
    return identity(msgspec.json.decode(told, type=dict[str, str])) if told else None
