# SPDX-License-Identifier: BSD-3-Clause
"""All servers make each update of the same gradients, whatever arrives where, and when."""

from contextlib import closing
from math import nan

import pytest
import torch

from paceline.errors import PeerLost, ProtocolError, SpecError
from paceline.run.net import messages
from paceline.run.net.address import NobodyListens
from paceline.run.net.server_messages import RunOver, ServerWelcome
from paceline.run.net.shared_memory import SharedMemoryStore
from paceline.run.server.part_server import PartServer
from paceline.run.settings import Settings
from paceline.run.system import System
from paceline.run.tensors.layout import gather
from paceline.spec import RunSpec
from paceline.trace.schema import Gradient
from server_group import Group, sgd, small_units


@pytest.fixture
def group_of(tmp_path):
    groups = []

    def make(workers, policy="sync", steps=100, **options):
        more = {name: options.pop(name) for name in ("make", "servers") if name in options}
        spec = RunSpec(workers=workers, steps=steps, **options.pop("spec", {}))
        settings = Settings(spec=spec, policy=policy, checkpoint_every="0", **options)
        groups.append(Group(tmp_path, settings, more.pop("make", None), **more))
        return groups[-1].start_servers()

    yield make
    for group in groups:
        group.close()


def begin(group, *workers):
    """Let workers join, and wait until each has its turn."""
    members = group.join(*workers)
    for member in members:
        member.assignment()
    return members


def assert_everywhere(group, value):
    """Check that each element of the newest version has this value, on each server."""
    weights = group.weights()
    assert len(weights) == group.servers
    assert all(own and set(own) == {value} for own in weights)
    assert sum(map(len, weights)) == 260


def announced(group, worker):
    """Wait until a worker may send its gradient, without its stepping."""
    group.until(lambda: group.peer_of(worker)._parts_left > 0, idle=[worker])


# -------------------------------------------------------------------- the same set of contributors


def test_gradients_count_on_all_servers(group_of):
    group = group_of(2)
    members = begin(group, 0, 1)
    for version in range(3):
        for member in members:
            member.announce(1.0 + 2 * member.number)
        group.until(lambda version=version: group.version > version)
        assert_everywhere(group, -2.0 * group.version)
        for member in members:
            member.assignment()
            assert set(member.parameters().tolist()) == {-2.0 * group.version}


@pytest.mark.parametrize("missing", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
def test_gradient_of_a_worker_that_dies_between_servers_counts_nowhere(group_of, missing):
    group = group_of(3)
    dying, *others = begin(group, 0, 1, 2)
    dying.hold(*missing)
    dying.announce(100.0)
    group.until(lambda: group.parts_left(0) == len(missing))
    for member in others:
        member.announce(2.0 * member.number)
    group.settle()
    assert group.version == 0
    group.kill_worker(0)
    group.until(lambda: group.version == 1)
    assert_everywhere(group, -3.0)
    assert group.contributors() == [[1, 2]]


def test_worker_that_died_between_servers_joins_again_and_counts_everywhere(group_of):
    group = group_of(2)
    dying, other = begin(group, 0, 1)
    dying.hold(2)
    dying.announce(100.0)
    group.until(lambda: group.parts_left(0) == 1)
    group.kill_worker(0)
    other.announce(1.0)
    group.until(lambda: group.version == 1)
    other.assignment()
    [again] = group.join(0)
    again.assignment()
    again.announce(3.0)
    other.announce(5.0)
    group.until(lambda: group.version == 2)
    assert_everywhere(group, -5.0)
    assert group.contributors() == [[1], [0, 1]]


def test_gradient_of_a_worker_that_dies_after_it_has_arrived_everywhere_counts_everywhere(group_of):
    group = group_of(2)
    dying, other = begin(group, 0, 1)
    dying.announce(1.0)
    group.until(lambda: not group.peer_of(0)._awaited and group.server._roster[0].asked_at is None)
    group.kill_worker(0)
    group.settle()
    other.announce(3.0)
    group.until(lambda: group.version == 1)
    assert_everywhere(group, -2.0)
    assert group.contributors() == [[0, 1]]


def test_servers_may_see_gradients_in_different_orders(group_of):
    group = group_of(4, servers=3)
    *members, last = begin(group, 0, 1, 2, 3)
    for number, member in enumerate(members):
        member.hold(*[server for server in range(3) if server != number])
        member.announce(2.0**number)
    group.until(lambda: all(group.parts_left(number) == 2 for number in range(3)))
    assert group.version == 0
    for number, member in enumerate(members):  # the servers get 0 2 1, 1 0 2 and 2 1 0
        member.hold((number + 2) % 3)
    group.until(lambda: all(group.parts_left(number) == 1 for number in range(3)))
    assert group.version == 0
    for member in members:
        member.hold()
    last.announce(9.0)
    group.until(lambda: group.version == 1)
    assert_everywhere(group, -4.0)


def test_gradient_has_not_arrived_while_one_server_is_slow(group_of):
    group = group_of(2)
    slow, other = begin(group, 0, 1)
    slow.announce(1.0)
    group.until(lambda: group.parts_left(0) == 1, without=[2])
    group.settle(without=[2])
    assert group.server._roster[0].asked_at is not None
    other.announce(3.0)
    group.settle(without=[2])
    assert group.version == 0
    group.until(lambda: group.version == 1)
    assert_everywhere(group, -2.0)


def test_update_is_made_while_one_server_lacks_the_gradient_of_a_straggler(group_of):
    group = group_of(3, "backup:1", spec={"late": "finish"})
    straggler, *others = begin(group, 0, 1, 2)
    straggler.hold(1)
    straggler.announce(100.0)
    group.until(lambda: group.parts_left(0) == 1)
    for member in others:
        member.announce(2.0 * member.number)
    group.until(lambda: group.version == 1)
    assert_everywhere(group, -3.0)
    straggler.hold()
    for member in [straggler, *others]:
        member.assignment()
        assert set(member.parameters().tolist()) == {-3.0}
    assert group.contributors() == [[1, 2]]


# ---------------------------------------------------------------------- withdrawn gradients


def withdrawn(group, held):
    """Let a gradient be withdrawn that hasn't arrived at these servers; return its worker."""
    straggler, *others = begin(group, 0, 1, 2)
    straggler.hold(*held)
    straggler.announce(100.0)
    group.until(lambda: group.parts_left(0) == len(held))
    for member in others:
        member.announce(2.0 * member.number)
    while group.version == 0:  # the servers work only while the head waits for them
        group.step_head()
        for member in others:
            member.poll()
        if group.version == 0:
            group.step_others()
    group.step_head()
    assert group.peer_of(0)._awaited == 0
    return straggler, others


@pytest.mark.parametrize("held", [(1,), (2,), (1, 2), (0, 1, 2)])
def test_part_that_crosses_its_withdrawal_is_ignored(group_of, held):
    group = group_of(3, "backup:1")
    straggler, others = withdrawn(group, held)
    straggler.hold()
    for link in straggler.end._links:  # it sends everything before it reads that it is to stop
        while link.sender:
            link.move()
    arrived = {n: one.session._workers for n, one in group.running.items()}
    assert set(arrived) == {1, 2}
    for number in held:
        if number:
            group.step_server(number)
    group.settle()
    assert group.version == 1
    assert_everywhere(group, -3.0)
    assert_next_update_is_right(group, straggler, others)


@pytest.mark.parametrize("held", [(1,), (2,), (1, 2), (0, 1, 2)])
def test_gradient_that_was_stopped_on_its_way_is_followed_by_the_next_one(group_of, held):
    group = group_of(3, "backup:1")
    straggler, others = withdrawn(group, held)
    straggler.poll()  # it stops, which the servers learn with what is left
    straggler.hold()
    assert_next_update_is_right(group, straggler, others)


@pytest.mark.parametrize("announces", [False, True])
def test_bytes_of_a_gradient_that_never_arrives_are_counted_on_all_servers(group_of, announces):
    """Of an announced one, server 2 gets a few bytes: it is stopped on its way."""
    group = group_of(3, "backup:1")
    straggler, *others = begin(group, 0, 1, 2)
    if announces:
        for stream in straggler.streams:
            stream.most = 40
        straggler.announce(100.0)
        announced(group, 0)
        straggler.poll()
    for member in others:
        member.announce(1.0)
    group.until(lambda: group.version == 1, idle=[0])
    group.settle(idle=[0])
    links, counted = straggler.end._links, group.peer_of(0).take_moved()
    recorded = [one for one in group.trace().records if isinstance(one, Gradient)]
    in_trace = sum(one.pushed_bytes for one in recorded if one.worker == 0)
    pushed = sum(link.sender.sent_bytes for link in links)
    assert pushed == in_trace + counted.to_server
    assert (pushed > 0) == announces
    if not announces:  # otherwise it is sent the next version already
        assert counted.to_worker == sum(link.receiver.received_bytes for link in links) > 0


def assert_next_update_is_right(group, straggler, others):
    """Check that the next gradient of the straggler is received correctly on all servers."""
    for member in [straggler, *others]:
        member.assignment()
        assert set(member.parameters().tolist()) == {-3.0}
    straggler.announce(1.0)
    group.until(lambda: group.server._roster[0].asked_at is None)
    others[0].announce(3.0)
    group.until(lambda: group.version == 2)
    assert_everywhere(group, -5.0)
    assert group.contributors() == [[1, 2], [0, 1]]


def test_worker_that_is_lost_at_one_server_leaves_the_run(group_of, capsys):
    group = group_of(2)
    lost, other = begin(group, 0, 1)
    lost.hold(1)
    lost.announce(100.0)
    group.until(lambda: group.parts_left(0) == 1)
    lost.streams[1].close()
    group.until(lambda: group.server._roster.get(0) is None, idle=[0])
    group.kill_worker(0)
    assert "worker 0 left: the data connection was closed" in capsys.readouterr().out
    other.announce(3.0)
    group.until(lambda: group.version == 1)
    assert_everywhere(group, -3.0)
    group.settle()
    assert all(len(one.session._workers) == 1 for one in group.running.values())


# -------------------------------------------------------------------------------- bad gradients


@pytest.mark.parametrize("server", range(3))
def test_gradient_that_is_not_finite_on_one_server_is_skipped_on_all(group_of, server, capsys):
    group = group_of(2, servers=3)
    honest, liar = begin(group, 0, 1)
    part = group.parts[server].slices[0][0]
    values = [torch.zeros(spec.shape) for spec in group.spec.optimizers[0].parameters]
    values[part.parameter].view(-1)[part.begin] = nan
    honest.announce(1.0)
    liar.announce(*values)
    group.until(lambda: group.version == 1)
    assert_everywhere(group, 0.0)
    group.until(lambda: group.server._roster.get(1) is None, idle=[1])
    assert group.server._roster.get(0) is not None
    told = capsys.readouterr().out
    assert "update 1 is not finite: the optimizer did not step" in told
    assert "worker 1 left: broke the protocol: its gradient contains NaN or infinity" in told
    group.kill_worker(1)
    honest.assignment()
    honest.announce(2.0)
    group.until(lambda: group.version == 2)
    assert_everywhere(group, -2.0)


# ------------------------------------------------------------------------------- uploaded states


def momentum_of(group):
    """Return the momentum of each element that each server has; None: a server has no state."""
    found = []
    shards = [group.shard, *(one.session._shard for one in group.running.values())]
    for shard in shards:
        [optimizer] = shard.state.optimizers
        held = [optimizer.state[p].get("momentum_buffer") for p in shard.state.parameters[0]]
        found.append({x for one in held if one is not None for x in one.flatten().tolist()})
    return found


def uploaded(momentum, shapes):
    model, optimizer = sgd(momentum=0.5)()
    for parameter, shape in zip(model.parameters(), shapes, strict=True):
        optimizer.state[parameter]["momentum_buffer"] = torch.full(shape, momentum)
    return optimizer.state_dict()


def test_uploaded_state_is_loaded_on_all_servers(group_of):
    group = group_of(1, make=sgd(momentum=0.5))
    [member] = begin(group, 0)
    member.end.send_state(0, uploaded(8.0, [(4, 64), (4,)]), has_begun=True)
    group.until(lambda: any(isinstance(one, messages.StateReply) for one in member.inbox))
    group.settle()
    assert momentum_of(group) == [{8.0}] * 3
    member.announce(1.0)
    group.until(lambda: group.version == 1)
    assert_everywhere(group, -5.0)  # 0.5 * 8 + 1
    assert group.shard.state_dict()["optimizers"][0]["state"][0]["momentum_buffer"].shape == (4, 64)


def test_uploaded_state_that_does_not_fit_is_loaded_nowhere(group_of, capsys):
    group = group_of(2, make=sgd(momentum=0.5))
    bad, other = begin(group, 0, 1)
    bad.end.send_state(0, uploaded(8.0, [(4, 64), (5,)]), has_begun=True)
    group.until(lambda: group.server._roster.get(0) is None, idle=())
    group.settle()
    assert momentum_of(group) == [set()] * 3
    assert "worker 0 left: broke the protocol:" in capsys.readouterr().out
    group.kill_worker(0)
    other.announce(1.0)
    group.until(lambda: group.version == 1)
    assert_everywhere(group, -1.0)


def test_state_of_all_servers_is_that_of_one(group_of):
    group = group_of(1, make=sgd(momentum=0.5), servers=3)
    [member] = begin(group, 0)
    member.announce(1.0)
    group.until(lambda: group.version == 1)
    state = group.shard.state_dict()
    assert [one.shape for one in state["parameters"][0]] == [(4, 64), (4,)]
    assert all(bool((one == -1.0).all()) for one in state["parameters"][0])
    [optimizer] = state["optimizers"]
    assert all(bool((one["momentum_buffer"] == 1).all()) for one in optimizer["state"].values())


# ------------------------------------------------------------------------------ its own life


def test_server_continues_with_the_next_head(tmp_path, group_of):
    group = group_of(1, servers=2)
    [member] = begin(group, 0)
    member.announce(1.0)
    group.until(lambda: group.version == 1)
    old = group.running[1].server
    group.close()
    (tmp_path / "next").mkdir()
    settings = Settings(spec=RunSpec(workers=1, steps=3), checkpoint_every="0")
    with closing(Group(tmp_path / "next", settings, servers=2)) as following:
        following.start_server(1, server=old)
        [member] = begin(following, 0)
        member.announce(2.0)
        following.until(lambda: following.version == 1)
        assert_everywhere(following, -2.0)


def test_error_of_the_scripts_optimizer_on_one_server_fails_the_run(group_of, capsys):
    group = group_of(1, servers=3)
    [member] = begin(group, 0)

    def fail(*_):
        raise RuntimeError("it broke")

    group.running[2].session._shard.state.optimizers[0].step = fail
    member.announce(1.0)
    group.until(lambda: group.server._failures.failure)
    assert group.server._failures.failure == "server 2 failed: RuntimeError: it broke"
    group.until(lambda: any(isinstance(one, messages.RunEnded) for one in member.inbox))
    group.server._run_end.save(group.server._end)
    capsys.readouterr()


def test_worker_for_which_another_server_has_no_memory_is_refused_with_the_reason(group_of):
    """The run goes on without it, and it may join when there is memory again."""

    def no_memory():
        raise SpecError("not enough shared memory for the accumulator")

    group = group_of(2)
    members = begin(group, 0, 1)
    store = group.running[2].session._store
    usual, store.new_accumulator = store.new_accumulator, no_memory
    reason = "server 2: not enough shared memory for the accumulator"
    with pytest.raises(ProtocolError, match=reason):
        group.join(2)
    store.new_accumulator = usual
    group.settle()
    assert not group.server._failures.failure
    assert [len(part.session._workers) for part in group.running.values()] == [2, 2]
    for member in members:
        member.announce(3.0)
    group.until(lambda: group.version == 1)
    assert_everywhere(group, -3.0)
    members[0].assignment()
    [late] = begin(group, 2)
    for member in (members[0], late):
        member.announce(5.0)
    group.until(lambda: group.version == 2)
    assert_everywhere(group, -8.0)
    assert group.contributors() == [[0, 1], [0, 2]]


# ------------------------------------------------------------------------------- the end of a run

WELCOME = ServerWelcome(2, None, 1, False, "exact", "exact")
LOST = "server 1 lost the head; waiting for it to restart"
ENDED = "server 1: the run has ended"


class Heads:
    """What a server finds one after the other: an error, or messages of a head that is lost then.

    It is the host and the connections of the server at once. The clock moves only when the server
    sleeps.
    """

    address = "tcp:127.0.0.1:1"

    def __init__(self, *found):
        self._found = list(found)
        self._inbox = []
        self._now = 0.0
        self.system = System(monotonic=lambda: self._now, sleep=self._sleep)
        self.head = self
        self.said = []

    def _sleep(self, seconds):
        self._now += seconds

    def serve(self):
        model, optimizer = sgd()()
        PartServer(1, gather([model], [optimizer]), self, self.said.append).serve()

    def connect(self):
        found = self._found.pop(0) if len(self._found) > 1 else self._found[0]
        if isinstance(found, Exception):
            raise found
        self._inbox = list(found)
        return self

    def new_store(self, part):
        return SharedMemoryStore(part.spec, part.layout)

    def send(self, message):
        del message

    def receive(self):
        if not self._inbox:
            raise PeerLost("the connection was closed")
        return self._inbox.pop(0)

    def wait_readable(self, timeout_s):
        del timeout_s
        return True

    def wait(self, timeout_s):
        del timeout_s
        return []

    def close(self):
        self._inbox.clear()


@pytest.fixture
def _small(monkeypatch):
    small_units(monkeypatch)


@pytest.mark.usefixtures("_small")
def test_server_leaves_when_the_head_says_that_the_run_has_ended():
    heads = Heads(PeerLost("not yet"), [WELCOME, RunOver()])
    heads.serve()
    assert heads.said == [ENDED]


@pytest.mark.usefixtures("_small")
def test_server_waits_for_a_head_that_restarts():
    heads = Heads([WELCOME], PeerLost("not yet"), [WELCOME, RunOver()])
    heads.serve()
    assert heads.said == [LOST, ENDED]


@pytest.mark.usefixtures("_small")
def test_server_leaves_when_the_launcher_of_the_head_is_gone_too():
    heads = Heads([WELCOME], NobodyListens("connection refused"))
    heads.serve()
    assert heads.said == [LOST, "waiting for the head, up to 10 minutes: connection refused", ENDED]


@pytest.mark.usefixtures("_small")
def test_server_that_is_refused_says_why():
    heads = Heads([messages.Refused("there is already a server 1")])
    with pytest.raises(ProtocolError, match="the head refused server 1: there is already a server"):
        heads.serve()
    assert heads.said == []
