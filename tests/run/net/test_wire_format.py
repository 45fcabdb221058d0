# SPDX-License-Identifier: BSD-3-Clause
"""Numbers in half precision on the wire, and what rounding cuts off from them."""

from math import inf, nan

import pytest
import torch

from paceline.errors import ProtocolError
from paceline.run.net.payload_stream import (
    CHUNK_BYTES,
    Exact,
    PayloadReceiver,
    PayloadSender,
    Span,
)
from paceline.run.net.wire_format import ErrorFeedback, HalfPrecision, codec_for

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
every_format = pytest.mark.parametrize("wire", HALVES)


def span_of(tensor, kind=None):
    memory = tensor.view(torch.uint8).numpy().data
    return Span(memory, str(tensor.dtype) if kind is None else kind)


def transfer(codec_of_sender, sent, received, codec=None):
    """Send spans into others, in pieces of odd sizes; return how many bytes that took."""
    sender = PayloadSender(codec_of_sender)
    receiver = PayloadReceiver(codec or HalfPrecision(codec_of_sender._dtype))
    sender.add(1, sent)
    receiver.expect(1, received)
    arrival = None
    while sender:
        piece = sender.pending()[0][:99_991]
        count = min(len(piece), len(receiver.space()))
        receiver.space()[:count] = piece[:count]
        arrival = receiver.received(count)
        sender.sent(count)
    assert arrival is not None
    assert arrival.is_complete
    return sender.sent_bytes


def sent(wire, tensor):
    """Return what the server receives for a tensor."""
    there = torch.zeros_like(tensor)
    transfer(codec_for(wire), [span_of(tensor)], [span_of(there)])
    return there


# ------------------------------------------------------------------------------------ numbers


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_arrive_rounded_to_the_nearest(wire, dtype):
    tensor = torch.randn(CHUNK_BYTES // dtype.itemsize * 2 + 77, dtype=dtype)  # three chunks
    assert torch.equal(sent(wire, tensor), tensor.to(HALVES[wire]).to(dtype))


@every_format
def test_single_precision_takes_half_the_bytes_and_double_a_quarter(wire):
    for dtype, share in ((torch.float32, 2), (torch.float64, 4)):
        tensor = torch.randn(3 * CHUNK_BYTES // dtype.itemsize, dtype=dtype)
        there = torch.zeros_like(tensor)
        size = transfer(codec_for(wire), [span_of(tensor)], [span_of(there)])
        assert tensor.nbytes / share < size < tensor.nbytes / share * 1.001


@every_format
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_other_types_travel_exactly(wire, dtype):
    tensor = (torch.randn(1000) * 100).to(dtype)
    assert torch.equal(sent(wire, tensor), tensor)


@every_format
def test_span_without_a_kind_travels_exactly(wire):
    tensor, there = torch.randn(1000), torch.zeros(1000)
    transfer(codec_for(wire), [span_of(tensor, "")], [span_of(there, "")])
    assert torch.equal(there, tensor)


def test_exact_format_is_the_memory_itself():
    assert isinstance(codec_for("exact"), Exact)


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finite_number_out_of_range_becomes_the_largest_one(wire, dtype):
    largest = torch.finfo(HALVES[wire]).max
    tensor = torch.tensor([torch.finfo(dtype).max, -3.4e38, 1.0], dtype=dtype)
    found = sent(wire, tensor)
    expected = [largest, -largest, 1.0]
    assert found.tolist() == expected
    assert tensor.tolist() == [torch.finfo(dtype).max, torch.tensor(-3.4e38, dtype=dtype), 1.0]


@every_format
@pytest.mark.parametrize("value", [inf, -inf, nan])
def test_number_that_is_not_finite_stays_so(wire, value):
    found = sent(wire, torch.tensor([1.0, value, 1e38]))
    assert found[0] == 1.0
    torch.testing.assert_close(found[1:2], torch.tensor([value]), equal_nan=True)


@every_format
def test_conversion_allocates_no_memory_for_a_chunk(wire):
    codec = HalfPrecision(HALVES[wire])
    tensor, residual = torch.randn(1000), torch.randn(1000)
    chunk = span_of(tensor)._replace(residual=span_of(residual).memory)
    first = torch.frombuffer(codec.encode(chunk), dtype=torch.uint8)
    again = torch.frombuffer(codec.encode(chunk), dtype=torch.uint8)
    assert first.data_ptr() == again.data_ptr()
    assert codec.space(chunk).obj is codec.encode(chunk).obj


def test_chunk_of_another_size_breaks_the_protocol():
    """As if one side used another format than the other."""
    tensor, there = torch.randn(100), torch.zeros(100)
    with pytest.raises(ProtocolError, match="with 400 bytes, got chunk 0 with 200 bytes"):
        transfer(codec_for("bfloat16"), [span_of(tensor)], [span_of(there)], Exact())


# ----------------------------------------------------------------------------- error feedback


class Link:
    """A worker's gradient with two optimizers, and what the server makes of it."""

    def __init__(self, wire, numbers=1000, dtype=torch.float32):
        self.codec = codec_for(wire)
        self.gradient = torch.zeros(numbers, dtype=dtype)
        self.residuals = [torch.zeros_like(self.gradient) for _ in range(2)]
        self.feedback = ErrorFeedback(self.codec, lambda i: [span_of(self.residuals[i])])
        self.applied = torch.zeros_like(self.gradient)
        self.true = torch.zeros_like(self.gradient)

    def push(self, gradient, is_accepted=True, optimizer=0):
        self.gradient.copy_(gradient)
        there = torch.zeros_like(self.gradient)
        spans = self.feedback.add_to([span_of(self.gradient)], optimizer)
        transfer(self.codec, spans, [span_of(there)])
        self.feedback.settle(is_accepted)
        self.feedback.finish()
        assert torch.equal(self.gradient, gradient)  # the script may read it
        if is_accepted:
            self.applied += there
            self.true += gradient
        return there


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sum_of_what_is_accepted_follows_the_sum_of_the_gradients(wire, dtype):
    link = Link(wire, CHUNK_BYTES // dtype.itemsize + 5, dtype)
    gradient = torch.rand_like(link.true) + 1  # the same in every step, as rounding errors are then
    for _ in range(30):
        link.push(gradient)
    without = 30 * gradient.to(HALVES[wire]).to(dtype)
    left = link.residuals[0]
    torch.testing.assert_close(link.applied + left, link.true, rtol=1e-5, atol=0)
    assert left.abs().max() <= torch.finfo(HALVES[wire]).eps
    assert (link.applied - link.true).abs().mean() < 0.1 * (without - link.true).abs().mean()


def test_numbers_too_small_for_float16_arrive_once_they_have_added_up():
    link = Link("float16", 1)
    received = [link.push(torch.tensor([1e-8])).item() for _ in range(60)]
    assert received[0] == 0.0
    assert sum(received) == pytest.approx(60e-8, abs=4e-8)


@every_format
def test_gradient_that_was_not_accepted_leaves_the_residual_as_it_was(wire):
    link = Link(wire)
    link.push(torch.randn(1000))
    before = link.residuals[0].clone()
    link.push(1e4 * torch.randn(1000), is_accepted=False)
    assert torch.equal(link.residuals[0], before)
    assert before.any()


@every_format
def test_gradient_that_was_sent_in_part_leaves_the_residual_as_it_was(wire):
    link = Link(wire, CHUNK_BYTES)  # four chunks
    link.push(torch.randn(CHUNK_BYTES))
    before = link.residuals[0].clone()
    sender = PayloadSender(link.codec)
    sender.add(2, link.feedback.add_to([span_of(link.gradient)], 0))
    sender.sent(sum(map(len, sender.pending())))
    sender.cancel(2)
    sender.sent(sum(map(len, sender.pending())))
    assert not sender
    link.feedback.settle(is_accepted=False)
    assert not link.feedback.advance()
    assert torch.equal(link.residuals[0], before)


def test_residual_is_settled_once():
    link = Link("bfloat16")
    link.push(torch.randn(1000))
    before = link.residuals[0].clone()
    link.gradient.zero_()
    link.feedback.settle(is_accepted=True)  # of a turn that sent no gradient
    link.feedback.finish()
    assert torch.equal(link.residuals[0], before)


def test_residual_is_updated_one_chunk_at_a_time():
    link = Link("bfloat16", CHUNK_BYTES // 2)  # two chunks
    link.gradient.copy_(torch.randn(CHUNK_BYTES // 2))
    link.feedback.add_to([span_of(link.gradient)], 0)
    link.feedback.settle(is_accepted=True)
    first, second = link.residuals[0].chunk(2)
    for expected in ((True, False), (True, True)):
        assert link.feedback.advance()
        assert (bool(first.any()), bool(second.any())) == expected
    assert not link.feedback.advance()


def test_each_optimizer_has_residuals_of_its_own():
    link = Link("bfloat16")
    link.push(torch.randn(1000), optimizer=1)
    assert not link.residuals[0].any()
    assert link.residuals[1].any()


@every_format
def test_what_is_cut_off_a_number_out_of_range_is_not_fed_back(wire):
    """It would push the same way for many updates."""
    largest = torch.finfo(HALVES[wire]).max
    link = Link(wire, 2, torch.float64)
    assert link.push(torch.tensor([1e300, 1.0], dtype=torch.float64)).tolist() == [largest, 1.0]
    assert link.residuals[0].tolist() == [0.0, 0.0]


@every_format
def test_number_that_is_not_finite_does_not_spoil_later_gradients(wire):
    link = Link(wire, 2)
    assert not link.push(torch.tensor([inf, 1.0]))[0].isfinite()
    assert link.push(torch.tensor([1.0, 1.0])).tolist() == [1.0, 1.0]
