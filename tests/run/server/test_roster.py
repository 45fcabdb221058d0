# SPDX-License-Identifier: BSD-3-Clause
"""The roster admits, parks and removes workers; nothing else changes a peer."""

import ast
from pathlib import Path

import pytest
from msgspec.structs import replace

import paceline.run.server as server_package
from message_examples import SPEC
from paceline.core.events import Fate
from paceline.errors import PeerLost, ProtocolError, SpecError
from paceline.release import RELEASE
from paceline.run.net import messages
from paceline.run.net.in_process import InProcessNetwork, InProcessStore
from paceline.run.server.roster import Peer, Roster
from paceline.run.settings import Settings
from paceline.run.tensors.state_spec import StateSpec
from paceline.spec import RunSpec

SETTINGS = Settings(spec=RunSpec(workers=3, seed=5), latency="50ms", ema=0.9, requeue=False)
NOTICE = messages.FateNotice(Fate.ACCEPTED, 4, 1, 0)


class Lobby:
    """A roster, and connections inside this process."""

    def __init__(self, settings=SETTINGS):
        self.store = InProcessStore(SPEC)
        self.network = InProcessNetwork(self.store)
        self.roster = Roster(settings, SPEC)

    def connect(self):
        """Return the worker's and the server's end of a new connection."""
        worker_end = self.network.connect()
        worker_end.send(messages.StateRequest("average"))  # so that the network returns its peer
        [peer_end] = [end for end in self.network.wait(0.0) if end.has_news()]
        assert list(peer_end.receive_nowait())
        return worker_end, peer_end

    def join(self, worker, **fields):
        """Let a worker join; return its end and the peer."""
        worker_end, peer_end = self.connect()
        join = replace(messages.Join(worker, RELEASE, SPEC), **fields)
        return worker_end, self.roster.admit(peer_end, join, saves=True, position=b"here")


@pytest.fixture
def lobby():
    return Lobby()


# ---------------------------------------------------------------------------- joining and leaving


def test_admitted_worker_is_a_member_and_is_welcomed(lobby):
    worker_end, peer = lobby.join(2)
    assert (peer.worker, peer.is_parked, peer.asked_at, peer.notice) == (2, False, None, None)
    assert peer.options_known is None
    assert lobby.roster[2] is peer
    assert lobby.roster.member(peer.end) is lobby.roster.find(peer.end) is peer
    assert lobby.roster.members == lobby.roster.active == [peer]
    assert worker_end.receive() == messages.Welcome(
        workers=3,
        latency="50ms",
        seed=5,
        requeue=False,
        averages=True,
        saves=True,
        position=b"here",
        worker=2,
    )
    assert worker_end.open_slot().slot.parameters[0][0].shape == (2, 3)


def test_connection_that_has_not_joined_is_not_a_member(lobby):
    _, peer_end = lobby.connect()
    assert lobby.roster.find(peer_end) is None
    assert lobby.roster.get(0) is None
    with pytest.raises(ProtocolError, match="a worker must join before anything else"):
        lobby.roster.member(peer_end)


OTHER = StateSpec((), (), (), ())
REFUSALS = {
    "another release": (
        {"release": "0.0.1"},
        f"expected Paceline {RELEASE} in a worker, got 0.0.1",
    ),
    "another script": ({"spec": OTHER}, "the worker's script differs from the server's: "),
    "a number that is taken": ({"worker": 0}, "there is already a worker 0; give this one another"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_joining_worker_is_refused(lobby, what):
    fields, reason = REFUSALS[what]
    _, first = lobby.join(0)
    with pytest.raises(ProtocolError, match=reason):
        lobby.join(**{"worker": 1, **fields})
    assert lobby.roster.members == [first]
    assert lobby.roster.known_count == 1


def test_connection_cannot_join_twice(lobby):
    _, peer = lobby.join(1)
    with pytest.raises(ProtocolError, match="worker 1 has joined already"):
        lobby.roster.admit(peer.end, messages.Join(2, RELEASE, SPEC), False, b"")
    assert lobby.roster.members == [peer]


def test_worker_without_memory_for_a_slot_is_refused_alone(lobby, monkeypatch):
    _, first = lobby.join(0)

    def fail():
        raise SpecError("not enough shared memory for the slot")

    monkeypatch.setattr(lobby.store, "new_accumulator", fail)
    with pytest.raises(ProtocolError, match="not enough shared memory for the slot"):
        lobby.join(1)
    assert lobby.roster.members == [first]
    assert not lobby.roster.is_known(1)


def test_removed_member_stays_known_and_its_number_is_free(lobby):
    _, peer = lobby.join(1)
    lobby.roster.remove(peer)
    assert lobby.roster.members == []
    assert lobby.roster.find(peer.end) is None
    assert lobby.roster.is_known(1)
    _, again = lobby.join(1)
    assert lobby.roster.members == [again]
    assert lobby.roster.known_count == 1


def test_worker_that_will_never_join_is_known(lobby):
    lobby.join(0)
    lobby.roster.give_up(2)
    assert [lobby.roster.is_known(worker) for worker in range(3)] == [True, False, True]
    assert lobby.roster.known_count == 2
    assert lobby.roster.get(2) is None


# ---------------------------------------------------------------------------------------- parking


def test_parked_member_is_not_active_and_keeps_its_number(lobby):
    _, first = lobby.join(0)
    _, second = lobby.join(1)
    lobby.roster.park(first)
    assert lobby.roster.members == [first, second]
    assert lobby.roster.active == [second]
    assert lobby.roster.find(first.end) is first
    with pytest.raises(ProtocolError, match="there is already a worker 0"):
        lobby.join(0)
    lobby.roster.unpark(first)
    assert lobby.roster.active == [first, second]


@pytest.mark.parametrize("is_busy", [False, True])
def test_member_that_is_parked_while_idle_is_silent(lobby, is_busy):
    """It has nothing to report, so the server must watch its process."""
    _, peer = lobby.join(0)
    if is_busy:
        lobby.roster.begin_turn(peer, 1.0, 0)
    lobby.roster.park(peer)
    assert peer.is_silent == (not is_busy)


# ------------------------------------------------------------------------------ turns and notices


def test_member_is_busy_during_its_turn(lobby):
    _, peer = lobby.join(0)
    lobby.roster.set_fate(peer, NOTICE, 5)
    lobby.roster.begin_turn(peer, 2.5, options_known=3)
    assert (peer.asked_at, peer.options_known, peer.notice) == (2.5, 3, None)
    assert lobby.roster.computing == {peer.worker: 0.0}
    assert lobby.roster.end_turn(peer, 4.0) == 2.5
    assert (peer.longest_s, lobby.roster.computing) == (1.5, {})
    assert peer.asked_at is None
    assert lobby.roster.end_turn(peer, 5.0) is None
    lobby.roster.reopen_turn(peer, 2.5)
    assert peer.asked_at == 2.5


def test_computing_time_is_never_longer_than_the_turn(lobby):
    _, peer = lobby.join(0)
    lobby.roster.begin_turn(peer, 2.0, 0)
    measured = peer.measured(messages.AbandonReport(1, 99.0, cpu_s=0.3), now=2.5, sq_norm=4.0)
    assert (measured.asked_at, measured.compute_s, measured.sq_norm) == (2.0, 0.5, 4.0)
    assert measured.cpu_s == 0.3
    assert peer.measured(messages.AbandonReport(1, 0.25), now=2.5).compute_s == 0.25


def test_notice_of_a_contributor_is_completed_with_the_count(lobby):
    _, peer = lobby.join(0)
    lobby.roster.set_fate(peer, NOTICE, 5)
    lobby.roster.count_contributors(0, 4, 2)  # its gradient was accepted for another update
    assert peer.notice == NOTICE
    lobby.roster.count_contributors(0, 5, 3)
    assert peer.notice == messages.FateNotice(Fate.ACCEPTED, 4, 1, 3)
    lobby.roster.clear_notice(peer)
    assert peer.notice is None


def test_count_of_contributors_ignores_workers_without_a_notice(lobby):
    _, peer = lobby.join(0)
    lobby.roster.set_fate(peer, NOTICE, 5)
    lobby.roster.begin_turn(peer, 1.0, 0)  # the notice was sent with the assignment
    lobby.roster.count_contributors(0, 5, 3)
    assert peer.notice is None
    lobby.roster.remove(peer)
    lobby.roster.count_contributors(0, 5, 3)


# ---------------------------------------------------------------------------------------- sending


def test_messages_reach_the_worker(lobby):
    worker_end, peer = lobby.join(0)
    worker_end.receive()
    buffer = lobby.store.new_buffer()
    assignment = messages.Assignment(1, 0, buffer.number, (0,), 0.0)
    lobby.roster.send(peer, messages.CancelTurn(7))
    lobby.roster.publish(peer, assignment, buffer)
    assert worker_end.receive() == messages.CancelTurn(7)
    message = worker_end.receive()
    assert message == assignment
    assert worker_end.fetch(message) is buffer.views
    assert list(lobby.roster.take_broken()) == []


@pytest.mark.parametrize("how", ["send", "publish"])
def test_peer_that_cannot_be_reached_is_broken_and_reported_once(lobby, how):
    """The sender continues: it may be in the middle of an update."""
    worker_end, peer = lobby.join(0)
    _, other = lobby.join(1)
    worker_end.close()
    if how == "send":
        lobby.roster.send(peer, messages.CancelTurn(7))
    else:
        buffer = lobby.store.new_buffer()
        assignment = messages.Assignment(1, 0, buffer.number, (0,), 0.0)
        lobby.roster.publish(peer, assignment, buffer)
    assert lobby.roster.members == [peer, other]  # the server removes it later
    assert list(lobby.roster.take_broken()) == [(peer.end, "the connection was closed", "")]
    assert list(lobby.roster.take_broken()) == []


def test_worker_that_dies_as_it_is_welcomed_is_lost(lobby):
    worker_end, peer_end = lobby.connect()
    worker_end.close()
    with pytest.raises(PeerLost):
        lobby.roster.admit(peer_end, messages.Join(0, RELEASE, SPEC), False, b"")
    assert lobby.roster.members == []


# ------------------------------------------------------------------------------ only the roster


def test_only_the_roster_changes_a_peer():
    fields = set(Peer.__dataclass_fields__)
    folder = Path(server_package.__file__).parent
    for path in folder.glob("*.py"):
        if path.name != "roster.py":
            assert assigned_to_peers(path) & fields == set(), path.name


def assigned_to_peers(path):
    """Return the attributes of a `peer` that a module assigns."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store | ast.Del)
            and isinstance(node.value, ast.Name)
            and node.value.id == "peer"
        ):
            found.add(node.attr)
    return found
