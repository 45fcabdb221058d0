# SPDX-License-Identifier: BSD-3-Clause
"""All interleavings of three workers over a few versions, the laws checked at each event.

From each state every possible next thing is tried: any worker that works reports, one that was
cancelled gives up instead, a timer fires. With a fault, one bad thing more happens at any place: a
worker dies (and may come back whenever it likes), gives up work that was wanted, has a non-finite
gradient, comes as a fourth, or the run is told to stop.

States that differ only in times and in the numbers of turns and timers are one state: no decision
depends on these, but for the time at which a timer is to fire, and here timers fire at any time. So
the tree of all schedules folds into a graph that is small enough to walk whole.
"""

import pytest

from fakes import Cluster, state_of, view_of

STEPS = {
    "sync": (3, 2),
    "backup:1": (3, 2),
    "backup:2": (3, 2),
    "batchsync:2": (3, 2),
    "delayed:1": (3, 2),
    "delayed:2": (4, 2),
    "deadline:0.5": (3, 2),
    "deadline:q=1.0,n_min=2": (3, 1),
    "deadline:after=2": (3, 2),
    "async": (6, 3),
    "async:bound=1": (5, 3),
    "softsync:2": (4, 2),
    "ssp:0": (9, 5),
    "ssp:1": (6, 3),
}
"""How many updates the walk goes through: on a good day, and on one with a fault."""


def state(cluster, faults):
    """What the future depends on."""
    ledger = cluster.decider.ledger
    return (
        faults,
        (ledger.version, ledger.last, ledger.paused, ledger.finished),
        (ledger.timer_runs, ledger.overdue, bool(cluster.due), remembered(cluster.decider)),
        tuple(
            (worker, member.work, member.cancelled)
            for worker, member in sorted(ledger.members.items())
        ),
        tuple(ledger.idle),
        tuple((update, gathered(tally)) for update, tally in sorted(ledger.tallies.items())),
        tuple(ledger.applying),
    )


def remembered(decider):
    """What the rule has learnt, as far as more than the time of a timer depends on it."""
    memory = decider.ledger.memory
    if decider.policy.name == "ssp":
        here = {worker: memory[worker] for worker in sorted(decider.ledger.members)}
        slowest = min(here.values(), default=0)
        return tuple((worker, count - slowest) for worker, count in here.items())
    if decider.policy.name == "deadline":
        return len(memory) >= 3, any(whole for _, whole in memory)
    assert memory is None
    return None


def gathered(tally):
    """What an update in the making has; in which order it came makes no difference."""
    givers = sorted((c.worker, c.version) for c in tally.contributions)
    return tuple(givers), frozenset(tally.done), frozenset(tally.excused)


def good_moves(cluster):
    """Everything that may happen on a good day: method, argument, further arguments."""
    for worker in cluster.working:
        yield "arrive", (worker,), {}
        if worker in cluster.cancelled:
            yield "abandon", (worker,), {}
    for timer in cluster.due:
        yield "fire", (timer,), {}
    if cluster.unreported:
        yield "report_update", (), {}
    if len(cluster.asked) < 3:  # one has died: it may come back
        for worker in {0, 1, 2} - cluster.asked.keys():
            yield "join", (worker,), {}


def bad_moves(cluster):
    """Everything that may happen on a bad day besides."""
    for worker in cluster.working:
        yield "arrive", (worker,), {"finite": False}
        if worker not in cluster.cancelled:
            yield "abandon", (worker,), {}
    for worker in cluster.asked:
        yield "leave", (worker,), {}
    yield "join", (3,), {}
    yield "stop", (), {}


def explore(policy, steps, faults, min_workers=1):
    """Walk the whole graph; give each state once, as a cluster that is in it."""
    first = Cluster.of(policy, steps=steps, min_workers=min_workers)
    seen, todo = {state(first, faults)}, [(first, faults)]
    while todo:
        cluster, left = todo.pop()
        yield cluster
        if cluster.finish:
            continue
        moves = [(move, left) for move in good_moves(cluster)]
        if left:
            moves += [(move, left - 1) for move in bad_moves(cluster)]
        for (name, args, more), left_then in moves:
            twin = cluster.fork()
            getattr(twin, name)(*args, **more)
            here = state(twin, left_then)
            if here not in seen:
                seen.add(here)
                todo.append((twin, left_then))


def hold_that_it_can_go_on(cluster):
    """Nobody waits who could work, and there is something that the run waits for."""
    if cluster.finish or cluster.paused:
        return
    assert cluster.working
    decider = cluster.decider
    for worker in decider.ledger.idle:
        work = decider.policy.assign(decider.ledger, worker)
        assert work is None or work.update > decider.ledger.last


@pytest.mark.parametrize("policy", ["backup:1", "delayed:2", "deadline"])
def test_a_fork_shares_nothing_that_changes(policy):
    """Otherwise the walk would step on its own feet."""
    cluster = Cluster.of(policy)
    cluster.arrive(0)
    before = state_of(cluster.decider)
    fork = cluster.fork()
    assert view_of(fork.decider) == before
    fork.leave(1)
    fork.run_until(2)
    assert view_of(cluster.decider) == before


@pytest.mark.parametrize("policy", STEPS)
def test_every_interleaving_keeps_the_laws(policy):
    steps, _ = STEPS[policy]
    finished = 0
    for cluster in explore(policy, steps, faults=0):
        hold_that_it_can_go_on(cluster)
        finished += cluster.finish is not None
    assert finished > 0


@pytest.mark.parametrize("policy", STEPS)
def test_every_interleaving_with_a_fault_anywhere_keeps_the_laws_and_comes_to_its_end(policy):
    _, steps = STEPS[policy]
    finished = 0
    for cluster in explore(policy, steps, faults=1):
        hold_that_it_can_go_on(cluster)
        finished += cluster.finish is not None
        twin = cluster.fork()
        twin.run_until(steps)
        assert twin.finish
    assert finished > 0


@pytest.mark.parametrize("policy", ["sync", "backup:1", "delayed:1", "deadline:0.5", "async"])
def test_every_interleaving_with_a_pause_anywhere_keeps_the_laws_and_comes_to_its_end(policy):
    """The fault may be a death, and without all three the run waits."""
    pauses = 0
    for cluster in explore(policy, steps=2, faults=1, min_workers=3):
        hold_that_it_can_go_on(cluster)
        pauses += cluster.paused
        twin = cluster.fork()
        for worker in {0, 1, 2} - twin.asked.keys():
            twin.join(worker)
        twin.run_until(2)
        assert twin.finish
    assert pauses > 0
