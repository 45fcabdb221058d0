# SPDX-License-Identifier: BSD-3-Clause
"""Whatever bytes and messages come, they are understood or refused; nothing else ever happens."""

import os
import secrets
import socket
import struct
from contextlib import closing, suppress

import pytest
import torch
import torch._dynamo  # an optimizer loads it, and it sets a variable of the environment
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from message_examples import EXAMPLES, any_message, unhurried
from paceline.core.decider import Decider
from paceline.core.policies import parse_policy
from paceline.errors import PeerLost, ProtocolError
from paceline.release import RELEASE
from paceline.run.net import messages
from paceline.run.net.channel import MEMBER_LIMIT, STRANGER_LIMIT, Challenger, Frames, listen
from paceline.run.server.listener import Listener
from paceline.run.server.peers import Peer
from paceline.run.server.recorder import Recorder
from paceline.run.server.server import Server
from paceline.run.settings import Settings
from paceline.run.tensors.layout import gather
from paceline.run.tensors.region import Region
from paceline.run.tensors.shard import Shard
from paceline.run.tensors.state import unpack
from paceline.run.tensors.state_spec import OptionChange
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.trace.schema import Header
from paceline.watch.audit import audit
from server_harness import TOKEN, keeper_of
from strangers import Raw, prove

DECODERS = [messages.decode_stranger, messages.decode_worker, messages.decode_server]
STREAM = b"".join(struct.pack("<I", len(b)) + b for b in map(messages.encode, EXAMPLES))


@st.composite
def spoiled(draw, whole=STREAM):
    """A piece of good bytes with a few of them changed, lost, or said twice."""
    begin = draw(st.integers(0, len(whole)))
    data = bytearray(whole[begin : draw(st.integers(begin, len(whole)))])
    for _ in range(draw(st.integers(0, 4))):
        i, j = sorted(draw(st.tuples(st.integers(0, len(data)), st.integers(0, len(data)))))
        data[i:j] = draw(st.one_of(st.binary(max_size=8), st.just(bytes(data[i:j]) * 2)))
    return bytes(data)


any_bytes = st.one_of(st.binary(max_size=600), spoiled())


@unhurried
@given(any_bytes, st.lists(st.integers(1, 100)), st.sampled_from([STRANGER_LIMIT, MEMBER_LIMIT]))
def test_frames_are_the_same_however_bytes_are_split(data, sizes, limit):
    whole, parts = Frames(limit), Frames(limit)
    whole.feed(data)
    cuts = [*sizes, len(data)]
    expected, found = cut_all(whole), []
    for size in cuts:
        parts.feed(data[:size])
        data = data[size:]
        found += cut_all(parts)
        if found and found[-1] is None:  # the peer is shown out
            break
    assert found == expected


def cut_all(frames):
    """All frames that are whole; None at the end where the next is refused."""
    found = []
    try:
        while (body := frames.cut()) is not None:
            found.append(body)
            assert 0 < len(body) <= frames.limit
    except ProtocolError:
        found.append(None)
    return found


@unhurried
@given(st.one_of(any_bytes, spoiled(messages.encode(EXAMPLES[3]))))
def test_bytes_are_a_message_or_refused(data):
    for decode in DECODERS:
        with suppress(ProtocolError):
            message = decode(data)
            assert messages.encode(decode(messages.encode(message))) == messages.encode(message)


@unhurried
@given(any_bytes)
def test_bytes_are_a_state_or_refused(data):
    region, fd = Region.create(64, "test")
    del region
    with open(fd, "rb"), suppress(ProtocolError):
        unpack(data, fd)


@pytest.fixture(scope="module")
def listener():
    listener = Listener(listen(f"unix:@paceline-test-{secrets.token_hex(8)}"), TOKEN)
    yield listener
    listener.shut()


def attend(listener):
    """Hear everybody once; what workers said. Nothing but the two errors of a link may come."""
    said = []
    for peer in listener.wait(0.0):
        try:
            said += listener.hear(peer)
        except (ProtocolError, PeerLost) as error:
            listener.close(peer, str(error))
    return said


@unhurried
@given(data=st.lists(any_bytes, max_size=3), hello=st.booleans())
def test_whatever_a_stranger_says_the_door_stays_open_for_others(listener, data, hello):
    stranger, friend = (socket.socket(socket.AF_UNIX) for _ in range(2))
    with closing(stranger), closing(friend):
        stranger.connect(listener._listener.getsockname())
        if hello:
            stranger.sendall(framed(messages.Hello(messages.PROTOCOL, bytes(32))))
        for part in data:
            with suppress(BrokenPipeError, ConnectionResetError):
                stranger.sendall(part)
            assert attend(listener) == []  # it has not proved anything
        friend.connect(listener._listener.getsockname())
        friend.sendall(framed(messages.Hello(messages.PROTOCOL, bytes(32))))
        friend.setblocking(False)
        answer = b""
        while not answer:
            assert attend(listener) == []
            with suppress(BlockingIOError):
                answer = friend.recv(4096)
        assert isinstance(messages.decode_server(answer[4:]), messages.Challenge)
    attend(listener)


def framed(message):
    body = messages.encode(message)
    return struct.pack("<I", len(body)) + body


class Deaf:
    """The server's end of a link to nobody."""

    def send(self, message):
        pass

    def trust(self, decode):
        raise AssertionError("it was trusted")


@unhurried
@given(st.lists(any_message(messages.FromStranger), max_size=4))
def test_nobody_is_trusted_by_guessing(said):
    peer = Peer(Deaf(), Challenger(TOKEN), came_at=0.0)
    with suppress(ProtocolError):
        for message in said:
            peer.introduce(message)
    assert not peer.is_proven


# ------------------------------------------------------- a worker that says anything at any moment

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


class Table:
    """A server, and workers whose messages it hears one at a time."""

    def __init__(self, policy, path):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        common = gather([model], [torch.optim.SGD(model.parameters(), lr=0.1)])
        self.contents = common.contents
        spec = Settings(spec=RunSpec(workers=3, steps=4), policy=policy, checkpoint_every="2")
        self.decider = Decider(parse_policy(policy), spec.spec)
        self.shard = Shard(common, [], spec, self.decider.policy.versions_kept)
        self.model = model
        self.address = f"unix:@paceline-test-{secrets.token_hex(8)}"
        self.listener = Listener(listen(self.address), TOKEN)
        self.seated = []
        self.recorder = Recorder(path, Header.of("run", self.decider.policy, spec.spec, {}))
        self.checkpointer = keeper_of(spec, path.parent)
        self.server = Server(
            spec, self.decider, self.shard, self.listener, self.recorder, self.checkpointer
        )

    def hear(self):
        """Hear all that was said, as the server does in its loop."""
        while peers := self.listener.wait(0.0):
            for peer in peers:
                self.server._hear(peer)
            self.server._lose_the_lost()
            self.decider.check()

    def seat(self, worker):
        """Let a worker join."""
        raw = Raw(self.address).say(messages.Hello(messages.PROTOCOL, bytes(32)))
        self.listener.wait(0.0)  # lets it in
        self.hear()
        raw.say(prove(TOKEN, raw.hear()), messages.Join(worker, RELEASE, self.contents))
        self.hear()
        self.seated.append(raw)

    def close(self):
        for raw in self.seated:
            raw.close()
        self.hear()
        self.checkpointer.finish()
        self.recorder.close()
        self.listener.shut()
        for fd in (self.shard.constants_fd, *(place.fd for place in self.shard._places)):
            os.close(fd)  # a server keeps them until its process ends


@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_a_worker_says_the_books_are_in_order(policy, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "trace.jsonl"

    @settings(unhurried, max_examples=15)
    @given(st.lists(st.tuples(FEW, LEGAL), max_size=12))
    def play(said):
        with closing(Table(policy, path)) as table:
            for worker in range(3):
                table.seat(worker)
            for worker, message in said:
                with suppress(PeerLost):
                    table.seated[worker].say(message)
                table.hear()
            assert all(p.isfinite().all() for p in table.model.parameters())
        audit(read_trace(path))

    play()
