# SPDX-License-Identifier: BSD-3-Clause
"""The agent of a host: one version in, one sum out, and the same decisions as without it.

The head, two other servers and the agents are real, and so are their sockets; windows are held open
by holding back what an agent sends.
"""

import pytest
import torch
from torch import nn

from host_group import Agent, Hosted, agent_peers, gradients_of, join_hosted
from paceline.core.events import Fate
from paceline.errors import ProtocolError
from paceline.run.net import messages
from paceline.run.settings import Settings
from paceline.run.tensors.layout import gather
from paceline.spec import RunSpec
from paceline.trace.schema import Gradient, Left
from paceline.watch.audit import audit
from server_group import Group, sgd


@pytest.fixture
def group_of(tmp_path):
    closing = []

    def make(policy="sync", workers=3, agents=1, servers=3, **options):
        """Return a group whose servers are there, and this many agents."""
        make = options.pop("make", None)
        spec = RunSpec(workers=workers, steps=100)
        settings = Settings(spec=spec, policy=policy, checkpoint_every="0", **options)
        group = Group(tmp_path, settings, make, servers=servers)
        closing.append(group)
        group.start_servers()
        found = [Agent(group) for _ in range(agents)]
        closing.extend(found)
        return group, *found

    yield make
    for one in closing:
        one.close()


def take_turns(*members):
    return [member.assignment() for member in members]


def last_fates(group):
    """Return the fate of each worker's last gradient, by the trace."""
    found = {}
    for record in group.trace().records:
        if isinstance(record, Gradient):
            found[record.worker] = record.fate
    return found


@pytest.mark.parametrize("servers", [1, 3])
def test_gradients_of_a_host_are_averaged_as_one(group_of, servers):
    group, agent = group_of(servers=servers)
    members = join_hosted(group, agent, 0, 1, 2)
    take_turns(*members)
    for value, member in enumerate(members, start=1):
        member.announce(float(value))
    assert [turn.version for turn in take_turns(*members)] == [1, 1, 1]
    assert gradients_of(group) == [2.0] * servers
    for member in members:
        assert torch.equal(member.parameters(), torch.full_like(member.parameters(), -2.0))
    assert group.contributors() == [[0, 1, 2]]


def test_gradients_count_by_their_samples(group_of):
    group, agent = group_of()
    members = join_hosted(group, agent, 0, 1, 2)
    take_turns(*members)
    for member, samples in zip(members, (1, 2, 5), strict=True):
        member.announce(float(samples), samples=samples)
    take_turns(*members)
    assert gradients_of(group) == pytest.approx([(1 + 4 + 25) / 8] * 3)


def test_version_travels_to_a_host_once_and_so_does_a_sum(group_of):
    """A version or gradient has 260 elements; small messages and headers are counted, too."""
    group, agent = group_of(servers=1)
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


def test_worker_that_joins_later_shares_the_version_that_is_there(group_of):
    group, agent = group_of(servers=1)
    [first] = join_hosted(group, agent, 0)
    [second] = join_hosted(group, agent, 1)
    [third] = join_hosted(group, agent, 2)
    take_turns(first, second, third)
    [peer] = agent_peers(group)
    assert len({peer._readers[one] for one in peer.hosted}) == 1
    assert peer._newest.payload == 1


def test_buffers_are_averaged_and_counters_are_those_of_the_first_worker(group_of):
    def make():
        model = nn.Sequential(nn.Linear(64, 4), nn.BatchNorm1d(4))
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    group, agent = group_of(make=make)
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


def test_late_worker_of_a_host_is_left_out_of_the_sum(group_of):
    group, one, other = group_of("backup:1", workers=4, agents=2)
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


def test_host_waits_with_its_sum_until_the_update_can_be_made(group_of):
    """The update needs three of four; each host has a worker that is still computing."""
    group, one, other = group_of("backup:1", workers=4, agents=2)
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


def test_worker_that_dies_while_its_sum_travels_is_left_out_on_every_server(group_of):
    """Server 1 has all of the first sum, server 2 nothing; the head asks for another one."""
    group, agent = group_of()
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


def test_agent_that_dies_takes_its_gradients_with_it(group_of):
    """The rest of the update is made by the workers of another host."""
    group, one, other = group_of("backup:2", workers=4, agents=2)
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


def test_worker_whose_gradient_is_not_finite_is_refused_and_the_others_go_on(group_of):
    """It has reported a finite norm."""
    group, agent = group_of()
    a, b, c = join_hosted(group, agent, 0, 1, 2)
    take_turns(a, b, c)
    a.announce(1.0)
    b.announce(float("nan"))
    c.announce(3.0)
    group.until(lambda: group.version == 1)
    assert group.contributors() == [[0, 2]]
    assert gradients_of(group) == [2.0] * 3
    group.until(lambda: b.lost_by != "" or any(type(m) is messages.Refused for m in b.inbox))


def test_sum_that_overflows_is_nobodys_fault(group_of, capsys):
    group, agent = group_of()
    members = join_hosted(group, agent, 0, 1, 2)
    take_turns(*members)
    for member in members:
        member.announce(3e38)
    assert [turn.version for turn in take_turns(*members)] == [1, 1, 1]
    assert "update 1 is not finite: the optimizer did not step" in capsys.readouterr().out
    assert gradients_of(group) == [0.0] * 3


def test_sum_of_which_a_part_is_late_is_asked_for_again(group_of):
    """Two gradients of the host are on their way when a worker of another host is faster."""
    group, one = group_of("backup:1", workers=3, agents=1)
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


@pytest.mark.parametrize(
    "policy", ["async", "softsync:2", "ssp:1", "batchsync:3", "delayed:1", "deadline:0.5"]
)
def test_workers_of_a_host_train_under_every_rule(group_of, policy):
    """Every gradient is 1 everywhere, and so is every update, unless the rule scales it."""
    group, one, other = group_of(policy, workers=4, agents=2)
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


def test_rounding_is_fed_back_to_the_next_sum(group_of):
    """1.001 is 1 in bfloat16; what is cut off adds up."""
    group, agent = group_of(wire="bfloat16", servers=2)
    members = join_hosted(group, agent, 0, 1, 2)
    for _ in range(24):
        take_turns(*members)
        for member in members:
            member.announce(1.001)
    take_turns(*members)
    assert gradients_of(group) == pytest.approx([24 * 1.001] * 2, abs=0.006)


def test_states_pass_through_the_agent(group_of):
    group, agent = group_of(make=sgd(momentum=0.9))
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


def test_worker_with_another_script_is_refused(group_of):
    group, agent = group_of()
    join_hosted(group, agent, 0)
    other = Group.__new__(Group)
    model = nn.Linear(64, 5)
    other.spec = gather([model], [torch.optim.SGD(model.parameters(), lr=1.0)]).spec
    member = Hosted(other, 1, agent)
    with pytest.raises(ProtocolError, match="another worker of this host has another script"):
        group.meanwhile(member.join)


def test_first_worker_with_another_script_than_the_servers_is_refused(group_of):
    group, agent = group_of()
    other = Group.__new__(Group)
    model = nn.Linear(64, 5)
    other.spec = gather([model], [torch.optim.SGD(model.parameters(), lr=1.0)]).spec
    member = Hosted(other, 0, agent)
    with pytest.raises(ProtocolError, match="the worker's script differs from the server's"):
        group.meanwhile(member.join)
    [right] = join_hosted(group, agent, 0)
    assert not right.lost_by


def test_worker_that_joins_again_gets_the_newest_version(group_of):
    group, agent = group_of("backup:1")
    members = join_hosted(group, agent, 0, 1, 2)
    take_turns(*members)
    group.kill_worker(2)
    members[0].announce(1.0)
    members[1].announce(1.0)
    group.until(lambda: group.version == 1)
    [back] = join_hosted(group, agent, 2)
    assert back.assignment().version == 1
    assert torch.equal(back.parameters(), torch.full((260,), -1.0))
