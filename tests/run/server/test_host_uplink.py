# SPDX-License-Identifier: BSD-3-Clause
"""What travels between a host and the servers: each version once, and one sum for each update."""

import pytest
import torch
from torch import nn

from host_group import (
    agent_peers,
    gradients_of,
    join_hosted,
    take_turns,
)


def test_version_travels_to_a_host_once_and_so_does_a_sum(agents_of):
    """A version or gradient has 260 elements; small messages and headers are counted, too."""
    group, agent = agents_of(servers=1)
    members = join_hosted(group, agent, 0, 1, 2)
    take_turns(*members)
    [peer] = agent_peers(group)
    peer.take_moved()
    for member in members:
        member.announce(1.0)
    take_turns(*members)
    moved = list(group.trace().gradients())
    model = 260 * 4
    assert model <= sum(record.pushed_bytes for record in moved) < 1.2 * model
    assert model <= peer.take_moved().to_worker + sum(r.pulled_bytes for r in moved) < 2.3 * model


def test_worker_that_joins_later_shares_the_version_that_is_there(agents_of):
    group, agent = agents_of(servers=1)
    [first] = join_hosted(group, agent, 0)
    [second] = join_hosted(group, agent, 1)
    [third] = join_hosted(group, agent, 2)
    take_turns(first, second, third)
    [peer] = agent_peers(group)
    assert len({peer._readers[one] for one in peer.hosted}) == 1
    assert peer._newest.payload == 1


def test_rounding_is_fed_back_to_the_next_sum(agents_of):
    """1.001 is 1 in bfloat16; what is cut off adds up."""
    group, agent = agents_of(wire="bfloat16", servers=2)
    members = join_hosted(group, agent, 0, 1, 2)
    for _ in range(24):
        take_turns(*members)
        for member in members:
            member.announce(1.001)
    take_turns(*members)
    assert gradients_of(group) == pytest.approx([24 * 1.001] * 2, abs=0.006)


def test_gradients_count_by_their_samples(agents_of):
    group, agent = agents_of()
    members = join_hosted(group, agent, 0, 1, 2)
    take_turns(*members)
    for member, samples in zip(members, (1, 2, 5), strict=True):
        member.announce(float(samples), samples=samples)
    take_turns(*members)
    assert gradients_of(group) == pytest.approx([(1 + 4 + 25) / 8] * 3)


def test_buffers_are_averaged_and_counters_are_those_of_the_first_worker(agents_of):
    def make():
        model = nn.Sequential(nn.Linear(64, 4), nn.BatchNorm1d(4))
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    group, agent = agents_of(make=make)
    members = join_hosted(group, agent, 0, 1, 2)
    take_turns(*members)
    for number, member in enumerate(members):
        slot = member.end.open_slot().slot
        slot.buffers[0].fill_(number)
        slot.counters[0].fill_(10 + number)
        member.announce(0.0, samples=1 + number)
    take_turns(*members)
    views = group.shard.newest.views
    assert views.buffers[0].tolist() == pytest.approx([(2 + 6) / 6] * 4)
    assert views.counters[0].item() == 10
