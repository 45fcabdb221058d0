# SPDX-License-Identifier: BSD-3-Clause
"""The server's loop, with in-process workers that a test controls message by message."""

import gc
import os
import weakref
from threading import Thread

import pytest
import torch
import torch._dynamo  # an optimizer loads it, and it sets an environment variable
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from paceline.core.decider import Decider
from paceline.core.events import Fate
from paceline.core.policies import parse_policy
from paceline.errors import PeerLost
from paceline.release import RELEASE
from paceline.run.net import messages
from paceline.run.net.in_process import InProcessNetwork, InProcessPeer, InProcessStore
from paceline.run.net.shared_memory import SharedMemoryPeer
from paceline.run.server import server as server_module
from paceline.run.server.recorder import Recorder
from paceline.run.server.server import Server
from paceline.run.settings import Settings
from paceline.run.system import System
from paceline.run.tensors.layout import gather
from paceline.run.tensors.shard import Shard
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.trace.schema import FINISHED, STOPPED, Header, Joined, Left, Missing
from paceline.watch.audit import audit
from server_harness import checkpointer_for, serve


class Worker:
    """A worker that a test controls."""

    def __init__(self, network, number, spec):
        self.end = network.connect()
        self.number = number
        self.end.send(messages.Join(number, RELEASE, spec))

    def receive(self):
        assert self.end.wait_readable(20.0), "the server sent nothing"
        return self.end.receive()

    def join(self):
        assert isinstance(self.receive(), messages.Welcome)
        return self

    def report(self, assignment, value=1.0, **fields):
        """Report a gradient of ones, or of this value."""
        for flat in self.end.open_slot().slot.flats[0]:
            flat.fill_(value)
        usual = {"turn": assignment.turn, "version": assignment.version, "optimizer": 0}
        usual |= {"samples": 1, "compute_s": 0.0, "sq_norm": 1.0}
        self.end.announce(messages.GradientReport(**{**usual, **fields}))

    def wait_end(self):
        """Report nothing until the run has ended; return the last message."""
        while not isinstance(message := self.receive(), messages.RunEnded):
            pass
        self.end.close()
        return message

    def train_to_the_end(self):
        """Answer assignments until the run has ended; return the last message."""
        while isinstance(message := self.receive(), messages.Assignment):
            self.report(message)
        assert isinstance(message, messages.RunEnded)
        self.end.close()
        return message


class Stage:
    """A real server, and a network to which a test connects workers."""

    def __init__(self, folder, policy="sync", **options):
        spec = {name: options.pop(name) for name in ("workers", "steps", "late") if name in options}
        settings = Settings(
            spec=RunSpec(**{"workers": 1, "steps": 3, **spec}),
            policy=policy,
            **{"checkpoint_every": "0", **options},
        )
        self.model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        state = gather([self.model], [self.optimizer])
        self.spec = state.spec
        store = InProcessStore(self.spec)
        self.stopped = False  # whether the OS says that the workers' processes are stopped
        system = System(is_stopped=lambda _: self.stopped)
        self.network = InProcessNetwork(store, system=system)
        decider = Decider(parse_policy(policy), settings.spec)
        self.shard = Shard(state, [], store, ema=settings.ema)
        self.path = folder / "trace.jsonl"
        recorder = Recorder(self.path, Header.of("run", decider.policy, settings.spec, {}))
        checkpointer = checkpointer_for(settings, folder)
        self.server = Server(settings, decider, self.shard, self.network, recorder, checkpointer)

    def worker(self, number=0):
        return Worker(self.network, number, self.spec)

    def serve(self, play):
        """Serve the run while `play` happens in another thread; return the failure and trace."""
        errors = []

        def act():
            try:
                play()
            except BaseException as error:  # raised again in the test's own thread
                errors.append(error)
                self.network.stop_wanted = True
                for peer in list(self.network._peers):
                    self.network.close(peer)

        thread = Thread(target=act)
        thread.start()
        failure = self.server.serve()
        thread.join()
        if errors:
            raise errors[0]
        trace = read_trace(self.path)
        audit(trace)
        return failure, trace


@pytest.fixture
def stage(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "TICK_S", 0.01)
    return lambda **options: Stage(tmp_path, **options)


# -------------------------------------------------------------------------------------- messages


def test_run_goes_from_join_to_end(stage):
    one = stage(steps=3)
    ends = []
    failure, trace = one.serve(lambda: ends.append(one.worker().join().train_to_the_end()))
    assert failure == ""
    assert [end.version for end in ends] == [3]
    assert ends[0].notice == messages.FateNotice(Fate.ACCEPTED, 2, 0, 1)
    assert [update.contributors for update in trace.updates()] == [(0,)] * 3
    assert trace.records[-1].reason == FINISHED
    assert one.model.weight.tolist() == [[-3.0, -3.0]]


def test_worker_that_joins_after_the_end_is_told(stage, tmp_path):
    one = stage(steps=1, workers=2, policy="backup:1")
    ends = []

    def play():
        first = one.worker(0).join()
        second = one.worker(1)
        second.end.close()  # it dies while it joins; the run begins without it
        first.train_to_the_end()
        ends.append(one.worker(1).join().train_to_the_end())

    failure, _ = one.serve(play)
    assert failure == ""
    assert [end.version for end in ends] == [1]


def test_run_begins_without_a_worker_that_is_unavailable(stage, capsys):
    one = stage(steps=2, workers=2)

    def play():
        launcher = one.network.connect()
        launcher.send(messages.WorkerUnavailable(1, "it fails"))
        launcher.send(messages.WorkerUnavailable(1, "it still fails"))
        one.worker(0).join().train_to_the_end()
        launcher.close()

    failure, trace = one.serve(play)
    assert failure == ""
    assert [r.worker for r in trace.records if isinstance(r, Missing)] == [1]
    assert capsys.readouterr().out.count("not waiting for worker 1: it fails") == 1


def test_abandoned_turn_is_recorded_and_computed_again(stage):
    one = stage(steps=1)

    def play():
        worker = one.worker().join()
        worker.end.send(messages.AbandonReport(worker.receive().turn, 0.0))
        assignment = worker.receive()
        assert (assignment.turn, assignment.version) == (2, 0)
        assert assignment.notice.fate is Fate.CANCELLED
        worker.report(assignment)
        worker.train_to_the_end()

    _, trace = one.serve(play)
    assert [str(gradient.fate) for gradient in trace.gradients()] == ["cancelled", "accepted"]


def test_report_of_another_turn_breaks_the_protocol_and_changes_nothing(stage, capsys):
    one = stage(steps=1)

    def play():
        bad = one.worker(0).join()
        bad.report(bad.receive(), turn=9)
        refused = bad.receive()
        assert refused == messages.Refused("no report is due for turn 9")
        with pytest.raises(PeerLost):
            bad.receive()
        one.worker(0).join().train_to_the_end()

    failure, trace = one.serve(play)
    assert failure == ""
    [left, _] = [r for r in trace.records if isinstance(r, Left)]
    assert left.reason == "broke the protocol: no report is due for turn 9"
    assert left.working_since is not None
    assert "worker 0 left: broke the protocol" in capsys.readouterr().out


def test_states_are_sent_and_loaded(stage):
    one = stage(steps=1, ema=0.5)
    received = []

    def play():
        worker = one.worker().join()
        assignment = worker.receive()
        for request in (messages.StateRequest("average"), messages.StateRequest("optimizer")):
            worker.end.send(request)
            received.append(worker.end.receive_state(worker.receive()))
        received[1]["param_groups"][0]["lr"] = 0.25
        worker.end.send_state(0, received[1], has_begun=True)
        assert worker.receive() == messages.StateReply(0)
        worker.report(assignment)
        worker.train_to_the_end()

    one.serve(play)
    assert received[0][0][0].tolist() == [[0.0, 0.0]]
    assert one.model.weight.tolist() == [[-0.25, -0.25]]


@pytest.mark.parametrize(("has_begun", "lr"), [(True, 0.25), (False, 1.0)])
def test_first_upload_of_a_late_worker_is_ignored(stage, has_begun, lr):
    """The others uploaded the same state at the beginning, and the run has moved on since."""
    one = stage(steps=2)

    def play():
        worker = one.worker().join()
        worker.report(worker.receive())
        assignment = worker.receive()
        state = one.optimizer.state_dict()
        state["param_groups"][0]["lr"] = 0.25
        worker.end.send_state(0, state, has_begun=has_begun)
        assert worker.receive() == messages.StateReply(0)
        worker.report(assignment)
        worker.train_to_the_end()

    one.serve(play)
    assert one.optimizer.param_groups[0]["lr"] == lr


# ------------------------------------------------------------------------------- timers and stops


def test_timer_of_a_policy_fires(stage):
    """Worker 1 never reports; the deadline makes the update without it."""
    one = stage(steps=1, workers=2, policy="deadline:after=0.05,n_min=1")

    def play():
        workers = [one.worker(number).join() for number in range(2)]
        assignments = [worker.receive() for worker in workers]
        workers[0].report(assignments[0])
        workers[0].train_to_the_end()
        workers[1].wait_end()

    failure, trace = one.serve(play)
    assert failure == ""
    assert [update.contributors for update in trace.updates()] == [(0,)]


def test_stop_ends_the_run_with_the_last_update(stage):
    one = stage(steps=None)

    def play():
        worker = one.worker().join()
        for _ in range(3):
            worker.report(worker.receive())
        worker.receive()
        one.network.stop_wanted = True
        assert worker.wait_end().version == 3

    failure, trace = one.serve(play)
    assert failure == ""
    assert (trace.records[-1].version, trace.records[-1].reason) == (3, STOPPED)


def test_worker_that_never_leaves_does_not_keep_a_stopped_run_from_ending(stage, monkeypatch):
    """A launcher kills its own workers, but this one may have been started by hand."""
    monkeypatch.setattr(server_module, "STOP_S", 0.05)
    one = stage(steps=None)

    def play():
        worker = one.worker().join()
        worker.report(worker.receive())
        worker.receive()
        one.network.stop_wanted = True

    failure, trace = one.serve(play)
    assert failure == ""
    assert (trace.records[-1].version, trace.records[-1].reason) == (1, STOPPED)


def test_run_that_made_no_update_fails(stage):
    one = stage()

    def play():
        worker = one.worker().join()
        worker.receive()
        one.network.stop_wanted = True
        worker.wait_end()

    failure, _ = one.serve(play)
    assert failure == "no update was made"


def test_run_fails_when_it_has_waited_too_long_for_workers(stage):
    one = stage(steps=None, patience_s=0.05)

    def play():
        worker = one.worker().join()
        worker.report(worker.receive())
        worker.receive()
        worker.end.close()

    failure, trace = one.serve(play)
    assert failure == "only 0 of at least 1 workers were here for 0.05 s"
    assert trace.records[-1].reason == failure


# ------------------------------------------------------------------------------ stopped processes


@pytest.fixture
def peers_with_pids(monkeypatch):
    """Let the server ask for the status of its workers' processes."""
    monkeypatch.setattr(InProcessPeer, "pid", os.getpid())


def wait_until(condition):
    while not condition():
        os.sched_yield()


@pytest.mark.usefixtures("peers_with_pids")
def test_stopped_worker_leaves_and_its_next_report_brings_it_back(stage, capsys):
    one = stage(steps=2)

    def play():
        worker = one.worker().join()
        assignment = worker.receive()
        one.stopped = True
        wait_until(lambda: not one.server._roster.active)
        one.stopped = False
        worker.report(assignment, value=99.0)  # void: the run has continued without it
        assignment = worker.receive()
        assert (assignment.turn, assignment.version) == (2, 0)
        worker.report(assignment)
        worker.train_to_the_end()

    failure, trace = one.serve(play)
    assert failure == ""
    kinds = [type(r) for r in trace.records if isinstance(r, Joined | Left)]
    assert kinds[:3] == [Joined, Left, Joined]
    assert next(r for r in trace.records if isinstance(r, Left)).reason == "stopped"
    assert one.model.weight.tolist() == [[-2.0, -2.0]]
    assert "worker 0 is back" in capsys.readouterr().out


@pytest.mark.usefixtures("peers_with_pids")
def test_worker_that_was_stopped_while_idle_returns_by_itself(stage, monkeypatch):
    one = stage(steps=2, workers=2)

    def play():
        idle, busy = (one.worker(number).join() for number in range(2))
        assignments = [worker.receive() for worker in (idle, busy)]
        idle.report(assignments[0])
        roster = one.server._roster
        wait_until(lambda: roster[0].asked_at is None)
        monkeypatch.setattr(roster[1].end, "pid", None)  # of another host
        one.stopped = True
        wait_until(lambda: len(roster.active) == 1)
        one.stopped = False
        wait_until(lambda: len(roster.active) == 2)
        busy.report(assignments[1])
        ends = [Thread(target=worker.train_to_the_end) for worker in (idle, busy)]
        for thread in ends:
            thread.start()
        for thread in ends:
            thread.join()

    failure, trace = one.serve(play)
    assert failure == ""
    contributors = [sorted(update.contributors) for update in trace.updates()]
    assert contributors == [[0, 1], [0, 1]]  # its gradient counts though it had left


# ----------------------------------------------------------------------------------------- memory


def test_slot_of_a_worker_that_left_is_freed_during_the_run(tmp_path, monkeypatch):
    """Over the real listener, and without the garbage collector."""
    slots = []
    open_slot = SharedMemoryPeer.open_slot

    def note_slot(peer, welcome):
        slot = open_slot(peer, welcome)
        flats = [flat.untyped_storage() for flat in slot.flats[0]]
        slots.append((weakref.ref(slot), [StorageWeakRef(flat) for flat in flats]))
        return slot

    monkeypatch.setattr(SharedMemoryPeer, "open_slot", note_slot)
    freed = []

    def intrude(harness):
        gc.disable()
        peer = harness.connect().join(9, harness.spec)
        assignment = peer.receive_assignment()
        peer.send(messages.AbandonReport(assignment.turn, 0.0)).receive_assignment()
        views, memory = slots[-1]
        assert views() is not None
        peer.close()
        for _ in range(10_000_000):
            if views() is None and all(storage.expired() for storage in memory):
                break
            os.sched_yield()
        freed.append(views() is None and all(storage.expired() for storage in memory))

    try:
        serve(intrude, tmp_path)
    finally:
        gc.enable()
    assert freed == [True]
