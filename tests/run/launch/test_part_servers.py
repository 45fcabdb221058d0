# SPDX-License-Identifier: BSD-3-Clause
"""The other servers of a run on this machine: which are created, and which are killed."""

import signal
from pathlib import Path

import pytest

from paceline.run.launch.environment import Identity
from paceline.run.launch.hangs import FROZEN_SERVER_S
from paceline.run.launch.part_servers import PartServers
from paceline.run.launch.processes import Child
from paceline.run.system import System

HEAD = Identity("tcp:127.0.0.1:29400", Path("/run/token"), Path("/run"), None)


class World:
    """A clock, stopped processes, and the signals that processes got."""

    def __init__(self):
        self.now = 100.0
        self.stopped = set()  # pids
        self.signals = []
        self.said = []
        self.system = System(monotonic=lambda: self.now, is_stopped=self.stopped.__contains__)

    def signal(self, child, number):
        self.signals.append((child.name, number))


@pytest.fixture
def world():
    return World()


@pytest.fixture
def servers(world):
    """Two servers besides the head, which run."""
    found = PartServers(world, world.said.append, world.system)
    found.create(HEAD, 3, threads=2)
    for number, child in enumerate(found.children, start=1):
        child.pid = number
    return found


def test_all_servers_but_the_head_are_created(servers):
    assert [child.name for child in servers.children] == ["server 1", "server 2"]
    assert [child.who.server for child in servers.children] == [1, 2]
    assert {child.threads for child in servers.children} == {2}
    for child in servers.children:
        assert child.who.address == HEAD.address
        assert not child.who.is_head
        assert child in servers


def test_run_with_one_server_has_no_others(world):
    servers = PartServers(world, world.said.append, world.system)
    servers.create(HEAD, 1, threads=2)
    assert servers.children == []
    servers.end_frozen()
    servers.end_with_hung(Child("server", HEAD, 2, pid=7))
    assert world.signals == []
    assert Child("server", HEAD, 2) not in servers


def test_stopped_server_is_killed_after_a_while(world, servers):
    world.stopped.add(2)
    servers.end_frozen()
    world.now += FROZEN_SERVER_S - 0.1
    servers.end_frozen()
    assert world.signals == []
    world.now += 0.1
    servers.end_frozen()
    assert world.signals == [("server 2", signal.SIGKILL)]
    assert world.said == ["server 2 was stopped (SIGSTOP); killing it"]


def test_server_that_continues_is_not_killed(world, servers):
    """Being stopped again later begins a new period."""
    for _ in range(3):
        world.stopped.add(1)
        servers.end_frozen()
        world.now += FROZEN_SERVER_S - 0.1
        servers.end_frozen()
        world.stopped.clear()
        world.now += 0.1
        servers.end_frozen()
    assert world.signals == []


def test_stopped_server_that_exits_is_not_killed(world, servers):
    """Its next process may be stopped for as long as any other."""
    world.stopped.add(1)
    servers.end_frozen()
    servers.children[0].pid = None
    world.now += FROZEN_SERVER_S
    servers.end_frozen()
    servers.children[0].pid = 3
    world.stopped.add(3)
    servers.end_frozen()
    assert world.signals == []


def test_all_servers_are_killed_with_a_head_that_hangs(world, servers):
    """The launcher can't tell which of them hangs, and all go back to the last checkpoint."""
    servers.children[0].pid = None  # it is being restarted
    servers.end_with_hung(Child("server", HEAD, 2, pid=7))
    assert world.signals == [("server 2", signal.SIGKILL)]
    assert world.said == ["server 2, for which it may have been waiting, is killed as well"]


def test_head_that_was_stopped_waits_for_no_server(world, servers):
    world.stopped.add(7)
    servers.end_with_hung(Child("server", HEAD, 2, pid=7))
    assert world.signals == []
