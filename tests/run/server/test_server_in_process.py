# SPDX-License-Identifier: BSD-3-Clause
"""A whole run inside one process gives the same weights, bit for bit, as over shared memory.

The server, shard, checkpointer and trace are real. Workers are threads that follow the transport
contract, so the same workers run over both transports.
"""

import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo  # an optimizer loads it, and it sets an environment variable
from torch import nn

from paceline.core.decider import Decider
from paceline.core.policies import parse_policy
from paceline.release import RELEASE
from paceline.run.net import messages
from paceline.run.net.handshake import connect
from paceline.run.net.in_process import InProcessNetwork, InProcessStore
from paceline.run.net.shared_memory import SharedMemoryStore, SharedMemoryWorker
from paceline.run.server.checkpoint import Archive
from paceline.run.server.recorder import Recorder
from paceline.run.server.server import Server
from paceline.run.settings import Settings
from paceline.run.tensors.layout import gather
from paceline.run.tensors.shard import Shard
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.trace.schema import Header, Trace
from paceline.watch.audit import audit
from server_harness import TOKEN, checkpointer_for, shared_memory_listener

WORKERS, STEPS = 2, 5


def make_script():
    """Return the model and the optimizer that all processes of a run make."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, gather([model], [optimizer])


def batch(worker, version):
    generator = torch.Generator().manual_seed(1000 * version + worker)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)


class WorkerThread:
    """A worker that computes real gradients over any transport."""

    def __init__(self, end, number, script):
        self.end = end
        self.number = number
        self.model, _, self.state = script
        self.momentum = None

    def train(self):
        """Take part in the run until it ends; return the final weights."""
        try:
            self.end.send(messages.Join(self.number, RELEASE, self.state.spec))
            assert isinstance(self.end.receive(), messages.Welcome)
            self.slot = self.end.open_slot().slot
            while isinstance(message := self._next(), messages.Assignment):
                self._load(message)
                self.end.announce(self._compute(message))
            self._load(message)
            self.momentum = self._optimizer_state()
            return [p.detach().clone() for p in self.model.parameters()]
        finally:
            self.end.close()

    def _next(self):
        while True:
            message = self.end.receive()
            if isinstance(message, messages.PositionRequest):
                self._send_position(message.checkpoint)
            elif isinstance(message, messages.Assignment | messages.RunEnded):
                if message.position_wanted:
                    self._send_position(message.position_wanted)
                return message

    def _send_position(self, checkpoint):
        self.end.send(messages.PositionReport(checkpoint, b"worker %d" % self.number))

    @torch.no_grad()
    def _load(self, message):
        views = self.end.fetch(message)
        for own, values in (
            (self.state.parameters[0], views.parameters[0]),
            (self.state.buffers, views.buffers),
            (self.state.counters, views.counters),
        ):
            for target, source in zip(own, values, strict=True):
                target.copy_(source)

    def _compute(self, message):
        x, y = batch(self.number, message.version)
        self.model.zero_grad()
        nn.functional.mse_loss(self.model(x), y).backward()
        gradients = [p.grad for p in self.state.parameters[0]]
        with torch.no_grad():
            for own, values in (
                (self.slot.parameters[0], gradients),
                (self.slot.buffers, self.state.buffers),
                (self.slot.counters, self.state.counters),
            ):
                for target, source in zip(own, values, strict=True):
                    target.copy_(source)
        sq_norm = float(sum(g.square().sum() for g in gradients))
        return messages.GradientReport(message.turn, message.version, 0, len(x), 0.0, sq_norm)

    def _optimizer_state(self):
        self.end.send(messages.StateRequest("optimizer", 0))
        reply = self.end.receive()
        assert isinstance(reply, messages.StateReply)
        state = self.end.receive_state(reply)["state"]
        return [state[i]["momentum_buffer"] for i in sorted(state)]


@dataclass
class Outcome:
    """The result of a run."""

    failure: str
    weights: list[torch.Tensor]  # the server's
    buffers: list[torch.Tensor]
    momentum: list[torch.Tensor]
    worker_weights: list[list[torch.Tensor]]
    worker_momentum: list[list[torch.Tensor]]
    trace: Trace
    checkpoint: Any


class InProcess:
    """A network inside this process."""

    def __init__(self, spec):
        self.store = InProcessStore(spec)
        self.connections = InProcessNetwork(self.store)

    def connect(self, spec):
        return self.connections.connect()


class SharedMemory:
    """Real sockets and shared memory."""

    def __init__(self, spec):
        self.address = f"unix:@paceline-test-{secrets.token_hex(8)}"
        self.store = SharedMemoryStore(spec)
        self.connections = shared_memory_listener(self.address, self.store)

    def connect(self, spec):
        return SharedMemoryWorker(connect(self.address, TOKEN, timeout_s=20.0), spec)


def run(transport, folder, policy="sync"):
    """Train over a transport, with the server in this thread and the workers in others."""
    folder.mkdir()
    settings = Settings(
        spec=RunSpec(workers=WORKERS, steps=STEPS), policy=policy, checkpoint_every="2"
    )
    model, optimizer, state = make_script()
    scripts = [make_script() for _ in range(WORKERS)]
    network = transport(state.spec)
    decider = Decider(parse_policy(policy), settings.spec)
    kept = decider.policy.versions_kept
    shard = Shard(state, [], network.store, versions_kept=kept)
    path = folder / "trace.jsonl"
    recorder = Recorder(path, Header.of("run", decider.policy, settings.spec, {}))
    server = Server(
        settings,
        decider,
        shard,
        network.connections,
        recorder,
        checkpointer_for(settings, folder),
    )
    workers = []

    def train(number):
        try:
            worker = WorkerThread(network.connect(state.spec), number, scripts[number])
            workers.append(worker)
            return worker.train()
        except BaseException:
            network.connections.stop_wanted = True  # so that the test fails instead of hanging
            raise

    with ThreadPoolExecutor(WORKERS) as pool:
        training = [pool.submit(train, number) for number in range(WORKERS)]
        failure = server.serve()
    network.store.close()
    trace = read_trace(path)
    audit(trace)
    return Outcome(
        failure=failure,
        weights=[p.detach().clone() for p in model.parameters()],
        buffers=[b.clone() for b in shard.newest.views.buffers + shard.newest.views.counters],
        momentum=[optimizer.state[p]["momentum_buffer"] for p in model.parameters()],
        worker_weights=[future.result() for future in training],
        worker_momentum=[worker.momentum for worker in workers],
        trace=trace,
        checkpoint=Archive(folder / "checkpoints", print).load(),
    )


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_weights_are_those_of_the_run_over_shared_memory(tmp_path):
    here = run(InProcess, tmp_path / "in-process")
    there = run(SharedMemory, tmp_path / "shared-memory")
    for outcome in (here, there):
        contributors = [sorted(update.contributors) for update in outcome.trace.updates()]
        assert contributors == [[0, 1]] * STEPS
        check_ending(outcome)
    assert_equal(here.weights, there.weights)
    assert_equal(here.momentum, there.momentum)
    assert_equal(here.buffers, there.buffers)


def check_ending(outcome):
    """Check that the run made all updates and that workers got the server's final state."""
    assert outcome.failure == ""
    assert len(list(outcome.trace.updates())) == STEPS
    for weights in outcome.worker_weights:
        assert_equal(weights, outcome.weights)
    for momentum in outcome.worker_momentum:
        assert_equal(momentum, outcome.momentum)


@pytest.mark.parametrize("policy", ["backup:1", "async", "ssp:1", "delayed:1"])
@pytest.mark.parametrize("transport", [InProcess, SharedMemory])
def test_every_kind_of_policy_runs_over_every_transport(tmp_path, transport, policy):
    check_ending(run(transport, tmp_path / "run", policy))


@pytest.mark.parametrize("transport", [InProcess, SharedMemory])
def test_checkpoint_has_the_last_version_and_all_positions(tmp_path, transport):
    outcome = run(transport, tmp_path / "run")
    saved = outcome.checkpoint
    assert saved.version == STEPS
    assert saved.positions == {number: b"worker %d" % number for number in range(WORKERS)}
    assert_equal(saved.shard["parameters"][0], outcome.weights)


def test_repeated_runs_in_process_are_equal(tmp_path):
    first, second = (run(InProcess, tmp_path / name) for name in ("first", "second"))
    assert_equal(first.weights, second.weights)
    assert_equal(first.momentum, second.momentum)


def test_weights_are_those_of_plain_training(tmp_path):
    outcome = run(InProcess, tmp_path / "run")
    model, optimizer, _ = make_script()
    for version in range(STEPS):
        optimizer.zero_grad()
        for worker in range(WORKERS):
            x, y = batch(worker, version)
            (nn.functional.mse_loss(model(x), y) / WORKERS).backward()
        optimizer.step()
    for found, expected in zip(outcome.weights, model.parameters(), strict=True):
        torch.testing.assert_close(found, expected.detach())
