# SPDX-License-Identifier: BSD-3-Clause
"""A server begins or continues the run in its folder; if it cannot listen, it touches no file."""

import os
import secrets
import signal
from threading import Thread

import pytest
import torch
import torch._dynamo  # an optimizer loads it, and it sets an environment variable
from torch import nn

from paceline.errors import CheckpointError, SpecError, TraceError
from paceline.run.launch.environment import Identity
from paceline.run.net import messages
from paceline.run.net.address import listen
from paceline.run.net.handshake import new_token
from paceline.run.script import ServerRun
from paceline.run.server import server
from paceline.run.server.assembly import LocalHost, TrainedObjects, serve_run
from paceline.run.server.checkpoint_file import saved_trace
from paceline.run.settings import Settings
from paceline.run.tensors.layout import gather
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.trace.schema import FINISHED, Ended, Restored
from paceline.watch.audit import audit
from paceline.watch.gaps import check_complete, missing_parts
from strangers import RawPeer


@pytest.fixture
def identity(tmp_path):
    """Return the identity of a server whose run another server is writing to."""
    Settings(spec=RunSpec(workers=1, steps=3)).write(tmp_path / "spec.json")
    (tmp_path / "token").write_text(new_token())
    (tmp_path / "trace.jsonl").write_text('{"type":"header"}\n{"type":"jo')
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "0000000003.ckpt").write_text("it seems to be damaged")
    (tmp_path / "checkpoints" / "0000000004.partial").write_text("half of it")
    address = f"unix:@paceline-test-{secrets.token_hex(8)}"
    return Identity(address, tmp_path / "token", tmp_path, None)


@pytest.fixture(autouse=True)
def _restore_process_settings():
    """A server sets the number of threads and handles signals."""
    threads = torch.get_num_threads()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    """Nobody launches these servers, so they need not wait for a launcher at the end."""
    monkeypatch.setattr(server, "LINGER_S", 0.0)


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def start(identity):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ServerRun(identity).prepare(model, optimizer)


def test_second_server_fails_and_changes_nothing(identity):
    before = files(identity.run_dir)
    with (
        listen(identity.address),
        pytest.raises(SpecError, match=f"cannot listen at {identity.address}: Address already"),
    ):
        start(identity)
    assert files(identity.run_dir) == before


@pytest.mark.parametrize("trace", ["present", "absent"])
def test_server_that_cannot_listen_changes_nothing(identity, trace):
    if trace == "absent":
        (identity.run_dir / "trace.jsonl").unlink()
    before = files(identity.run_dir)
    nowhere = f"unix:{identity.run_dir}/nowhere/server"
    with pytest.raises(SpecError, match=r"cannot listen at .*: No such file"):
        start(Identity(nowhere, identity.token_file, identity.run_dir, None))
    assert files(identity.run_dir) == before


def test_server_without_a_token_changes_nothing(identity):
    os.truncate(identity.token_file, 0)
    before = files(identity.run_dir)
    with pytest.raises(SpecError, match="token"):
        start(identity)
    assert files(identity.run_dir) == before


# ------------------------------------------------------------------------------- serving a run


class RunOfOne:
    """A run in a folder, with a thread as its only worker."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "token").write_text(new_token())
        address = f"unix:@paceline-test-{secrets.token_hex(8)}"
        self.identity = Identity(address, folder / "token", folder, None)
        self.model = None
        self.notices = []
        self.is_served = False  # its server has returned, or failed to start

    def serve(self, steps, updates=None, **options):
        """Serve the run to its end; the worker leaves after this many updates."""
        torch.manual_seed(len(self.notices))  # a new process has other weights
        self.model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        state = gather([self.model], [optimizer])
        settings = Settings(
            spec=RunSpec(workers=1, steps=steps),
            **{"checkpoint_every": "1", "patience_s": 0.0, **options},
        )
        errors = []
        self.is_served = False
        thread = Thread(target=self._work, args=(state.spec, updates, errors))
        thread.start()
        try:
            failure = serve_run(
                self.identity.run_dir,
                settings,
                TrainedObjects(state, [self.model]),
                LocalHost(self.identity),
            )
        finally:
            self.is_served = True
            thread.join()
        assert errors == []
        return failure

    def _work(self, spec, updates, errors):
        try:
            peer = self._connect().join(0, spec)
            message = peer.receive_assignment()
            while not isinstance(message, messages.RunEnded) and updates != 0:
                if message.position_wanted:
                    self._send_position(peer, message)
                peer.send(peer.gradient(message, torch.ones(1, 2)))
                updates = None if updates is None else updates - 1
                message = peer.receive_assignment()
            if message.position_wanted:
                self._send_position(peer, message)
            peer.close()
        except BaseException as error:
            errors.append(error)

    def _connect(self):
        while True:
            try:
                return RawPeer(self.identity.address, self.identity.token())
            except Exception:  # the server doesn't listen yet
                if self.is_served:
                    raise
                os.sched_yield()

    def _send_position(self, peer, message):
        self.notices.append(message.version)
        peer.send(messages.PositionReport(message.position_wanted, b"here"))

    @property
    def trace(self):
        trace = read_trace(self.folder / "trace.jsonl")
        audit(trace)
        return trace

    def exported(self):
        return torch.load(self.folder / "weights.pt")["weight"]


@pytest.fixture
def run(tmp_path):
    return RunOfOne(tmp_path)


def test_new_run_is_served_and_its_weights_are_written(run, capsys):
    assert run.serve(steps=3) == ""
    assert len(list(run.trace.updates())) == 3
    end = run.trace.records[-1]
    assert end == Ended(end.t, 3, (), FINISHED, checksum=end.checksum)
    assert end.checksum is not None
    assert torch.equal(run.exported(), run.model.weight)
    assert "3 updates of 3 samples" in capsys.readouterr().out


def test_next_server_continues_from_the_checkpoint(run, capsys):
    failure = run.serve(steps=5, updates=2)
    assert failure.startswith("only 0 of at least 1 workers")
    before = run.model.weight.detach().clone()
    assert run.serve(steps=5) == ""
    assert "continuing at version 2" in capsys.readouterr().out
    [restored] = [record for record in run.trace.records if isinstance(record, Restored)]
    assert (restored.version, restored.samples, restored.turns) == (2, 2, {0: 2})
    torch.testing.assert_close(run.model.weight.detach(), before - 3.0)
    assert [update.update for update in run.trace.updates()] == [1, 2, 3, 4, 5]
    assert torch.equal(run.exported(), run.model.weight)


def test_run_without_a_checkpoint_starts_from_the_beginning(run, capsys):
    run.serve(steps=5, updates=2, checkpoint_every="0")
    assert run.serve(steps=5, checkpoint_every="0") == ""
    assert "there is no checkpoint: starting from the beginning" in capsys.readouterr().out
    [restored] = [record for record in run.trace.records if isinstance(record, Restored)]
    assert restored.version == 0


def test_finished_run_that_is_served_again_writes_its_weights_again(run):
    """Its server may have been killed just before it wrote them."""
    assert run.serve(steps=2) == ""
    expected = run.exported()
    (run.folder / "weights.pt").unlink()
    assert run.serve(steps=2) == ""
    assert torch.equal(run.exported(), expected)


def test_weights_that_cannot_be_written_fail_the_run(run, capsys):
    (run.folder / "weights.pt").mkdir()
    why = "cannot write the weights: Is a directory"
    assert run.serve(steps=1) == why
    assert why in capsys.readouterr().out
    assert run.trace.records[-1].reason == why
    (run.folder / "weights.pt").rmdir()
    assert run.serve(steps=1) == ""  # nothing is left to do but this
    assert torch.equal(run.exported(), run.model.weight)
    assert run.trace.records[-1].reason == FINISHED


@pytest.mark.parametrize("damage", ["the end was lost", "a line was removed", "it is missing"])
def test_trace_that_lacks_what_a_checkpoint_refers_to_gets_a_gap(run, capsys, damage):
    run.serve(steps=5, updates=2)
    path = run.folder / "trace.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if b'"update"' in line)
    if damage == "it is missing":
        path.unlink()
    else:
        kept = lines[:last] if damage == "the end was lost" else lines[:2] + lines[3:last]
        path.write_bytes(b"".join(kept))
    assert run.serve(steps=5) == ""
    assert "the trace is missing records from before the last checkpoint" in capsys.readouterr().out
    trace = read_trace(path)
    [part] = missing_parts(trace)
    assert part.version == 2
    with pytest.raises(TraceError, match="has a gap"):
        check_complete(trace, "trace.jsonl", None)
    if damage == "a line was removed":
        with pytest.raises(TraceError, match="trace:3: "):
            audit(trace)
    else:
        audit(trace)


def test_whole_trace_gets_no_gap(run):
    run.serve(steps=5, updates=2)
    assert run.serve(steps=5) == ""
    assert missing_parts(run.trace) == []
    assert saved_trace(run.folder / "checkpoints").version == 5


def test_damaged_checkpoints_are_an_error(identity):
    Settings(spec=RunSpec(workers=1, steps=3)).write(identity.run_dir / "spec.json")
    (identity.run_dir / "trace.jsonl").unlink()
    with pytest.raises(CheckpointError, match="is intact; start a new run"):
        start(identity)
