# SPDX-License-Identifier: BSD-3-Clause
"""Throws bytes that a fuzzer makes at everything that reads what a peer sends.

    make fuzz

Whatever comes, a reader gives a message, or raises `ProtocolError`; a message that was understood
comes back as it was, and nobody is trusted who does not have the token. Options are those of
libFuzzer, for instance `-max_total_time=60`; input that breaks something is kept as `crash-*`.
"""

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from random import Random

import atheris

sys.path.append(str(Path(__file__).parents[1]))

with atheris.instrument_imports(include=["paceline.run"]):
    from paceline.errors import PeerLost, ProtocolError
    from paceline.run.net import messages
    from paceline.run.net.channel import STRANGER_LIMIT, Challenger, Channel, Frames
    from paceline.run.server.peers import Peer
    from paceline.run.tensors.region import Region
    from paceline.run.tensors.state import pack, unpack

import torch  # beside it, so that it is not instrumented

from message_examples import EXAMPLES

DECODERS = (messages.decode_stranger, messages.decode_worker, messages.decode_server)
MEMORY_BYTES = 4096


def read_frames(data: bytes) -> None:
    """The bytes are a stream of frames, and each frame may be a message."""
    frames = Frames(STRANGER_LIMIT)
    frames.feed(data)
    with suppress(ProtocolError):
        while (body := frames.cut()) is not None:
            read_message(body)


def read_message(data: bytes) -> None:
    """The bytes are a message."""
    for decode in DECODERS:
        try:
            message = decode(data)
        except ProtocolError:
            continue
        again = messages.encode(message)
        assert messages.encode(decode(again)) == again


def read_state(data: bytes, fd: int) -> None:
    """The bytes are a tree whose tensors lie in this memory."""
    with suppress(ProtocolError):
        unpack(data, fd)


def read_stranger(data: bytes) -> None:
    """The bytes are what a stranger says to the server."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    channel = Channel(ours, messages.decode_stranger, STRANGER_LIMIT)
    peer = Peer(channel, Challenger("token"), came_at=0.0)
    with theirs, suppress(ProtocolError, PeerLost):
        theirs.sendall(data)
        for message in channel.receive_nowait():
            peer.introduce(message)
    assert not peer.is_proven
    channel.close()


def good_bytes() -> list[bytes]:
    """A message of each kind, alone and in its frame, and a state."""
    tree, fd = pack({"state": {0: {"a": torch.ones(3), "b": [1, 2.5, None]}}}, "fuzz")
    os.close(fd)
    bodies = [messages.encode(message) for message in EXAMPLES]
    return [tree, *bodies, *(len(body).to_bytes(4, "little") + body for body in bodies)]


def main() -> None:
    _, fd = Region.create(MEMORY_BYTES, "fuzz")
    good = good_bytes()

    def read(data: bytes) -> None:
        read_frames(data)
        read_message(data)
        read_state(data, fd)
        read_stranger(data[:MEMORY_BYTES])

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        # Of what is decoded in C the fuzzer sees nothing, so it would forget nearly all examples.
        random = Random(seed)
        begin = random.choice(good) if random.random() < 0.5 else data
        return atheris.Mutate(begin[:max_size], max_size)

    atheris.Setup(sys.argv, read, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
