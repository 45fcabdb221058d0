# SPDX-License-Identifier: BSD-3-Clause
"""All interleavings of three workers over a few versions; the laws are checked at each event.

From each state the test tries every possible next event: a busy worker reports, a cancelled one
abandons its work, a timer fires, the shell reports an update. With a fault, one more thing happens
at any point: a worker dies (and may rejoin at any time), abandons work that was needed, has a
non-finite gradient, a fourth worker joins, or the run is asked to stop.

States that differ only in times and in the numbers of turns and timers count as the same state: no
decision depends on these, except for when a timer fires, and here timers fire at any time. So the
tree of all schedules becomes a graph that is small enough to explore completely.
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
"""How many updates to explore: without a fault, and with one."""


def state(cluster, faults):
    """Return everything that later decisions depend on."""
    ledger = cluster.decider.ledger
    return (
        faults,
        (ledger.version, ledger.last, ledger.paused, ledger.finished),
        (ledger.timer_runs, ledger.overdue, bool(cluster.due), memory_state(cluster.decider)),
        tuple(
            (worker, member.work, member.cancelled)
            for worker, member in sorted(ledger.members.items())
        ),
        tuple(ledger.idle),
        tuple((update, tally_state(tally)) for update, tally in sorted(ledger.tallies.items())),
        tuple(ledger.applying),
    )


def memory_state(decider):
    """Return the part of the rule's memory that affects more than the time of a timer."""
    memory = decider.ledger.memory
    if decider.policy.name == "ssp":
        here = {worker: memory[worker] for worker in sorted(decider.ledger.members)}
        slowest = min(here.values(), default=0)
        return tuple((worker, count - slowest) for worker, count in here.items())
    if decider.policy.name == "deadline":
        return len(memory) >= 3, any(whole for _, whole in memory)
    assert memory is None
    return None


def tally_state(tally):
    """Return the contributions of an update; their order makes no difference."""
    givers = sorted((c.worker, c.version) for c in tally.contributions)
    return tuple(givers), frozenset(tally.done), frozenset(tally.excused)


def normal_moves(cluster):
    """Yield everything that can happen without a fault: method, arguments, keyword arguments."""
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


def faulty_moves(cluster):
    """Yield everything else that can happen with a fault."""
    for worker in cluster.working:
        yield "arrive", (worker,), {"finite": False}
        if worker not in cluster.cancelled:
            yield "abandon", (worker,), {}
    for worker in cluster.asked:
        yield "leave", (worker,), {}
    yield "join", (3,), {}
    yield "stop", (), {}


def explore(policy, steps, faults, min_workers=1):
    """Explore the whole graph; yield a cluster in each state once."""
    first = Cluster.of(policy, steps=steps, min_workers=min_workers)
    seen, todo = {state(first, faults)}, [(first, faults)]
    while todo:
        cluster, left = todo.pop()
        yield cluster
        if cluster.finish:
            continue
        moves = [(move, left) for move in normal_moves(cluster)]
        if left:
            moves += [(move, left - 1) for move in faulty_moves(cluster)]
        for (name, args, more), left_then in moves:
            twin = cluster.fork()
            getattr(twin, name)(*args, **more)
            here = state(twin, left_then)
            if here not in seen:
                seen.add(here)
                todo.append((twin, left_then))


def check_that_it_can_continue(cluster):
    """Check that no idle worker could work, and that the run waits for something."""
    if cluster.finish or cluster.paused:
        return
    assert cluster.working
    decider = cluster.decider
    for worker in decider.ledger.idle:
        work = decider.policy.assign(decider.ledger, worker)
        assert work is None or work.update > decider.ledger.last


@pytest.mark.parametrize("policy", ["backup:1", "delayed:2", "deadline"])
def test_fork_shares_no_mutable_state(policy):
    """Otherwise exploring one branch would change another."""
    cluster = Cluster.of(policy)
    cluster.arrive(0)
    before = state_of(cluster.decider)
    fork = cluster.fork()
    assert view_of(fork.decider) == before
    fork.leave(1)
    fork.run_until(2)
    assert view_of(cluster.decider) == before


@pytest.mark.parametrize("policy", STEPS)
def test_every_interleaving_obeys_the_laws(policy):
    steps, _ = STEPS[policy]
    finished = 0
    for cluster in explore(policy, steps, faults=0):
        check_that_it_can_continue(cluster)
        finished += cluster.finish is not None
    assert finished > 0


@pytest.mark.parametrize("policy", STEPS)
def test_every_interleaving_with_a_fault_obeys_the_laws_and_finishes(policy):
    _, steps = STEPS[policy]
    finished = 0
    for cluster in explore(policy, steps, faults=1):
        check_that_it_can_continue(cluster)
        finished += cluster.finish is not None
        twin = cluster.fork()
        twin.run_until(steps)
        assert twin.finish
    assert finished > 0


@pytest.mark.parametrize("policy", ["sync", "backup:1", "delayed:1", "deadline:0.5", "async"])
def test_every_interleaving_with_a_pause_obeys_the_laws_and_finishes(policy):
    """The fault may be a death, and with fewer than three workers the run pauses."""
    pauses = 0
    for cluster in explore(policy, steps=2, faults=1, min_workers=3):
        check_that_it_can_continue(cluster)
        pauses += cluster.paused
        twin = cluster.fork()
        for worker in {0, 1, 2} - twin.asked.keys():
            twin.join(worker)
        twin.run_until(2)
        assert twin.finish
    assert pauses > 0
