# SPDX-License-Identifier: BSD-3-Clause
"""Sums are made chunk by chunk while they are sent, in the order in which spans are cut."""

import os
from math import inf, nan

import pytest
import torch
from torch import nn

from paceline.run.net import payload_stream
from paceline.run.net.payload_stream import Exact, PayloadSender
from paceline.run.net.tcp import spans_of_version
from paceline.run.server import host_sums
from paceline.run.server.host_sums import SpoiledSum, SumCodec, Summand, terms_of
from paceline.run.tensors.layout import Layout, gather
from paceline.run.tensors.shared_region import Region

CHUNK_BYTES = 64


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(payload_stream, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(host_sums, "CHUNK_BYTES", CHUNK_BYTES)


def memory_for(model):
    """Return a function that allocates memory for the tensors of a model."""
    spec = gather([model], [torch.optim.SGD(model.parameters(), lr=1.0)]).spec
    layout = Layout.of(spec)

    def allocate():
        region, fd = Region.create(layout.size, "test")
        os.close(fd)
        return layout.view(region)

    return allocate


@pytest.fixture
def allocate():
    return memory_for(nn.Sequential(nn.Linear(13, 7), nn.BatchNorm1d(7)))


def fill(views, value):
    for own in (*views.flats, views.buffer_flats, views.counter_flats):
        for flat in own:
            flat.fill_(value)
    return views


def sent(total, summands):
    """Return the bytes that are sent for a sum."""
    codec = SumCodec(Exact())
    sender = PayloadSender(codec)
    codec.begin(summands, terms_of(total, summands, 0))
    sender.add(1, spans_of_version(total, 0))
    found = bytearray()
    while sender:
        for part in sender.pending():
            found += part
        sender.sent(sum(map(len, sender.pending())))
    return bytes(found)


def test_every_chunk_of_a_sum_is_added_up(allocate):
    slots = [fill(allocate(), value) for value in (1.0, 2.0, 4.0)]
    total = fill(allocate(), 99)
    data = sent(total, [Summand(i, slot, 1.0) for i, slot in enumerate(slots)])
    assert all(flat.eq(7.0).all() for flat in (*total.flats[0], *total.buffer_flats))
    assert len(data) > sum(flat.nbytes for flat in total.flats[0])


def test_summands_count_relative_to_the_first(allocate):
    slots = [fill(allocate(), value) for value in (1.0, 2.0)]
    total = allocate()
    sent(total, [Summand(0, slots[0], 1.0), Summand(1, slots[1], 2.5)])
    assert all(flat.eq(6.0).all() for flat in total.flats[0])


def test_counters_are_those_of_the_first_worker(allocate):
    slots = [fill(allocate(), value) for value in (3, 5)]
    total = allocate()
    sent(total, [Summand(i, slot, 1.0) for i, slot in enumerate(slots)])
    assert all(flat.eq(3).all() for flat in total.counter_flats)


def test_single_gradient_is_sent_as_it_is(allocate):
    slot = fill(allocate(), 1.5)
    total = allocate()
    sent(total, [Summand(4, slot, 1.0)])
    assert all(torch.equal(a, b) for a, b in zip(total.flats[0], slot.flats[0], strict=True))


@pytest.mark.parametrize("bad", [nan, inf])
def test_workers_that_spoil_a_sum_are_named(allocate, bad):
    slots = [fill(allocate(), 1.0) for _ in range(3)]
    for spoilt in (slots[0], slots[2]):
        spoilt.parameters[0][0][-1, -1] = bad
    with pytest.raises(SpoiledSum) as caught:
        sent(allocate(), [Summand(10 + i, slot, 1.0) for i, slot in enumerate(slots)])
    assert caught.value.workers == (10, 12)


def test_overflow_is_nobodys_fault(allocate):
    slots = [allocate() for _ in range(2)]
    for slot in slots:
        slot.flats[0][0].fill_(3e38)
    total = allocate()
    sent(total, [Summand(i, slot, 1.0) for i, slot in enumerate(slots)])
    assert total.flats[0][0].eq(inf).all()


def test_buffers_may_be_infinite(allocate):
    slots = [fill(allocate(), 1.0) for _ in range(2)]
    slots[0].buffer_flats[0].fill_(-inf)
    total = allocate()
    sent(total, [Summand(i, slot, 1.0) for i, slot in enumerate(slots)])
    assert total.buffer_flats[0].eq(-inf).all()
