# SPDX-License-Identifier: BSD-3-Clause
"""What counts, and when an update is due, considering the end of a run and its pauses."""

from fakes import Cluster
from paceline.core.events import Fate
from paceline.core.verdicts import can_update, judge


def test_nothing_counts_and_no_update_is_due_after_the_last_update():
    cluster = Cluster.of("async", steps=1)
    work = cluster.decider.ledger.members[1].work
    cluster.arrive(0)
    policy, ledger = cluster.decider.policy, cluster.decider.ledger
    assert judge(policy, ledger, work) is Fate.LATE
    assert not can_update(policy, ledger)


def test_paused_run_makes_only_updates_with_all_their_contributions():
    cluster = Cluster.of("sync", min_workers=3)
    cluster.leave(2)
    cluster.arrive(0)
    cluster.arrive(1)
    assert cluster.paused
    assert not can_update(cluster.decider.policy, cluster.decider.ledger)
