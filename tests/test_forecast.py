# SPDX-License-Identifier: BSD-3-Clause
"""What would count after other gradients arrived: a forecast decides as the decider would."""

from random import Random

import pytest

from fakes import POLICY_TABLE, Cluster, random_steps, state_of, view_of
from paceline.core.events import Fate
from paceline.core.policies import Backup
from paceline.core.policy import Policy
from paceline.forecast import Forecast, room_for


def forecast_of(cluster, *arrivals):
    """Return a forecast in which the gradients of these workers have arrived."""
    forecast = Forecast(cluster.decider.policy, cluster.decider.ledger)
    for worker in arrivals:
        forecast.suppose_arrival(worker)
    return forecast


class TakesFreshPairs(Policy):
    """A user's rule: two gradients make an update, and each counts for one more update."""

    def needed(self, ledger):
        return 2

    def judge(self, ledger, work):
        is_old = ledger.version > work.version + 1
        assert ledger.next_tally is not None  # a rule may look at it
        return Fate.STALE if is_old else Fate.ACCEPTED


class StopsCounting(Backup):
    """A user's rule: every second update takes a single gradient."""

    def is_due(self, ledger):
        enough = 1 if ledger.version % 2 else self.needed(ledger)
        return len(ledger.next_tally.contributions) >= enough


@pytest.mark.parametrize("policy", [*POLICY_TABLE, TakesFreshPairs(), StopsCounting(1)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_forecast_accepts_what_the_decider_accepts_after_the_same_arrivals(policy, seed):
    cluster, rng = Cluster.of(policy), Random(seed)
    for _ in random_steps(cluster, rng, 40):
        ahead = cluster.working
        rng.shuffle(ahead)
        twin, forecast = cluster.fork(), forecast_of(cluster)
        before = state_of(cluster.decider)
        for i, worker in enumerate(ahead):
            for other in ahead[i:]:
                assert forecast.accepts(other) == twin.decider.would_accept(other)
            forecast.suppose_arrival(worker)
            twin.arrive(worker, after=0.0)
        assert view_of(cluster.decider) == before


def test_update_has_room_for_no_more_gradients_than_it_needs():
    cluster = Cluster.of("backup:1")

    assert forecast_of(cluster, 0).accepts(2)
    assert not forecast_of(cluster, 0, 1).accepts(2)


def test_update_is_forecast_without_a_worker_that_tries_again():
    cluster = Cluster.of("backup:0")
    cluster.arrive(1, finite=False)  # nothing waits for its second try

    assert forecast_of(cluster, 0).accepts(1)
    assert not forecast_of(cluster, 0, 2).accepts(1)


@pytest.mark.parametrize("policy", ["sync", "backup:1"])
def test_contributions_are_counted_but_not_copied(policy):
    """With thousands of workers, a copy for each of their gradients would take too long."""

    class Contributions(list):
        def __iter__(self):
            raise AssertionError

    cluster = Cluster.of(policy, 5)
    cluster.arrive(0)
    tally = cluster.decider.ledger.next_tally
    tally.contributions = Contributions(tally.contributions)

    assert forecast_of(cluster, 1).accepts(4)
    assert forecast_of(cluster, 1, 2).accepts(4)
    assert forecast_of(cluster, 1, 2, 3).accepts(4) is (policy == "sync")


def test_arrived_gradients_take_up_room_too():
    cluster = Cluster.of("backup:1")
    cluster.arrive(0)

    assert not forecast_of(cluster, 1).accepts(2)


def test_bound_counts_every_update_ahead():
    cluster = Cluster.of("async:bound=1")

    assert forecast_of(cluster, 0).accepts(2)
    assert not forecast_of(cluster, 0, 1).accepts(2)


def test_workers_without_work_and_strangers_never_count():
    cluster = Cluster.of("sync")
    cluster.arrive(0)

    forecast = forecast_of(cluster, 0, 99)

    assert not forecast.accepts(0)
    assert not forecast.accepts(99)
    assert forecast.accepts(1)


def test_nothing_counts_after_the_last_update():
    assert not forecast_of(Cluster.of("async", steps=1), 0).accepts(1)


def test_update_of_a_paused_run_waits_for_all_its_contributions():
    cluster = Cluster.of("sync", min_workers=3)
    cluster.leave(2)

    forecast = forecast_of(cluster, 0, 1)  # the update would still wait for a third

    assert cluster.paused
    assert forecast.accepts(0)


def test_gradients_go_into_the_update_that_is_next_after_those_ahead():
    assert forecast_of(Cluster.of("sync")).destination(0) == 1
    assert forecast_of(Cluster.of("async"), 0).destination(1) == 2
    assert forecast_of(Cluster.of("softsync:2"), 0).destination(1) == 1
    assert forecast_of(Cluster.of("backup:1"), 0, 1).destination(2) is None


@pytest.mark.parametrize(
    ("policy", "arrived", "room"),
    [("sync", 0, 3), ("backup:1", 1, 1), ("async", 0, None), ("deadline:0.5", 0, None)],
)
def test_room_is_known_where_only_the_number_of_gradients_decides(policy, arrived, room):
    cluster = Cluster.of(policy)
    for worker in range(arrived):
        cluster.arrive(worker)
    assert room_for(cluster.decider.policy, cluster.decider.ledger) == room
