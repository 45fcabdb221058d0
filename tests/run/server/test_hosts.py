# SPDX-License-Identifier: BSD-3-Clause
"""Sums that can't be used as a whole: somebody is late, dies, lies, or is refused.

Windows are held open by holding back what an agent sends to one of three servers.
"""

import pytest
import torch
from torch import nn

from host_group import (
    Hosted,
    agent_peers,
    gradients_of,
    join_hosted,
    take_turns,
)
from paceline.core.events import Fate
from paceline.errors import ProtocolError
from paceline.run.net import messages
from paceline.run.tensors.layout import gather
from paceline.trace.schema import Left
from server_group import Group


def test_worker_whose_gradient_is_not_finite_is_refused_and_the_others_go_on(agents_of):
    """It has reported a finite norm."""
    group, agent = agents_of()
    a, b, c = join_hosted(group, agent, 0, 1, 2)
    take_turns(a, b, c)
    a.announce(1.0)
    b.announce(float("nan"))
    c.announce(3.0)
    group.until(lambda: group.version == 1)
    assert group.contributors() == [[0, 2]]
    assert gradients_of(group) == [2.0] * 3
    group.until(lambda: b.lost_by != "" or any(type(m) is messages.Refused for m in b.inbox))


def test_sum_that_overflows_is_nobodys_fault(agents_of, capsys):
    group, agent = agents_of()
    members = join_hosted(group, agent, 0, 1, 2)
    take_turns(*members)
    for member in members:
        member.announce(3e38)
    assert [turn.version for turn in take_turns(*members)] == [1, 1, 1]
    assert "update 1 is not finite: the optimizer did not step" in capsys.readouterr().out
    assert gradients_of(group) == [0.0] * 3


def test_sum_of_which_a_part_is_late_is_asked_for_again(agents_of):
    """Two gradients of the host are on their way when a worker of another host is faster."""
    group, one = agents_of("backup:1", workers=3, agents=1)
    a, b = join_hosted(group, one, 0, 1)
    [c] = group.join(2)
    take_turns(a, b, c)
    one.hold(0, 1, 2)
    a.announce(1.0)
    b.announce(2.0)
    [peer] = agent_peers(group)
    group.until(lambda: peer._asked is not None)
    assert peer._asked.workers == (0, 1)
    c.announce(4.0)  # before the first transfer has arrived, no transfer holds a place
    group.until(lambda: group.ledger.next_tally.contributions)
    one.hold()
    group.until(lambda: group.version == 1)
    assert group.contributors() == [[0, 2]]
    assert gradients_of(group) == [2.5] * 3
    assert take_turns(a, b, c)[1].notice.fate is Fate.LATE


def test_worker_that_dies_while_its_sum_travels_is_left_out_on_every_server(agents_of):
    """Server 1 has all of the first sum, server 2 nothing; the head asks for another one."""
    group, agent = agents_of()
    members = join_hosted(group, agent, 0, 1, 2)
    take_turns(*members)
    agent.hold(2)
    for value, member in enumerate(members, start=1):
        member.announce(float(value))
    [peer] = agent_peers(group)
    group.until(lambda: peer._parts_left == 1)
    group.kill_worker(2)
    group.until(lambda: 2 not in group.ledger.members)
    agent.hold()
    group.until(lambda: group.version == 1)
    assert group.contributors() == [[0, 1]]
    assert gradients_of(group) == [1.5] * 3


def test_agent_that_dies_takes_its_gradients_with_it(agents_of):
    """The rest of the update is made by the workers of another host."""
    group, one, other = agents_of("backup:2", workers=4, agents=2)
    a, b = join_hosted(group, one, 0, 1)
    c, d = join_hosted(group, other, 2, 3)
    take_turns(a, b, c, d)
    one.hold(1)
    a.announce(1.0)
    b.announce(2.0)
    group.until(lambda: any(peer._asked is not None for peer in agent_peers(group)))
    one.close()
    group.until(lambda: {0, 1}.isdisjoint(group.ledger.members), idle=(0, 1))
    c.announce(3.0)
    d.announce(5.0)
    group.until(lambda: group.version == 1, idle=(0, 1))
    assert group.contributors() == [[2, 3]]
    assert gradients_of(group) == [4.0] * 3
    left = [record for record in group.trace().records if isinstance(record, Left)]
    assert {record.worker for record in left} == {0, 1}


def test_first_worker_with_another_script_than_the_servers_is_refused(agents_of):
    group, agent = agents_of()
    other = Group.__new__(Group)
    model = nn.Linear(64, 5)
    other.spec = gather([model], [torch.optim.SGD(model.parameters(), lr=1.0)]).spec
    member = Hosted(other, 0, agent)
    with pytest.raises(ProtocolError, match="the worker's script differs from the server's"):
        group.meanwhile(member.join)
    [right] = join_hosted(group, agent, 0)
    assert not right.lost_by
