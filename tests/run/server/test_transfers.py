# SPDX-License-Identifier: BSD-3-Clause
"""Announced gradients are admitted in order, or withdrawn once they would no longer count."""

from math import inf

import pytest

from fakes import Cluster
from message_examples import SPEC
from paceline.errors import PeerLost, ProtocolError
from paceline.leases import Use
from paceline.release import RELEASE
from paceline.run.net import messages
from paceline.run.net.in_process import InProcessNetwork, InProcessStore
from paceline.run.net.transport import Announcement
from paceline.run.server.roster import Roster
from paceline.run.server.transfers import Transfers
from paceline.run.settings import Settings
from paceline.spec import RunSpec


class Bench:
    """The transfers of a run whose workers announce gradients when the test says so."""

    def __init__(self, policy="sync", workers=3, hosts=()):
        self.released = []
        self.cluster = Cluster.of(policy, workers)
        self.roster = Roster(Settings(spec=RunSpec(workers=workers)), SPEC)
        network = InProcessNetwork(InProcessStore(SPEC))
        for worker in range(workers):
            network.connect()
            join = messages.Join(worker, RELEASE, SPEC)
            self.roster.admit(network._peers[-1], join, saves=False, position=b"")
        self.transfers = Transfers(self.cluster.decider, self.roster, self.released.append)
        self.hosts = hosts
        self.log = []
        self.fails = False

    def announce(self, worker, **fields):
        """Announce the gradient of the worker's turn."""
        asked = self.cluster.asked[worker]
        report = messages.GradientReport(
            asked.turn, asked.version, 0, 4, 0.5, 1.0, **{"uses": (Use(0, (worker,)),), **fields}
        )

        def note(what):
            if self.fails:
                raise PeerLost("gone")
            self.log.append((what, worker))

        host = self.hosts[worker] if self.hosts else ""
        announcement = Announcement(report, lambda: note("admit"), lambda: note("withdraw"), host)
        self.transfers.announce(self.roster[worker], announcement)

    def arrive(self, worker, now):
        """Let all of a worker's gradient arrive."""
        self.transfers.arrived(worker, now)
        self.cluster.arrive(worker)

    def admit(self, now=0.0):
        """Return the workers that are admitted now."""
        before = len(self.log)
        self.transfers.admit(now)
        return [worker for what, worker in self.log[before:] if what == "admit"]


def test_gradients_are_admitted_in_the_order_of_their_announcement():
    bench = Bench()
    assert not bench.transfers
    for worker in (2, 0, 1):
        bench.announce(worker)
    assert bench.transfers
    assert bench.admit() == [2, 0, 1]
    assert bench.admit() == []


def test_each_server_and_each_host_has_its_places():
    bench = Bench("async", workers=6, hosts="aaabbb")
    bench.transfers.set_servers(2)
    bench.announce(0)
    bench.admit(0.0)
    bench.arrive(0, 1.0)
    for worker in range(6):
        bench.announce(worker)

    assert bench.admit(1.0) == [0, 1, 3, 4]


def test_few_transfers_hold_a_place_once_the_usual_time_is_known():
    bench = Bench("async", workers=4)
    bench.announce(0)
    assert bench.admit(0.0) == [0]
    bench.arrive(0, 1.0)
    for worker in (0, 1, 2, 3):
        bench.announce(worker)
    assert bench.admit(1.0) == [0, 1]
    assert bench.transfers.next_at == 3.0
    bench.arrive(0, 1.5)
    assert bench.admit(1.5) == [2]
    assert bench.admit(10.0) == [3]  # two transfers took too long and gave up their places


def test_gradient_that_would_not_count_any_more_is_withdrawn_and_its_turn_ends():
    bench = Bench("backup:1")
    bench.cluster.arrive(0)
    bench.announce(2)
    assert bench.transfers.take_worthless() == []
    bench.cluster.arrive(1)
    [(peer, report)] = bench.transfers.take_worthless()
    assert bench.log == [("withdraw", 2)]
    assert peer.worker == 2
    assert (report.turn, report.version, report.samples, report.cancelled) == (1, 0, 4, True)
    assert (report.sq_norm, report.uses, report.new_samples) == (None, (), None)
    assert not bench.transfers
    assert bench.transfers.take_worthless() == []
    assert bench.admit() == []


def test_gradient_on_its_way_is_withdrawn_too():
    bench = Bench("backup:1")
    bench.announce(2)
    assert bench.admit() == [2]
    bench.cluster.arrive(0)
    bench.cluster.arrive(1)
    assert [peer.worker for peer, _ in bench.transfers.take_worthless()] == [2]
    assert bench.log == [("admit", 2), ("withdraw", 2)]


def test_what_a_worker_said_about_its_script_is_kept_when_its_gradient_is_withdrawn():
    bench = Bench("backup:1")
    bench.announce(2, pulled=(1,), cpu_s=0.25)
    bench.cluster.arrive(0)
    bench.cluster.arrive(1)
    [(_, report)] = bench.transfers.take_worthless()
    assert (report.pulled, report.cpu_s, report.compute_s) == ((1,), 0.25, 0.5)


def test_second_announcement_of_a_worker_breaks_the_protocol():
    bench = Bench()
    bench.announce(1)
    with pytest.raises(ProtocolError, match="worker 1 has announced a gradient already"):
        bench.announce(1)
    assert bench.admit() == [1]


def test_worker_may_announce_again_once_its_gradient_has_arrived():
    bench = Bench("async")
    bench.announce(1)
    bench.admit()
    bench.arrive(1, 1.0)
    assert not bench.transfers
    bench.announce(1)
    assert bench.admit(1.0) == [1]


def test_worker_that_leaves_is_forgotten():
    bench = Bench()
    bench.announce(0)
    bench.announce(1)
    bench.transfers.forget(0)
    bench.transfers.forget(2)
    assert bench.admit() == [1]
    bench.transfers.forget(1)
    assert not bench.transfers
    assert bench.transfers.next_at == inf


def test_arrival_without_an_announcement_is_ignored():
    """Where memory is shared, nothing is announced."""
    bench = Bench()
    bench.transfers.arrived(0, 1.0)
    assert not bench.transfers
    assert bench.transfers.next_at == inf


@pytest.mark.parametrize("call", ["admit", "take_worthless"])
def test_worker_that_is_lost_when_it_is_told_is_marked_as_broken(call):
    bench = Bench("backup:1")
    bench.announce(2)
    bench.fails = True
    if call == "admit":
        bench.admit()
    else:
        bench.cluster.arrive(0)
        bench.cluster.arrive(1)
        assert len(bench.transfers.take_worthless()) == 1
    [(end, reason, _)] = bench.roster.take_broken()
    assert (end, reason) == (bench.roster[2].end, "gone")
