# SPDX-License-Identifier: BSD-3-Clause
"""Frames are cut out of a stream of bytes, and a bad length is refused."""

import struct

import pytest

from paceline.errors import ProtocolError
from paceline.run.net.channel import MEMBER_LIMIT, STRANGER_LIMIT, FrameBuffer, frame


def test_frame_is_a_little_endian_length_and_the_body():
    assert frame(b"abc") == b"\x03\x00\x00\x00abc"


def test_frames_are_cut_wherever_the_stream_is_split():
    bodies = [b"a", b"bc" * 40, b"d" * 300]
    stream = b"".join(map(frame, bodies))
    for split in range(len(stream) + 1):
        frames, found = FrameBuffer.with_limit(MEMBER_LIMIT), []
        for part in (stream[:split], stream[split:]):
            frames += part
            while frames.has_frame():
                found.append(frames.next_body())
        assert found == bodies
        assert frames.next_body() is None


def test_incomplete_frame_stays_in_the_buffer():
    frames = FrameBuffer.with_limit(STRANGER_LIMIT)
    whole = frame(b"body")
    for i in range(len(whole) - 1):
        frames += whole[i : i + 1]
        assert not frames.has_frame()
        assert frames.next_body() is None
    frames += whole[-1:]
    assert frames.has_frame()
    assert frames.next_body() == b"body"


def test_frame_without_a_body_is_refused():
    frames = FrameBuffer.with_limit(STRANGER_LIMIT)
    frames += frame(b"")
    with pytest.raises(ProtocolError, match="a frame must have 1 to 256 bytes, got 0"):
        frames.next_body()


@pytest.mark.parametrize("length", [STRANGER_LIMIT + 1, MEMBER_LIMIT + 1, 2**32 - 1])
def test_long_frame_is_refused_before_its_body_arrives(length):
    frames = FrameBuffer.with_limit(STRANGER_LIMIT)
    frames += struct.pack("<I", length)
    with pytest.raises(ProtocolError, match=f"a frame must have 1 to 256 bytes, got {length}"):
        frames.next_body()
