# SPDX-License-Identifier: BSD-3-Clause
"""An executor with real parts and workers in this process, for tests that give it actions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer loads it, and it sets an environment variable
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from fakes import NoTrace
from paceline.core.decider import Decider
from paceline.core.events import Accept, Action, ApplyUpdate, Contribution, SendParams
from paceline.core.policies import parse_policy
from paceline.release import RELEASE
from paceline.run.net import messages
from paceline.run.net.in_process import InProcessNetwork, InProcessStore, InProcessWorker
from paceline.run.server.checkpoint import Archive
from paceline.run.server.checkpointer import Checkpointer
from paceline.run.server.executor import Executor, Performed, RunParts
from paceline.run.server.progress import Progress
from paceline.run.server.roster import Peer, Roster
from paceline.run.server.run_failure import RunFailure
from paceline.run.server.timers import RunClock, Timers
from paceline.run.settings import Settings, parse_every
from paceline.run.tensors.finite_check import first_spoiled
from paceline.run.tensors.layout import gather
from paceline.run.tensors.shard import Shard
from paceline.run.tensors.state_spec import SchedulerCalls, SchedulerMode

__all__ = ["ExecutorBench"]


class ExecutorBench:
    """An executor, all of its parts, and workers that a test controls."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.scheduler = ExponentialLR(self.optimizer, gamma=0.5)
        self.optimizer.step()  # or the scheduler warns
        state = gather([self.model], [self.optimizer])
        self.spec = state.spec
        self.store = InProcessStore(self.spec)
        self.network = InProcessNetwork(self.store)
        self.exports = 0
        self.archive = Archive(folder / "checkpoints", print, first_spoiled=first_spoiled)
        policy = parse_policy(settings.policy)
        every = parse_every(settings.checkpoint_every)
        self.parts = RunParts(
            settings=settings,
            decider=Decider(policy, settings.spec),
            shard=Shard(
                state,
                [self.scheduler],
                self.store,
                versions_kept=policy.versions_kept,
                ema=settings.ema,
            ),
            checkpointer=Checkpointer(self.archive, every, self._export, print, NoTrace()),
            roster=Roster(settings, self.spec),
            failures=RunFailure(),
            progress=Progress(settings),
            timers=Timers(),
            clock=RunClock(),
        )
        self.parts.checkpointer.begin(0, 0.0)
        self.executor = Executor(self.parts, began=None, updated=None)
        self.workers: dict[int, InProcessWorker] = {}
        self._accepted: dict[int, list[Contribution]] = {}  # by update

    def _export(self) -> None:
        self.exports += 1

    def join(self, *workers: int) -> "ExecutorBench":
        """Admit workers, which receive their welcome."""
        for worker in workers:
            end = self.workers[worker] = self.network.connect()
            end.send(messages.Join(worker, RELEASE, self.spec))
            [peer_end] = self.network.wait(0.0)
            [join] = peer_end.receive_nowait()
            assert isinstance(join, messages.Join)
            self.parts.roster.admit(peer_end, join, saves=True, position=b"")
            assert isinstance(end.receive(), messages.Welcome)
        return self

    def peer(self, worker: int) -> Peer:
        """Return a worker as the server sees it."""
        return self.parts.roster[worker]

    def inbox(self, worker: int) -> list[Any]:
        """Return all messages that a worker has not received yet."""
        end, found = self.workers[worker], []
        while end.wait_readable(0.0):
            found.append(end.receive())
        return found

    def perform(
        self,
        *actions: Action,
        time: float = 1.0,
        report: messages.GradientReport | None = None,
    ) -> Performed:
        """Perform actions on an event at this time, and end the run if one of them says so."""
        version = self.parts.shard.version
        performed = self.executor.perform(list(actions), time, version, report)
        if performed.end is not None:
            self.executor.end_run(performed.end)
        return performed

    def assign(self, *workers: int, turn: int = 1) -> None:
        """Give workers a turn at the newest version; they receive it."""
        version = self.parts.shard.version
        for worker in workers:
            self.perform(SendParams(worker, turn, version))
            assert [type(message) for message in self.inbox(worker)] == [messages.Assignment]

    def call_scheduler(self, mode: SchedulerMode = "mini-batch", **fields: Any) -> None:
        """Let worker 0 report a call of the scheduler, with a turn that it abandons."""
        calls = SchedulerCalls(0, mode, **{"calls": 1, "steps": 1, **fields})
        self.executor.script_settings.take(0, messages.AbandonReport(1, 0.0, schedulers=(calls,)))

    def report(self, worker: int, values: Sequence[float] | Tensor, **fields: Any) -> None:
        """Let a worker's gradient be accepted for the next update."""
        slot = self.workers[worker].open_slot().slot
        slot.parameters[0][0].copy_(torch.as_tensor(values)[None])
        version = fields.pop("at", self.parts.shard.version)
        update = fields.pop("update", self.parts.shard.version + 1)
        usual = {"turn": 1, "version": version, "optimizer": 0, "samples": 1, "compute_s": 0.0}
        report = messages.GradientReport(**{**usual, "sq_norm": 1.0, **fields})
        self.parts.roster.end_turn(self.peer(worker), 1.0)
        self.parts.shard.remove_reader(worker)
        scale = self.parts.decider.policy.scale(update - 1 - version)
        self.perform(Accept(worker, version, update, report.samples, scale), report=report)
        contribution = Contribution(worker, version, report.samples, scale)
        self._accepted.setdefault(update, []).append(contribution)

    def update(self) -> ApplyUpdate:
        """Return the next update, of all gradients that were accepted for it."""
        number = self.parts.shard.version + 1
        given = tuple(self._accepted.pop(number))
        samples = sum(contribution.samples for contribution in given)
        weights = tuple(contribution.samples / samples for contribution in given)
        scales = tuple(contribution.scale for contribution in given)
        return ApplyUpdate(number, given, weights, scales, len(given))

    @property
    def weights(self) -> list[float]:
        """The parameters of the newest version."""
        return self.parts.shard.newest.views.parameters[0][0].flatten().tolist()
