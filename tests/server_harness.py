# SPDX-License-Identifier: BSD-3-Clause
"""A run in one process that anybody can come into.

The server runs in the thread of the test. Another one plays two honest workers, and whoever comes
between them, message by message: so an intruder always comes while both compute at version 1.
"""

import gc
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import torch
import torch._dynamo  # an optimizer loads it, and it sets a variable of the environment
from torch import nn

from paceline.core.decider import Decider
from paceline.core.policies import parse_policy
from paceline.run.net import messages
from paceline.run.net.channel import listen, new_token
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
from strangers import Raw

__all__ = ["STEPS", "TOKEN", "Scene", "Served", "keeper_of", "kept_open", "nobody", "serve"]

TOKEN = new_token()
STEPS = 3


@dataclass
class Served:
    """What came of a run."""

    failure: str
    weights: torch.Tensor
    momentum: torch.Tensor
    trace: Trace


class Scene:
    """A run that somebody can come into."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.common = gather([self.model], [self.optimizer])
        self.contents = self.common.contents
        self.address = f"unix:@paceline-test-{secrets.token_hex(8)}"
        self.made: list[Raw] = []

    def come(self, token: str | None = TOKEN) -> Raw:
        """Somebody comes, proven or, without a token, as a stranger."""
        self.made.append(Raw(self.address, token))
        return self.made[-1]

    def play(self, intrude: Callable[["Scene"], object]) -> None:
        """Two honest workers train, and between their steps somebody comes in."""
        honest = [self.come().join(worker, self.contents) for worker in range(2)]
        for version in range(STEPS):
            works = [worker.get_work() for worker in honest]
            if version == 1:
                intrude(self)
            for number, (worker, work) in enumerate(zip(honest, works, strict=True)):
                values = [(p + version) * (number + 1) for p in worker.at.parameters[0]]
                worker.say(worker.gradient(work, *values))
        for worker in honest:
            assert isinstance(worker.get_work(), messages.RunEnded)


USUAL = Settings(spec=RunSpec(workers=2, steps=STEPS), checkpoint_every="0")


def serve(
    intrude: Callable[[Scene], object],
    folder: Path,
    settings: Settings = USUAL,
    *,
    alone: bool = False,
) -> Served:
    """Serve a run while `intrude` happens to it, or is `alone` what happens; its trace is sound."""
    scene = Scene()
    decider = Decider(parse_policy(settings.policy), settings.spec)
    shard = Shard(scene.common, [], settings, decider.policy.versions_kept)
    listener = Listener(listen(scene.address), TOKEN)
    path = folder / "trace.jsonl"
    recorder = Recorder(path, Header.of("run", decider.policy, settings.spec, {}))
    checkpointer = keeper_of(settings, folder)
    errors: list[BaseException] = []

    def act() -> None:
        try:
            if alone:
                intrude(scene)
            else:
                scene.play(intrude)
        except BaseException as error:  # told in the test's own thread
            errors.append(error)
        finally:
            for peer in scene.made:
                peer.close()
            listener.stop_wanted = bool(errors)

    thread = Thread(target=act)
    thread.start()
    try:
        failure = Server(settings, decider, shard, listener, recorder, checkpointer).serve()
    finally:
        thread.join()
    if errors:
        raise errors[0]
    trace = read_trace(path)
    audit(trace)
    weights = torch.cat([p.detach().flatten() for p in scene.model.parameters()])
    momentum = [s["momentum_buffer"].flatten() for s in scene.optimizer.state.values()]
    return Served(failure, weights, torch.cat(momentum), trace)


def keeper_of(settings: Settings, folder: Path) -> Checkpointer:
    """Who saves a run with these settings in this folder."""
    every = parse_every(settings.checkpoint_every)
    return Checkpointer(Archive(folder / "checkpoints", print), every, lambda: None, print)


def nobody(scene: Scene) -> None:
    """Comes in."""


def kept_open(folder: Path, intrude: Callable[[Scene], object] = nobody) -> int:
    """How many descriptors stay open after a run; a server keeps some until its process ends."""
    before = _open_fds()
    serve(intrude, folder)
    return _open_fds() - before


def _open_fds() -> int:
    gc.collect()  # a mapping holds a descriptor until it is gone
    return len(os.listdir("/proc/self/fd"))
