# SPDX-License-Identifier: BSD-3-Clause
"""Joining a server that is late, refuses, or dies; on the in-process transport, without waiting."""

import pytest
import torch
import torch._dynamo  # optimizers import it, and it sets an environment variable
from torch import nn

from paceline.errors import PeerLost, ProtocolError
from paceline.release import RELEASE
from paceline.run.net import messages
from paceline.run.net.in_process import InProcessNetwork, InProcessStore
from paceline.run.net.server_wait import LIMIT_S, QUIET_S
from paceline.run.system import System
from paceline.run.tensors.layout import gather
from paceline.run.worker.connection import ServerConnection

MODEL = nn.Linear(2, 1)
SPEC = gather([MODEL], [torch.optim.SGD(MODEL.parameters(), lr=0.1)]).spec
WELCOME = messages.Welcome(workers=2, latency="", seed=0, requeue=True, averages=False)


class Servers:
    """Servers for successive attempts to connect: None for no server, or messages to send.

    The clock moves only when the worker sleeps, and during attempts if `lasts_s` is set.
    """

    lasts_s = 0.0

    def __init__(self, *answers):
        self._answers = list(answers)
        self._network = InProcessNetwork(InProcessStore(SPEC))
        self.peers = []
        self.now = 0.0
        self.events = []  # "dial", "close", and pauses
        system = System(monotonic=lambda: self.now, sleep=self._sleep)
        self.connection = ServerConnection(3, SPEC, self.dial, system=system)

    def _sleep(self, seconds):
        self.events.append(seconds)
        self.now += seconds

    def dial(self):
        self.events.append("dial")
        self.now += self.lasts_s
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if answer is None:
            raise PeerLost("no server at unix:@here")
        end = self._network.connect()
        peer = self._network._peers[-1]
        self.peers.append(peer)
        for message in answer:
            if isinstance(message, messages.Welcome):
                peer.open_slot(message)
            else:
                peer.send(message)
        if not answer:
            self._network.close(peer)
        close = end.close
        end.close = lambda: (self.events.append("close"), close())
        return end


def test_worker_joins_with_its_spec_and_gets_a_slot():
    servers = Servers([WELCOME])
    welcome, opened = servers.connection.join()
    assert welcome == WELCOME
    assert [p.shape for p in opened.slot.parameters[0]] == [(1, 2), (1,)]
    [join] = servers.peers[0].receive_nowait()
    assert (join.worker, join.release, join.spec) == (3, RELEASE, SPEC)


def test_worker_that_connects_again_says_that_it_is_the_same_process():
    servers = Servers([WELCOME])
    servers.connection.join()
    servers.connection.join()
    first, second = (next(peer.receive_nowait()) for peer in servers.peers)
    assert first.session == second.session != b""
    other = Servers([WELCOME])
    other.connection.join()
    assert next(other.peers[0].receive_nowait()).session != first.session


def test_worker_names_the_seat_that_its_number_is_reserved_for():
    servers = Servers([WELCOME])
    servers.connection = ServerConnection(3, SPEC, servers.dial, seat=b"seat")
    servers.connection.join()
    assert next(servers.peers[0].receive_nowait()).seat == b"seat"


def test_worker_waits_for_a_server_that_is_still_starting(capsys):
    servers = Servers(None, None, None, [WELCOME])
    assert servers.connection.join()[0] == WELCOME
    assert 0 < servers.now < QUIET_S
    assert capsys.readouterr().err == ""


def test_long_wait_is_explained_once(capsys):
    servers = Servers(*[None] * 100, [WELCOME])
    servers.connection.join()
    assert servers.now > 2 * QUIET_S
    line = "waiting for the server, up to 10 minutes: no server at unix:@here\n"
    assert capsys.readouterr().err == line


def test_worker_gives_up_when_no_server_appears():
    servers = Servers(None)
    with pytest.raises(PeerLost, match="gave up after 10 minutes: no server at unix:@here"):
        servers.connection.join()
    assert LIMIT_S < servers.now < LIMIT_S + 1


def test_worker_does_not_give_up_right_after_an_attempt_that_lasted():
    """A server welcomes nobody before the other servers are there, and may die meanwhile."""
    servers = Servers([], [WELCOME])
    servers.lasts_s = LIMIT_S + 1
    assert servers.connection.join()[0] == WELCOME


def test_worker_joins_the_next_server_if_one_dies_before_its_welcome():
    servers = Servers([], [], [WELCOME])
    assert servers.connection.join()[0] == WELCOME
    assert len(servers.peers) == 3


def test_pauses_grow_also_if_a_server_is_lost_before_its_welcome():
    """A worker that can't reach one of several servers loses its connection to the head so."""
    servers = Servers(*[[]] * 20, [WELCOME])
    servers.connection.join()
    pauses = [what for what in servers.events if isinstance(what, float)]
    assert len(pauses) == 20
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.01, 0.5)


def test_connection_is_closed_before_the_pause():
    """Otherwise the run would count on this worker meanwhile."""
    servers = Servers([], [WELCOME])
    servers.connection.join()
    assert servers.events == ["dial", "close", 0.01, "dial"]


def test_refused_worker_says_why():
    servers = Servers([messages.Refused("its model differs")])
    with pytest.raises(ProtocolError, match="the server refused worker 3: its model differs"):
        servers.connection.join()


def test_anything_but_a_welcome_is_an_error():
    servers = Servers([messages.CancelTurn(1)])
    with pytest.raises(ProtocolError, match=r"expected a welcome, got CancelTurn\(turn=1\)"):
        servers.connection.join()


def test_rejoining_is_announced_and_closes_the_old_connection(capsys):
    servers = Servers([WELCOME])
    servers.connection.join()
    first = servers.connection.end
    servers.connection.join()
    assert capsys.readouterr().err == "lost the server; waiting for it to restart\n"
    assert servers.connection.end is not first
    with pytest.raises(PeerLost):
        first.send(messages.Proof(bytes(32)))


def test_closed_connection_is_lost_for_the_server():
    servers = Servers([WELCOME])
    servers.connection.close()  # before there is one
    servers.connection.join()
    list(servers.peers[0].receive_nowait())
    servers.connection.close()
    with pytest.raises(PeerLost):
        list(servers.peers[0].receive_nowait())
