# SPDX-License-Identifier: BSD-3-Clause
"""Other servers join, are refused, and are lost; the end of the run is not a loss."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from paceline.errors import PeerLost, ProtocolError
from paceline.run.launch.environment import SERVER_LOST
from paceline.run.net import messages
from paceline.run.net import server_messages as between
from paceline.run.server import other_servers, part_server, progress, waiting_for
from paceline.run.server.other_servers import OtherServers, PartFailed, ServerLost
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from server_group import Group, Member, sgd


@pytest.fixture
def group_of(tmp_path):
    groups = []

    def make(workers=1, servers=3, steps=100, **options):
        spec = RunSpec(workers=workers, steps=steps)
        settings = Settings(spec=spec, checkpoint_every="0")
        groups.append(Group(tmp_path, settings, servers=servers, **options))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


def begun(group):
    """Let everybody join; return the only worker, which has its turn."""
    group.start_servers()
    [member] = group.join(0)
    member.assignment()
    return member


# -------------------------------------------------------------------------------------- joining


def test_servers_join_in_any_order(group_of):
    group = group_of()
    assert group.others.servers == 3
    assert group.others.missing == [1, 2]
    group.start_server(2)
    assert group.others.missing == [1]
    group.start_server(1)
    assert group.others.missing == []
    assert {group.others.number_of(end) for end in group.listener._connections} == {1, 2}


def test_workers_wait_until_all_servers_are_there(group_of):
    group = group_of(servers=3)
    group.start_server(2)
    member = Member(group, 0)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(member.join)
        while not group.server._joining.early:
            group.step_head()
        assert not joining.done()
        group.start_server(1)
        group.until(joining.done)
        joining.result()
    group.members[0] = member
    assert member.assignment().version == 0


def test_missing_servers_are_named_instead_of_workers_that_wait_for_them(
    group_of, monkeypatch, capsys
):
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    monkeypatch.setattr(waiting_for, "FIRST_S", 0.0)
    monkeypatch.setattr(other_servers, "SAY_S", 0.0)
    group = group_of()
    watchers = group.server._watchers

    def said():
        capsys.readouterr()
        group.step_head()
        group.server._tick()
        return capsys.readouterr().out

    said()
    assert said() == "waiting for servers 1, 2 for 0 s\n"
    assert watchers._waiting_s == {}
    group.start_server(2)
    assert said() == "waiting for server 1 for 0 s\n"
    group.start_server(1)
    assert "waiting for worker 0 for 0 s: 0 of 1 have joined" in said()
    assert list(watchers._waiting_s) == [0]


@pytest.mark.parametrize("number", [3, 7])
def test_server_that_the_run_does_not_have_is_refused(group_of, number):
    group = group_of(servers=3)
    with pytest.raises(ProtocolError, match=f"servers of this run are 0 to 2, got server {number}"):
        group.start_server(number)
    assert group.others.missing == [1, 2]


def test_second_server_of_a_number_is_refused(group_of):
    group = group_of().start_servers()
    with pytest.raises(ProtocolError, match="the head refused server 1: there is already a server"):
        group.start_server(1, server=group.new_server(1)[0])
    group.settle()
    assert group.others.missing == []


def test_server_of_another_release_is_refused(group_of, monkeypatch):
    group = group_of()
    monkeypatch.setattr(part_server, "RELEASE", "0.0.1")
    with pytest.raises(ProtocolError, match=r"expected Paceline \S+ in a server, got 0\.0\.1"):
        group.start_server(1)


def test_server_with_another_script_is_refused_with_both_sides_values(group_of):
    def other():
        model = nn.Linear(64, 5)
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    group = group_of()
    with pytest.raises(ProtocolError) as caught:
        group.start_server(1, other)
    assert "the server's script differs from the head's" in str(caught.value)
    assert "4, 64" in str(caught.value)
    assert "5, 64" in str(caught.value)


def test_server_whose_optimizer_cannot_be_split_is_refused_with_both_sides_values(group_of):
    def hooked():
        model, optimizer = sgd()()
        optimizer.register_step_pre_hook(lambda *_: None)
        return model, optimizer

    group = group_of()
    expected = r"it can split the optimizers \(False,\), the head \(True,\)"
    with pytest.raises(ProtocolError, match=expected):
        group.start_server(1, hooked)


def test_worker_may_not_act_as_a_server(group_of, capsys):
    group = group_of()
    member = begun(group)
    member.end.send(between.PartArrived(1, 1, 0, 0))
    group.until(lambda: member.lost_by)
    assert "only a server may send this" in capsys.readouterr().out


def test_run_with_one_server_admits_no_other(group_of):
    others = OtherServers.none(group_of().whole())
    assert (others.servers, others.missing) == (1, [])
    with pytest.raises(ProtocolError, match="servers of this run are 0 to 0, got server 1"):
        others.admit(None, between.JoinAsServer(1, "", None, (), ""))


# ----------------------------------------------------------------------------------------- loss


def test_loss_of_a_server_is_noticed_while_the_head_waits_for_workers(group_of):
    group = group_of()
    begun(group)
    group.kill_server(2)
    with pytest.raises(ServerLost) as caught:
        group.settle()
    assert caught.value.why.startswith("lost server 2: ")
    assert caught.value.code == SERVER_LOST


def test_loss_of_a_server_is_noticed_while_the_head_waits_for_its_answer(group_of):
    group = group_of()
    begun(group)
    group.listener.step_others = lambda: group.kill_server(1) if 1 in group.running else None
    with pytest.raises(ServerLost, match=str(SERVER_LOST)) as caught:
        group.others.collect()
    assert caught.value.why.startswith("lost server 1: ")


def test_loss_of_a_server_is_noticed_while_the_head_sends(group_of):
    group = group_of()
    begun(group)
    group.kill_server(1)

    def talk():
        while True:
            group.others.broadcast(between.ReleaseSlot(0))

    with pytest.raises(ServerLost) as caught:
        talk()
    assert caught.value.why.startswith("lost server 1: ")


def test_head_that_has_lost_a_server_can_still_close_its_workers(group_of):
    group = group_of()
    begun(group)
    group.kill_server(1)
    with pytest.raises(ServerLost):
        group.settle()
    group.listener.shut_down()


def test_answer_that_nobody_has_asked_for_is_a_loss(group_of):
    group = group_of()
    begun(group)
    group.running[1].connections.head.send(between.PartReduced(1, {}))
    with pytest.raises(ServerLost, match=str(SERVER_LOST)) as caught:
        group.settle()
    assert "nobody has asked for PartReduced" in caught.value.why


def test_servers_lose_a_head_that_is_gone(group_of):
    group = group_of()
    begun(group)
    group.others.lost(1, "as far as the head knows")
    group.listener.shut_down()
    with pytest.raises(PeerLost):
        group.until(lambda: group.step_server(1))


# ------------------------------------------------------------------------------------------ end


def test_servers_leave_at_the_end(group_of):
    group = group_of(steps=1)
    member = begun(group)
    member.announce(1.0)
    group.until(lambda: any(isinstance(one, messages.RunEnded) for one in member.inbox))

    def step():
        for number, part in list(group.running.items()):
            if part.session._is_over:
                group.kill_server(number)
            else:
                group.step_server(number)

    group.listener.step_others = step
    group.others.end()
    assert group.running == {}
    group.listener.shut_down()  # a worker that is still there isn't closed on other servers


def test_server_that_is_lost_after_everything_was_saved_is_no_loss(group_of):
    group = group_of(steps=1)
    begun(group)
    group.kill_server(1)
    group.listener.step_others = lambda: None
    group.kill_server(2)
    group.others.end()
    group.listener.shut_down()


def test_last_version_is_exact_for_workers(group_of):
    group = group_of(steps=1)
    member = begun(group)
    member.announce(1.5)
    group.until(lambda: any(isinstance(one, messages.RunEnded) for one in member.inbox))
    end = member.take(messages.RunEnded)
    assert end.version == 1
    member.turn = end
    assert set(member.parameters().tolist()) == {-1.5}


def test_run_that_is_stopped_before_all_servers_are_there_ends(group_of):
    group = group_of()
    group.start_server(1)
    group.listener.stop_wanted = True
    group.server._stop_if_wanted()
    group.server._run_end.save(group.server._end)
    group.listener.step_others = lambda: group.kill_server(1) if 1 in group.running else None
    group.others.end()


def test_failed_server_is_not_asked_for_its_state_again(group_of):
    """Its last upload may still be on its way: a second one would look like a broken server."""
    group = group_of()
    begun(group)
    end = group.others._ends[2]
    end.send(between.CollectPart())  # asked for before it failed
    group.others.failure = "server 2 failed"
    for _ in range(2):
        with pytest.raises(PartFailed, match="server 2 failed"):
            group.others.collect()
    group.settle()
    assert group.others.number_of(end) == 2
