# SPDX-License-Identifier: BSD-3-Clause
"""When workers share an agent, and how its process is kept alive."""

import signal
from dataclasses import replace

import pytest

from fake_head import FakeHead, FakeProcesses
from paceline.run.launch import restarts
from paceline.run.launch.agent_child import AgentChild, is_of_use
from paceline.run.launch.restarts import PAUSE_MAX_S
from paceline.run.net.address import listen, local_twin


@pytest.fixture
def elsewhere(identity):
    """The identity of workers whose head is on another host."""
    return replace(identity, address="tcp:10.0.0.5:29400")


class Host:
    def __init__(self, who):
        self.head, self.processes = FakeHead(), FakeProcesses()
        self.who = who
        self.agent = AgentChild(who, self.processes, self.head.system)

    def die(self):
        self.processes.exit("agent", -signal.SIGKILL)
        self.processes.take_exited()
        self.agent.on_exited()

    def later(self, seconds):
        self.head.now += seconds
        self.agent.restart_if_due()


def test_several_workers_share_an_agent(elsewhere):
    assert is_of_use(elsewhere, 2)
    assert not is_of_use(elsewhere, 1)


def test_workers_on_the_host_of_the_head_need_no_agent(elsewhere):
    with listen(local_twin(elsewhere.address, elsewhere.token())):
        assert not is_of_use(elsewhere, 2)


def test_workers_reach_the_agent_instead_of_the_head(elsewhere):
    host = Host(elsewhere)
    [agent] = host.processes.started
    served = host.agent.served(replace(elsewhere, worker=3))
    assert agent.is_agent
    assert (agent.address, served.address) == (elsewhere.address, agent.listen)
    assert served.worker == 3


def test_agent_that_dies_is_started_again_and_again(elsewhere):
    """Its workers wait for it."""
    host = Host(elsewhere)
    host.die()
    host.later(restarts.FIRST_PAUSE_S / 2)
    assert len(host.processes.started) == 1
    for attempt in range(8):
        host.later(PAUSE_MAX_S)
        assert len(host.processes.started) == 2 + attempt
        host.die()


def test_agent_that_is_not_needed_any_more_ends(elsewhere):
    host = Host(elsewhere)
    host.agent.end()
    host.agent.end()
    assert host.processes.signals == [("agent", signal.SIGTERM)]
    host.die()
    host.later(PAUSE_MAX_S)
    assert len(host.processes.started) == 1
