# SPDX-License-Identifier: BSD-3-Clause
"""A whole run in one process, to which a test can connect any peer.

The server runs in the thread of the test. Another thread acts as two honest workers, message by
message, and starts an intruder between their steps, always while both compute at version 1.
"""

import gc
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from time import monotonic

import torch
import torch._dynamo  # an optimizer loads it, and it sets an environment variable
from torch import nn

from fakes import NoTrace
from paceline.core.decider import Decider
from paceline.core.policies import parse_policy
from paceline.leases import BatchOrder, LeaseBook
from paceline.run.net import messages
from paceline.run.net.address import listen, of_socket
from paceline.run.net.handshake import new_token
from paceline.run.net.shared_memory import SharedMemoryPeer, SharedMemoryStore
from paceline.run.net.tcp import TcpPeer
from paceline.run.server.checkpoint import Archive
from paceline.run.server.checkpointer import Checkpointer
from paceline.run.server.listener import Listener
from paceline.run.server.recorder import Recorder
from paceline.run.server.server import Server
from paceline.run.settings import Settings, parse_every
from paceline.run.tensors.layout import gather
from paceline.run.tensors.shard import Shard
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.trace.schema import Header, Trace
from paceline.watch.audit import audit
from strangers import TIMEOUT_S, RawPeer

__all__ = [
    "STEPS",
    "TOKEN",
    "Harness",
    "Served",
    "checkpointer_for",
    "no_intruder",
    "receive_assignments",
    "serve",
    "shared_memory_listener",
    "unclosed_descriptors",
]

TOKEN = new_token()
STEPS = 3


@dataclass
class Served:
    """The outcome of a run."""

    failure: str
    weights: torch.Tensor
    momentum: torch.Tensor
    trace: Trace


class Harness:
    """A run to which a test can connect peers."""

    def __init__(self, address: str = "") -> None:
        """`address`: of its server; empty: one where workers share memory."""
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state = gather([self.model], [self.optimizer])
        self.spec = self.state.spec
        self.address = address or f"unix:@paceline-test-{secrets.token_hex(8)}"
        self.peers: list[RawPeer] = []

    def connect(self, token: str | None = TOKEN) -> RawPeer:
        """Connect a peer; without a token, it isn't authenticated."""
        self.peers.append(RawPeer(self.address, token))
        return self.peers[-1]

    def train(self, intrude: Callable[["Harness"], object]) -> None:
        """Act as two honest workers, and call `intrude` between their steps."""
        honest = [self.connect().join(worker, self.spec) for worker in range(2)]
        for version in range(STEPS):
            assignments = receive_assignments(honest)
            if version == 1:
                intrude(self)
            for number, (worker, assignment) in enumerate(zip(honest, assignments, strict=True)):
                values = [(p + version) * (number + 1) for p in worker.parameters.parameters[0]]
                worker.announce(worker.gradient(assignment, *values))
        for end in receive_assignments(honest):
            assert isinstance(end, messages.RunEnded)


def receive_assignments(
    workers: Sequence[RawPeer],
) -> list[messages.Assignment | messages.RunEnded]:
    """Receive the next turns of these workers; meanwhile, they send what they have announced."""
    give_up_at = monotonic() + TIMEOUT_S
    while sum(worker.poll() for worker in workers) < len(workers):
        assert monotonic() < give_up_at, "the server doesn't answer"
    return [worker.receive_assignment() for worker in workers]


USUAL = Settings(spec=RunSpec(workers=2, steps=STEPS), checkpoint_every="0")


def serve(
    intrude: Callable[[Harness], object],
    folder: Path,
    settings: Settings = USUAL,
    *,
    alone: bool = False,
    orders: Sequence[BatchOrder | None] = (),
    tcp: bool = False,
) -> Served:
    """Serve a run while `intrude` runs (with `alone`, without honest workers); audit its trace.

    `orders`: of the batches that the server leases. `tcp`: workers don't share memory.
    """
    listening = listen("tcp:127.0.0.1:0") if tcp else None
    harness = Harness("" if listening is None else of_socket(listening, "tcp:127.0.0.1:0"))
    book = LeaseBook(orders)
    decider = Decider(parse_policy(settings.policy), settings.spec)
    decider.leases = book
    store = SharedMemoryStore(harness.spec)
    kept = decider.policy.versions_kept
    shard = Shard(harness.state, [], store, versions_kept=kept, ema=settings.ema)
    if listening is None:
        listener = shared_memory_listener(harness.address, store)
    else:
        listener = Listener([listening], TOKEN, lambda channel: TcpPeer(channel, store))
    path = folder / "trace.jsonl"
    recorder = Recorder(path, Header.of("run", decider.policy, settings.spec, {}))
    checkpointer = checkpointer_for(settings, folder)
    errors: list[BaseException] = []

    def act() -> None:
        try:
            if alone:
                intrude(harness)
            else:
                harness.train(intrude)
        except BaseException as error:  # raised again in the test's own thread
            errors.append(error)
        finally:
            for peer in harness.peers:
                peer.close()
            listener.stop_wanted = bool(errors)

    thread = Thread(target=act)
    thread.start()
    try:
        failure = Server(settings, decider, shard, listener, recorder, checkpointer).serve()
    finally:
        thread.join()
        store.close()
    if errors:
        raise errors[0]
    trace = read_trace(path)
    audit(trace)
    weights = torch.cat([p.detach().flatten() for p in harness.model.parameters()])
    momentum = [s["momentum_buffer"].flatten() for s in harness.optimizer.state.values()]
    return Served(failure, weights, torch.cat(momentum), trace)


def shared_memory_listener(address: str, store: SharedMemoryStore) -> Listener:
    """Return a listener whose peers share the memory of the store."""
    return Listener([listen(address)], TOKEN, lambda channel: SharedMemoryPeer(channel, store))


def checkpointer_for(settings: Settings, folder: Path) -> Checkpointer:
    """Return the checkpointer of a run with these settings in this folder."""
    every = parse_every(settings.checkpoint_every)
    archive = Archive(folder / "checkpoints", print)
    return Checkpointer(archive, every, lambda: None, print, NoTrace())


def no_intruder(harness: Harness) -> None:
    """Leave the run alone."""


def unclosed_descriptors(folder: Path, intrude: Callable[[Harness], object] = no_intruder) -> int:
    """Return how many descriptors are open after a run that weren't before."""
    before = _open_descriptors()
    serve(intrude, folder)
    return _open_descriptors() - before


def _open_descriptors() -> int:
    gc.collect()  # a mapping holds a descriptor until it is collected
    return len(os.listdir("/proc/self/fd"))
