# SPDX-License-Identifier: BSD-3-Clause
"""Any bytes and any messages are either accepted or refused; nothing crashes."""

import secrets
import socket
from contextlib import closing, suppress

import pytest
import torch
import torch._dynamo  # an optimizer loads it, and it sets an environment variable
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from message_examples import EXAMPLES, any_message, unhurried
from paceline.core.decider import Decider
from paceline.core.policies import parse_policy
from paceline.errors import PeerLost, ProtocolError
from paceline.release import RELEASE
from paceline.run.net import messages
from paceline.run.net.address import listen
from paceline.run.net.channel import MEMBER_LIMIT, STRANGER_LIMIT, FrameBuffer, frame
from paceline.run.net.handshake import Challenger
from paceline.run.net.shared_memory import SharedMemoryStore
from paceline.run.server.listener import Listener
from paceline.run.server.recorder import Recorder
from paceline.run.server.server import Server
from paceline.run.settings import Settings
from paceline.run.tensors.layout import gather
from paceline.run.tensors.shard import Shard
from paceline.run.tensors.shared_region import Region
from paceline.run.tensors.state_packing import unpack
from paceline.run.tensors.state_spec import OptionChange
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.trace.schema import Header
from paceline.watch.audit import audit
from server_harness import TOKEN, checkpointer_for, shared_memory_listener
from strangers import RawPeer, prove

DECODERS = [messages.decode_stranger, messages.decode_worker, messages.decode_server]
STREAM = b"".join(frame(messages.encode(message)) for message in EXAMPLES)


@st.composite
def damaged(draw, whole=STREAM):
    """A piece of valid bytes with a few of them changed, lost or repeated."""
    begin = draw(st.integers(0, len(whole)))
    data = bytearray(whole[begin : draw(st.integers(begin, len(whole)))])
    for _ in range(draw(st.integers(0, 4))):
        i, j = sorted(draw(st.tuples(st.integers(0, len(data)), st.integers(0, len(data)))))
        data[i:j] = draw(st.one_of(st.binary(max_size=8), st.just(bytes(data[i:j]) * 2)))
    return bytes(data)


any_bytes = st.one_of(st.binary(max_size=600), damaged())


@unhurried
@given(any_bytes, st.lists(st.integers(1, 100)), st.sampled_from([STRANGER_LIMIT, MEMBER_LIMIT]))
def test_frames_do_not_depend_on_how_bytes_are_split(data, sizes, limit):
    whole, parts = FrameBuffer.with_limit(limit), FrameBuffer.with_limit(limit)
    whole += data
    cuts = [*sizes, len(data)]
    expected, found = cut_all(whole), []
    for size in cuts:
        parts += data[:size]
        data = data[size:]
        found += cut_all(parts)
        if found and found[-1] is None:
            break
    assert found == expected


def cut_all(frames):
    """Return all complete frames, and None at the end if the next one is refused."""
    found = []
    try:
        while (body := frames.next_body()) is not None:
            found.append(body)
            assert 0 < len(body) <= frames.limit
    except ProtocolError:
        found.append(None)
    return found


@unhurried
@given(st.one_of(any_bytes, damaged(messages.encode(EXAMPLES[3]))))
def test_any_bytes_are_a_message_or_refused(data):
    for decode in DECODERS:
        with suppress(ProtocolError):
            message = decode(data)
            assert messages.encode(decode(messages.encode(message))) == messages.encode(message)


@unhurried
@given(any_bytes)
def test_any_bytes_are_a_state_or_refused(data):
    region, fd = Region.create(64, "test")
    del region
    with open(fd, "rb"), suppress(ProtocolError):
        unpack(data, fd)


@pytest.fixture(scope="module")
def listener():
    """A listener whose peers are plain channels, and that forgets what it refused."""
    listening = listen(f"unix:@paceline-test-{secrets.token_hex(8)}")
    listener = Listener([listening], TOKEN, lambda channel: channel, lambda _: None)
    listener.name = listening.getsockname()
    yield listener
    listener.shut_down()


@unhurried
@given(data=st.lists(any_bytes, max_size=3), hello=st.booleans())
def test_listener_survives_any_unauthenticated_client(listener, data, hello):
    intruder, client = (socket.socket(socket.AF_UNIX) for _ in range(2))
    with closing(intruder), closing(client):
        intruder.connect(listener.name)
        if hello:
            intruder.sendall(framed(messages.Hello(messages.PROTOCOL, bytes(32))))
        for part in data:
            with suppress(BrokenPipeError, ConnectionResetError):
                intruder.sendall(part)
            assert listener.wait(0.0) == []  # it is not authenticated
        client.connect(listener.name)
        client.sendall(framed(messages.Hello(messages.PROTOCOL, bytes(32))))
        client.setblocking(False)
        answer = b""
        while not answer:
            assert listener.wait(0.0) == []
            with suppress(BlockingIOError):
                answer = client.recv(4096)
        assert isinstance(messages.decode_server(answer[4:]), messages.Challenge)
    assert listener.wait(0.0) == []


def framed(message):
    return frame(messages.encode(message))


@unhurried
@given(st.lists(any_message(messages.FromStranger), max_size=4))
def test_no_client_is_authenticated_by_guessing(sent):
    challenger, is_authenticated = Challenger(TOKEN), False
    with suppress(ProtocolError):
        for message in sent:
            if isinstance(message, messages.Hello):
                challenger.answer(message)
            else:
                challenger.check(message)
                is_authenticated = True
    assert not is_authenticated


# ------------------------------------------------------ a worker that sends anything at any time

FEW = st.integers(0, 2)
LEGAL = st.one_of(
    st.builds(
        messages.GradientReport,
        turn=st.integers(0, 4),
        version=FEW,
        optimizer=st.sampled_from([0, 0, 0, 1]),
        samples=st.integers(1, 3),
        compute_s=st.just(0.1),
        sq_norm=st.sampled_from([1.0, 1.0, None]),
        unused=st.sampled_from([(), (), (1,), (2,)]),
        options=st.sampled_from([(), (), (OptionChange(0, 0, "lr", 0.5),)]),
        cancelled=st.booleans(),
    ),
    st.builds(messages.AbandonReport, st.integers(0, 4), st.just(0.1)),
    st.builds(messages.StateRequest, st.sampled_from(["optimizer", "average"]), FEW),
    st.builds(messages.StateUpload, FEW, st.binary(max_size=4)),
    any_message(messages.FromWorker),
)


POLICIES = [
    "sync",
    "backup:1",
    "batchsync:2",
    "deadline",
    "async",
    "softsync:2",
    "ssp:1",
    "delayed:1",
]


class FuzzedServer:
    """A server, and workers whose messages it handles one at a time."""

    def __init__(self, policy, path):
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        state = gather([self.model], [torch.optim.SGD(self.model.parameters(), lr=0.1)])
        self.spec = state.spec
        settings = Settings(spec=RunSpec(workers=3, steps=4), policy=policy, checkpoint_every="2")
        self.decider = Decider(parse_policy(policy), settings.spec)
        self.store = SharedMemoryStore(self.spec)
        kept = self.decider.policy.versions_kept
        shard = Shard(state, [], self.store, versions_kept=kept)
        self.address = f"unix:@paceline-test-{secrets.token_hex(8)}"
        self.listener = shared_memory_listener(self.address, self.store)
        self.workers = []
        self.recorder = Recorder(path, Header.of("run", self.decider.policy, settings.spec, {}))
        self.checkpointer = checkpointer_for(settings, path.parent)
        self.server = Server(
            settings, self.decider, shard, self.listener, self.recorder, self.checkpointer
        )

    def handle_all(self):
        """Handle everything that has arrived, as the server does in its loop."""
        while peers := self.listener.wait(0.0):
            for peer in peers:
                self.server._take(peer)
            for peer, reason, _ in self.server._roster.take_broken():
                self.server._lose(peer, reason)
            self.decider.check()

    def add_worker(self, number):
        """Let a worker join."""
        worker = RawPeer(self.address).send(messages.Hello(messages.PROTOCOL, bytes(32)))
        self.workers.append(worker)
        self.listener.wait(0.0)  # accepts it
        self.listener.wait(0.0)  # answers its hello
        worker.send(prove(TOKEN, worker.receive()), messages.Join(number, RELEASE, self.spec))
        self.handle_all()

    def close(self):
        for worker in self.workers:
            worker.close()
        self.handle_all()
        self.checkpointer.finish()
        self.recorder.close()
        self.listener.shut_down()
        self.store.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_server_stays_consistent_whatever_workers_send(policy, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "trace.jsonl"

    @settings(unhurried, max_examples=15)
    @given(st.lists(st.tuples(FEW, LEGAL), max_size=12))
    def check(sent):
        with closing(FuzzedServer(policy, path)) as server:
            for worker in range(3):
                server.add_worker(worker)
            for worker, message in sent:
                with suppress(PeerLost):
                    server.workers[worker].send(message)
                server.handle_all()
            assert all(p.isfinite().all() for p in server.model.parameters())
        audit(read_trace(path))

    check()
