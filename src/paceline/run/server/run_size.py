# SPDX-License-Identifier: BSD-3-Clause
"""How many workers a run was started with, before the process has joined it.

A launcher tells its processes, or they find it in the run's folder. A process that was started by
hand on another host has neither, so it asks the head.
"""

import sys
from pathlib import Path

from paceline.errors import ProtocolError
from paceline.run.launch.environment import Identity
from paceline.run.launch.run_folder import settings_of
from paceline.run.net.handshake import connect
from paceline.run.net.number_messages import AskRunSize, RunSize
from paceline.run.net.tls import client_context
from paceline.run.server.head_search import find_head
from paceline.run.system import SYSTEM, System

__all__ = ["workers_of"]


def workers_of(who: Identity, system: System = SYSTEM) -> int:
    """Return how many workers the run of this process was started with; may wait for the head."""
    if who.workers is not None:
        return who.workers
    if who.is_head or who.run_dir != Path():
        return settings_of(who.run_dir).spec.workers
    workers = find_head(lambda: _ask(who), _say, system, has_joined=False)
    assert workers is not None  # only a process that has joined may learn that the run has ended
    return workers


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _ask(who: Identity) -> int:
    tls = None if who.tls is None else client_context(who.tls)
    channel = connect(who.address, who.token(), tls=tls)
    try:
        channel.send(AskRunSize())
        answer = channel.receive()
    finally:
        channel.close()
    if not isinstance(answer, RunSize):
        raise ProtocolError(f"expected the size of the run, got {answer!r}")
    return answer.workers
