# SPDX-License-Identifier: BSD-3-Clause
"""The agent of a host: workers train through it, under every rule, as they would without it.

The head, two other servers and the agents are real, and so are their sockets.
"""

import pytest
import torch
from torch import nn

from host_group import (
    Hosted,
    agent_peers,
    gradients_of,
    join_hosted,
    last_fates,
    take_turns,
)
from paceline.errors import ProtocolError
from paceline.run.net import messages
from paceline.run.tensors.layout import gather
from paceline.watch.audit import audit
from server_group import Group, sgd


@pytest.mark.parametrize("servers", [1, 3])
def test_gradients_of_a_host_are_averaged_as_one(agents_of, servers):
    group, agent = agents_of(servers=servers)
    members = join_hosted(group, agent, 0, 1, 2)
    take_turns(*members)
    for value, member in enumerate(members, start=1):
        member.announce(float(value))
    assert [turn.version for turn in take_turns(*members)] == [1, 1, 1]
    assert gradients_of(group) == [2.0] * servers
    for member in members:
        assert torch.equal(member.parameters(), torch.full_like(member.parameters(), -2.0))
    assert group.contributors() == [[0, 1, 2]]


def test_late_worker_of_a_host_is_left_out_of_the_sum(agents_of):
    group, one, other = agents_of("backup:1", workers=4, agents=2)
    a, b = join_hosted(group, one, 0, 1)
    c, d = join_hosted(group, other, 2, 3)
    take_turns(a, b, c, d)
    for value, member in enumerate((a, b, c), start=1):
        member.announce(float(value))
    group.until(lambda: group.version == 1)
    d.announce(100.0)
    assert [turn.version for turn in take_turns(a, b, c, d)] == [1, 1, 1, 1]
    assert gradients_of(group) == [2.0] * 3
    assert last_fates(group) == {0: "accepted", 1: "accepted", 2: "accepted", 3: "late"}


def test_host_waits_with_its_sum_until_the_update_can_be_made(agents_of):
    """The update needs three of four; each host has a worker that is still computing."""
    group, one, other = agents_of("backup:1", workers=4, agents=2)
    a, b = join_hosted(group, one, 0, 1)
    c, d = join_hosted(group, other, 2, 3)
    take_turns(a, b, c, d)
    a.announce(1.0)
    c.announce(2.0)
    group.settle()
    assert all(peer._asked is None for peer in agent_peers(group))
    b.announce(3.0)
    group.until(lambda: group.version == 1)
    assert group.contributors() == [[0, 1, 2]]
    assert gradients_of(group) == [2.0] * 3
    del d


@pytest.mark.parametrize(
    "policy", ["async", "softsync:2", "ssp:1", "batchsync:3", "delayed:1", "deadline:0.5"]
)
def test_workers_of_a_host_train_under_every_rule(agents_of, policy):
    """Every gradient is 1 everywhere, and so is every update, unless the rule scales it."""
    group, one, other = agents_of(policy, workers=4, agents=2)
    members = [*join_hosted(group, one, 0, 1), *join_hosted(group, other, 2, 3)]

    def work():
        for member in members:
            turn = member.take(messages.Assignment)
            if turn is not None:
                member.turn = turn
                member.announce(1.0)
        return group.version >= 8

    group.until(work)
    audit(group.trace())
    if "soft" not in policy:
        assert gradients_of(group) == [group.version] * 3


def test_states_pass_through_the_agent(agents_of):
    group, agent = agents_of(make=sgd(momentum=0.9))
    members = join_hosted(group, agent, 0, 1, 2)
    take_turns(*members)
    member = members[0]
    member.end.send(messages.StateRequest("optimizer", 0))
    reply = None

    def has_reply():
        nonlocal reply
        reply = reply or member.take(messages.StateReply)
        return reply

    group.until(has_reply)
    state = member.end.receive_state(reply)
    assert state["param_groups"][0]["momentum"] == 0.9
    reply = None
    member.end.send_state(0, state, True)
    group.until(has_reply)
    assert reply.tree_bytes == 0


def test_worker_with_another_script_is_refused(agents_of):
    group, agent = agents_of()
    join_hosted(group, agent, 0)
    other = Group.__new__(Group)
    model = nn.Linear(64, 5)
    other.spec = gather([model], [torch.optim.SGD(model.parameters(), lr=1.0)]).spec
    member = Hosted(other, 1, agent)
    with pytest.raises(ProtocolError, match="another worker of this host has another script"):
        group.meanwhile(member.join)


def test_worker_that_joins_again_gets_the_newest_version(agents_of):
    group, agent = agents_of("backup:1")
    members = join_hosted(group, agent, 0, 1, 2)
    take_turns(*members)
    group.kill_worker(2)
    members[0].announce(1.0)
    members[1].announce(1.0)
    group.until(lambda: group.version == 1)
    [back] = join_hosted(group, agent, 2)
    assert back.assignment().version == 1
    assert torch.equal(back.parameters(), torch.full((260,), -1.0))


def test_worker_whose_number_is_taken_is_refused_with_the_reason(agents_of):
    group, one, other = agents_of(agents=2)
    join_hosted(group, one, 0)
    with pytest.raises(ProtocolError, match="there is already a worker 0"):
        join_hosted(group, other, 0)
