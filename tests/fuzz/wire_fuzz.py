# SPDX-License-Identifier: BSD-3-Clause
"""Fuzz everything that reads bytes from a peer.

    make fuzz

Every input must either decode to a message that survives a round trip or raise `ProtocolError`, and
no input may authenticate a client that doesn't know the token. The options are libFuzzer's, for
instance `-max_total_time=60`. An input that breaks something is saved as `crash-*`.
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
    from paceline.run.net.channel import STRANGER_LIMIT, Channel, FrameBuffer
    from paceline.run.net.handshake import Challenger
    from paceline.run.tensors.shared_region import Region
    from paceline.run.tensors.state_packing import pack, unpack

import torch  # outside the block above, so that it is not instrumented

from message_examples import EXAMPLES

DECODERS = (messages.decode_stranger, messages.decode_worker, messages.decode_server)
MEMORY_BYTES = 4096


def read_frames(data: bytes) -> None:
    """Read the bytes as a stream of frames, and each frame as a message."""
    frames = FrameBuffer.with_limit(STRANGER_LIMIT)
    frames += data
    with suppress(ProtocolError):
        while (body := frames.next_body()) is not None:
            read_message(body)


def read_message(data: bytes) -> None:
    """Read the bytes as a message."""
    for decode in DECODERS:
        try:
            message = decode(data)
        except ProtocolError:
            continue
        again = messages.encode(message)
        assert messages.encode(decode(again)) == again


def read_state(data: bytes, fd: int) -> None:
    """Read the bytes as a state whose tensors are in this memory."""
    with suppress(ProtocolError):
        unpack(data, fd)


def read_stranger(data: bytes) -> None:
    """Read the bytes as what an unauthenticated client sends to the server."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    channel = Channel(ours, messages.decode_stranger, STRANGER_LIMIT)
    challenger, is_authenticated = Challenger("token"), False
    with theirs, suppress(ProtocolError, PeerLost):
        theirs.sendall(data)
        for message in channel.receive_nowait():
            if isinstance(message, messages.Hello):
                challenger.answer(message)
            else:
                challenger.check(message)
                is_authenticated = True
    assert not is_authenticated
    channel.close()


def valid_inputs() -> list[bytes]:
    """Return one of each message, with and without its frame, and a state."""
    tree, fd = pack({"state": {0: {"a": torch.ones(3), "b": [1, 2.5, None]}}}, "fuzz")
    os.close(fd)
    bodies = [messages.encode(message) for message in EXAMPLES]
    return [tree, *bodies, *(len(body).to_bytes(4, "little") + body for body in bodies)]


def main() -> None:
    _, fd = Region.create(MEMORY_BYTES, "fuzz")
    valid = valid_inputs()

    def read(data: bytes) -> None:
        read_frames(data)
        read_message(data)
        read_state(data, fd)
        read_stranger(data[:MEMORY_BYTES])

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        # The decoder is in C, where the fuzzer sees no coverage: it would drop nearly all examples.
        random = Random(seed)
        start = random.choice(valid) if random.random() < 0.5 else data
        return atheris.Mutate(start[:max_size], max_size)

    atheris.Setup(sys.argv, read, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
