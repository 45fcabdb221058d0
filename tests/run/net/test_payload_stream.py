# SPDX-License-Identifier: BSD-3-Clause
"""Payloads arrive as they were sent, can be cancelled between chunks, and nothing else may come."""

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InternalError, ProtocolError
from paceline.run.net import payload_stream
from paceline.run.net.payload_stream import (
    Arrival,
    PayloadReceiver,
    PayloadSender,
    Span,
)

HEADER = struct.Struct("<QII")
CANCELLED = 2**32 - 1
SMALL_CHUNK = 8


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Cut payloads into chunks of a few bytes."""
    monkeypatch.setattr(payload_stream, "CHUNK_BYTES", SMALL_CHUNK)


def spans_with(*contents):
    return [Span(memoryview(bytearray(content))) for content in contents]


def empty_like(spans):
    return [Span(memoryview(bytearray(len(span.memory))), span.kind) for span in spans]


def contents(spans):
    return [bytes(span.memory) for span in spans]


def send_all(sender, limit=None):
    """Return what a sender sends, at most this many bytes of it."""
    sent = bytearray()
    while sender and (limit is None or len(sent) < limit):
        data = b"".join(sender.pending())
        part = data if limit is None else data[: limit - len(sent)]
        sender.sent(len(part))
        sent += part
    return bytes(sent)


def feed(receiver, data, sizes=()):
    """Let bytes arrive in pieces of these sizes, then as they fit; return what is complete."""
    found, sizes, at = [], iter(sizes), 0
    while at < len(data):
        space = receiver.space()
        count = min(len(space), len(data) - at, next(sizes, len(data)))
        space[:count] = data[at : at + count]
        at += count
        arrival = receiver.received(count)
        if arrival is not None:
            found.append(arrival)
    return found


def header(number, chunk, size):
    return HEADER.pack(number, chunk, size)


# ------------------------------------------------------------------------------------- round trips

some_spans = st.lists(st.binary(max_size=3 * SMALL_CHUNK), min_size=1, max_size=4).filter(any)
piece_sizes = st.lists(st.integers(1, 2 * SMALL_CHUNK), max_size=60)


@given(st.lists(some_spans, min_size=1, max_size=4), piece_sizes, piece_sizes)
def test_payloads_arrive_as_they_were_sent_however_they_are_split(payloads, send_sizes, sizes):
    sender, receiver = PayloadSender(), PayloadReceiver()
    sources = [spans_with(*payload) for payload in payloads]
    for number, source in enumerate(sources, 1):
        sender.add(number, source)
    sent, left = bytearray(), iter(send_sizes)
    while sender:
        data = b"".join(sender.pending())
        count = min(len(data), next(left, len(data)))
        sender.sent(count)
        sent += data[:count]
    arrivals = []
    for number, source in enumerate(sources, 1):
        target = empty_like(source)
        receiver.expect(number, target)
        assert receiver.is_expecting
        chunks = sum(-(-len(span.memory) // SMALL_CHUNK) for span in source)
        size = chunks * HEADER.size + sum(len(span.memory) for span in source)
        arrivals += feed(receiver, sent[:size], sizes)
        del sent[:size]
        assert not receiver.is_expecting
        assert contents(target) == contents(source)
    assert arrivals == [Arrival(number, True) for number in range(1, len(payloads) + 1)]
    assert not sent
    assert sender.sent_bytes == receiver.received_bytes


def test_every_chunk_has_a_header_and_spans_are_not_joined():
    sender = PayloadSender()
    sender.add(1, spans_with(b"a" * 11, b"", b"b" * 8))
    chunks = [(0, b"a" * 8), (1, b"a" * 3), (2, b"b" * 8)]
    expected = b"".join(header(1, n, len(body)) + body for n, body in chunks)
    assert send_all(sender) == expected
    assert sender.sent_bytes == len(expected)


def test_chunk_is_not_copied_to_be_sent():
    memory = bytearray(5)
    sender = PayloadSender()
    sender.add(1, [Span(memoryview(memory))])
    _, body = sender.pending()
    memory[:] = b"later"
    assert bytes(body) == b"later"


def test_sender_without_payloads_has_nothing_to_send():
    sender = PayloadSender()
    assert not sender
    assert sender.pending() == []
    assert sender.sent_bytes == 0


@pytest.mark.parametrize("spans", [[], [Span(memoryview(b""))]])
def test_empty_payload_is_an_internal_error(spans):
    sender = PayloadSender()
    with pytest.raises(InternalError, match="a payload must not be empty"):
        sender.add(1, spans)
    assert not sender


@pytest.mark.parametrize("number", [0, 1, 2])
def test_payload_that_is_expected_out_of_order_is_an_internal_error(number):
    receiver = PayloadReceiver()
    receiver.expect(2, spans_with(b"abc"))
    receiver.skip()
    with pytest.raises(InternalError, match=f"payload {number} can't be expected after 2"):
        receiver.expect(number, spans_with(b"abc"))


def test_only_one_payload_is_expected_at_a_time():
    receiver = PayloadReceiver()
    receiver.expect(1, spans_with(b"abc"))
    with pytest.raises(InternalError, match="payload 2 can't be expected after 1"):
        receiver.expect(2, spans_with(b"abc"))


# ---------------------------------------------------------------------------- cancelled by a sender


def test_payload_that_is_cancelled_before_it_begins_is_one_header():
    sender, receiver = PayloadSender(), PayloadReceiver()
    target = spans_with(b"untouched")
    sender.add(1, spans_with(b"x" * 9))
    sender.cancel(1)
    assert sender
    sent = send_all(sender)
    assert sent == header(1, CANCELLED, 0)
    receiver.expect(1, target)
    assert feed(receiver, sent) == [Arrival(1, False)]
    assert not receiver.is_expecting
    assert contents(target) == [b"untouched"]


@pytest.mark.parametrize("begun", [1, HEADER.size, HEADER.size + 1, HEADER.size + SMALL_CHUNK - 1])
def test_chunk_that_has_begun_is_sent_to_its_end_and_no_other(begun):
    sender, receiver = PayloadSender(), PayloadReceiver()
    sender.add(1, spans_with(b"a" * 24))
    sent = send_all(sender, begun)
    sender.cancel(1)
    sent += send_all(sender)
    assert sent == header(1, 0, 8) + b"a" * 8 + header(1, CANCELLED, 0)
    receiver.expect(1, spans_with(bytes(24)))
    assert feed(receiver, sent) == [Arrival(1, False)]


def test_cancellation_between_two_chunks_takes_effect_at_once():
    sender = PayloadSender()
    sender.add(1, spans_with(b"a" * 24))
    sent = send_all(sender, 2 * (HEADER.size + 8))
    sender.cancel(1)
    assert len(sent) == 2 * (HEADER.size + 8)
    assert send_all(sender) == header(1, CANCELLED, 0)


def test_payload_whose_last_chunk_has_begun_arrives_although_it_is_cancelled():
    sender, receiver = PayloadSender(), PayloadReceiver()
    target = spans_with(bytes(16))
    sender.add(1, spans_with(b"a" * 16))
    sent = send_all(sender, HEADER.size + 8 + 1)
    sender.cancel(1)
    sent += send_all(sender)
    receiver.expect(1, target)
    assert feed(receiver, sent) == [Arrival(1, True)]
    assert contents(target) == [b"a" * 16]


@pytest.mark.parametrize("number", [1, 3, 99])
def test_cancelling_a_payload_that_was_sent_or_never_added_does_nothing(number):
    sender = PayloadSender()
    sender.add(1, spans_with(b"a" * 8))
    send_all(sender)
    sender.add(2, spans_with(b"b" * 8))
    sender.cancel(number)
    assert send_all(sender) == header(2, 0, 8) + b"b" * 8


def test_cancelling_twice_sends_one_header():
    sender = PayloadSender()
    sender.add(1, spans_with(b"a" * 24))
    sent = send_all(sender, 1)
    sender.cancel(1)
    sender.cancel(1)
    assert (sent + send_all(sender)).count(header(1, CANCELLED, 0)) == 1


def test_payload_behind_a_cancelled_one_arrives():
    sender, receiver = PayloadSender(), PayloadReceiver()
    for number in (1, 2, 3):
        sender.add(number, spans_with(bytes([number]) * 20))
    sent = send_all(sender, 5)
    sender.cancel(2)
    sender.cancel(1)
    sent += send_all(sender)
    arrivals = []
    at = 0
    for number in (1, 2, 3):
        target = spans_with(bytes(20))
        receiver.expect(number, target)
        while receiver.is_expecting:
            arrivals += feed(receiver, sent[at : at + 1])
            at += 1
    assert arrivals == [Arrival(1, False), Arrival(2, False), Arrival(3, True)]
    assert contents(target) == [b"\3" * 20]
    assert at == len(sent)


# --------------------------------------------------------------------------- skipped by a receiver


@given(st.integers(0, 2 * (HEADER.size + SMALL_CHUNK) + HEADER.size + 3), piece_sizes)
def test_memory_is_untouched_after_its_payload_is_skipped(before, sizes):
    """Whatever has arrived, later bytes go nowhere, and the next payload is correct."""
    sender, receiver = PayloadSender(), PayloadReceiver()
    sender.add(1, spans_with(b"a" * 20))
    sender.add(2, spans_with(b"b" * 20))
    sent = send_all(sender)
    skipped, target = spans_with(bytes(20)), spans_with(bytes(20))
    receiver.expect(1, skipped)
    assert feed(receiver, sent[:before], sizes) == []
    receiver.skip()
    assert not receiver.is_expecting
    kept = contents(skipped)
    receiver.expect(2, target)
    assert feed(receiver, sent[before:], sizes) == [Arrival(2, True)]
    assert contents(skipped) == kept
    assert contents(target) == [b"b" * 20]
    assert receiver.received_bytes == len(sent)


def test_skipped_payload_may_be_cancelled_by_its_sender_too():
    sender, receiver = PayloadSender(), PayloadReceiver()
    sender.add(1, spans_with(b"a" * 20))
    sent = send_all(sender, HEADER.size + 3)
    receiver.expect(1, spans_with(bytes(20)))
    feed(receiver, sent)
    receiver.skip()
    sender.cancel(1)
    sender.add(2, spans_with(b"b" * 4))
    target = spans_with(bytes(4))
    receiver.expect(2, target)
    assert feed(receiver, send_all(sender)) == [Arrival(2, True)]
    assert contents(target) == [b"b" * 4]


def test_skipping_again_or_without_a_payload_is_harmless():
    sender, receiver = PayloadSender(), PayloadReceiver()
    receiver.skip()
    sender.add(1, spans_with(b"a" * 20))
    sent = send_all(sender)
    receiver.expect(1, spans_with(bytes(20)))
    feed(receiver, sent[: HEADER.size + 2])
    receiver.skip()
    receiver.skip()
    assert feed(receiver, sent[HEADER.size + 2 :]) == []


def test_payload_that_arrived_is_not_undone_by_a_skip():
    sender, receiver = PayloadSender(), PayloadReceiver()
    sender.add(1, spans_with(b"a" * 8))
    target = spans_with(bytes(8))
    receiver.expect(1, target)
    feed(receiver, send_all(sender))
    receiver.skip()
    assert contents(target) == [b"a" * 8]


def test_payload_that_never_came_is_skipped():
    sender, receiver = PayloadSender(), PayloadReceiver()
    receiver.expect(1, spans_with(bytes(5)))
    receiver.skip()
    target = spans_with(bytes(5))
    sender.add(3, spans_with(b"third"))
    receiver.expect(3, target)
    assert feed(receiver, send_all(sender)) == [Arrival(3, True)]
    assert contents(target) == [b"third"]


# ------------------------------------------------------------------------------------ broken rules


def expecting(size=20, number=2):
    receiver = PayloadReceiver()
    target = spans_with(bytes(size))
    receiver.expect(number, target)
    return receiver, target


@pytest.mark.parametrize(
    "bad",
    [
        header(3, 0, 8),
        header(2**64 - 1, 0, 8),
        header(3, CANCELLED, 0),
        header(2, 1, 8),
        header(2, 0, 7),
        header(2, 0, 0),
        header(2, CANCELLED, 8),
        header(2, 0, SMALL_CHUNK + 1),
        header(2, 0, 2**32 - 1),
        header(1, 0, SMALL_CHUNK + 1),
        header(2, 0, 8) + bytes(8) + header(2, 0, 8),
        header(2, 0, 8) + bytes(8) + header(2, 2, 8),
        header(2, 0, 8) + bytes(8) + header(2, 1, 8) + bytes(8) + header(2, 2, 8),
    ],
    ids=[
        "payload that isn't expected yet",
        "largest number of a payload",
        "cancelled payload that isn't expected yet",
        "chunk too early",
        "chunk too small",
        "empty chunk",
        "cancellation with bytes",
        "chunk too large",
        "largest chunk",
        "skipped chunk too large",
        "chunk twice",
        "chunk left out",
        "last chunk too large",
    ],
)
def test_chunk_that_is_not_the_next_one_breaks_the_protocol(bad):
    receiver, _ = expecting()
    with pytest.raises(ProtocolError, match="expected"):
        feed(receiver, bad)


def test_bytes_before_any_payload_is_expected_break_the_protocol():
    with pytest.raises(ProtocolError, match="payload 1 with a chunk of 8 bytes wasn't expected"):
        feed(PayloadReceiver(), header(1, 0, 8))


def test_chunk_behind_a_complete_payload_is_skipped():
    """A receiver can't tell it from one that was sent before the payload was skipped."""
    receiver, target = expecting(8)
    first = header(2, 0, 8) + b"a" * 8
    assert feed(receiver, first + header(2, 1, 8) + b"b" * 8) == [Arrival(2, True)]
    assert contents(target) == [b"a" * 8]


likely_headers = st.builds(
    header,
    st.integers(0, 4) | st.integers(0, 2**64 - 1),
    st.integers(0, 4) | st.just(CANCELLED) | st.integers(0, 2**32 - 1),
    st.integers(0, SMALL_CHUNK + 1) | st.integers(0, 2**32 - 1),
)
any_stream = st.lists(likely_headers | st.binary(max_size=20), max_size=12).map(b"".join)


@given(any_stream, piece_sizes, st.booleans())
def test_whatever_comes_only_protocol_errors_are_raised(data, sizes, is_skipped):
    receiver, target = expecting()
    other = spans_with(bytes(20))
    with suppress(ProtocolError):
        feed(receiver, data[:30], sizes)
        if is_skipped:
            receiver.skip()
            receiver.expect(3, other)
        kept = contents(target)
        arrivals = feed(receiver, data[30:], sizes)
        assert len(arrivals) <= 1
        assert not is_skipped or contents(target) == kept
    assert [len(span.memory) for span in (*target, *other)] == [20, 20]


# ------------------------------------------------------------------------------------- other codecs


class EveryOtherByte:
    """A codec that sends half of the bytes, inverted, through one buffer."""

    def __init__(self):
        self.kinds = []
        self._buffer = bytearray(SMALL_CHUNK)

    def wire_bytes(self, chunk):
        return (len(chunk.memory) + 1) // 2

    def encode(self, chunk):
        self.kinds.append(chunk.kind)
        size = self.wire_bytes(chunk)
        self._buffer[:size] = bytes(255 - byte for byte in chunk.memory[::2])
        return memoryview(self._buffer)[:size]

    def space(self, chunk):
        return memoryview(self._buffer)[: self.wire_bytes(chunk)]

    def decode(self, chunk):
        for at in range(len(chunk.memory)):
            chunk.memory[at] = 255 - self._buffer[at // 2]


def test_codec_decides_what_is_sent_for_each_chunk():
    codec = EveryOtherByte()
    sender, receiver = PayloadSender(codec), PayloadReceiver(EveryOtherByte())
    sender.add(1, [Span(memoryview(b"aabbccddeef"), "torch.int8"), *spans_with(b"xxy")])
    target = spans_with(bytes(11), bytes(3))
    receiver.expect(1, target)
    assert feed(receiver, send_all(sender), sizes=[1, 20, 2, 1]) == [Arrival(1, True)]
    assert contents(target) == [b"aabbccddeef", b"xxy"]
    assert codec.kinds == ["torch.int8", "torch.int8", ""]
    assert sender.sent_bytes == 3 * HEADER.size + 4 + 2 + 2


def test_chunk_that_is_skipped_is_not_decoded():
    sender, receiver = PayloadSender(EveryOtherByte()), PayloadReceiver(EveryOtherByte())
    sender.add(1, spans_with(b"a" * 16))
    sender.add(2, spans_with(b"bb"))
    skipped, target = spans_with(bytes(16)), spans_with(bytes(2))
    sent = send_all(sender)
    receiver.expect(1, skipped)
    feed(receiver, sent[: HEADER.size + 2])
    receiver.skip()
    receiver.expect(2, target)
    assert feed(receiver, sent[HEADER.size + 2 :]) == [Arrival(2, True)]
    assert contents(skipped) == [bytes(16)]
    assert contents(target) == [b"bb"]
