# SPDX-License-Identifier: BSD-3-Clause
"""Who may send, and when: the laws of the queue under every policy, and its rule by example."""

from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import POLICY_TABLE, Cluster
from paceline.admission import AdmissionQueue
from paceline.core.events import Fate
from paceline.core.policy import Policy
from paceline.errors import InternalError

PATIENCE = 2.0  # times the usual duration; part of the rule


class Traffic:
    """Workers that announce and send under a queue; it checks the laws at every step.

    The model of the link is left to the test: it says which transfer arrives, and when.
    """

    def __init__(self, policy, places, workers=3, transfers=1, hosts=(), **spec):
        self.cluster = Cluster.of(policy, workers, **spec)
        self.queue = AdmissionQueue(
            self.cluster.decider, servers=places // transfers, transfers=transfers
        )
        self.places, self.transfers = places, transfers
        self.hosts = hosts  # by worker; empty: each has its own
        self.log = []  # of admissions, to compare two runs

    @property
    def now(self):
        return self.cluster.now

    @property
    def announced(self):
        return [worker for worker in self.cluster.asked if worker in self.queue]

    @property
    def sending(self):
        return [worker for worker in self.announced if self.queue.is_admitted(worker)]

    @property
    def waiting(self):
        return [worker for worker in self.announced if not self.queue.is_admitted(worker)]

    @property
    def computing(self):
        busy = set(self.cluster.working) - set(self.announced) - self.cluster.cancelled
        return sorted(busy)

    def announce(self, *workers):
        """Announce the gradients of these workers, then admit."""
        for worker in workers:
            self.queue.announce(worker, self.host_of(worker))
        return self.admit()

    def host_of(self, worker):
        return self.hosts[worker] if worker < len(self.hosts) else ""

    def arrive(self, worker, after=0.0, finite=True):
        """The last byte arrives."""
        self.queue.arrived(worker, self.now + after)
        self.cluster.arrive(worker, after=after, finite=finite)
        return self.admit()

    def leave(self, worker):
        self.queue.withdraw(worker)
        self.cluster.leave(worker, after=0.0)
        return self.admit()

    def wait(self):
        """Nothing happens until the queue wants to be asked again."""
        self.cluster.now = max(self.now, self.queue.next_at)
        return self.admit()

    def admit(self):
        """Withdraw what was cancelled, admit, and check the laws."""
        for worker in self.cluster.cancelled:
            self.queue.withdraw(worker)
        before, ahead = self.waiting_in_order(), self.queue.placed
        admitted = self.queue.admit(self.now)
        ahead = [worker for worker in ahead if worker in self.queue.placed]
        assert admitted == [worker for worker in before if worker in admitted]
        assert len(self.queue.placed) <= self.places
        named = [host for host in map(self.host_of, self.queue.placed) if host]
        assert all(named.count(host) <= self.transfers for host in named)
        self.check_that_they_count(ahead, admitted)
        assert self.queue.admit(self.now) == []
        self.log.append((self.now, admitted, self.queue.next_at))
        return admitted

    def waiting_in_order(self):
        return list(self.queue._waiting)

    def check_that_they_count(self, ahead, admitted):
        twin = self.cluster.fork()
        for worker in ahead:
            twin.arrive(worker, after=0.0)
        for worker in admitted:
            assert twin.decider.would_accept(worker)
            if worker in self.queue.placed:
                twin.arrive(worker, after=0.0)


def learned(policy, places, workers=3, usual=1.0, **options):
    """Return traffic whose queue has seen one transfer, which took this long."""
    traffic = Traffic(policy, places, workers, **options)
    traffic.queue.announce(0)
    traffic.queue.admit(traffic.now)
    traffic.cluster.now += usual
    traffic.queue.arrived(0, traffic.now)
    return traffic


# ----------------------------------------------------------------------------------- the rule


def test_transfers_are_admitted_a_few_at_a_time_in_order_of_announcement():
    traffic = learned("sync", places=2, workers=4)

    assert traffic.announce(2, 0, 3, 1) == [2, 0]
    assert traffic.arrive(0, after=1.0) == [3]
    assert traffic.arrive(2, after=0.1) == [1]


def test_workers_of_one_host_do_not_take_the_places_of_others():
    hosts = ["a", "a", "a", "a", "b", "b", "b", "b"]
    traffic = learned("sync", places=4, workers=8, transfers=2, hosts=hosts)

    assert traffic.announce(0, 1, 2, 3) == [0, 1]  # two fill the link of a host
    assert traffic.announce(4, 5, 6, 7) == [4, 5]
    assert traffic.arrive(4, after=1.0) == [6]
    assert traffic.arrive(0, after=0.1) == [2]


def test_workers_without_a_known_host_have_their_own():
    traffic = learned("sync", places=4, workers=4, transfers=2)

    assert traffic.announce(0, 1, 2, 3) == [0, 1, 2, 3]


def test_slow_transfer_gives_up_the_place_of_its_host():
    traffic = learned("sync", places=2, workers=3, usual=3.0, hosts=["a", "a", "b"])

    assert traffic.announce(0, 1, 2) == [0, 2]
    assert traffic.arrive(2, after=1.0) == []
    assert traffic.wait() == [1]


def test_no_more_gradients_are_sent_than_the_update_needs():
    traffic = learned("backup:2", places=4, workers=4)

    assert traffic.announce(3, 2, 1, 0) == [3, 2]
    assert traffic.arrive(3, after=1.0) == []
    assert traffic.arrive(2, after=1.0) == []
    assert traffic.cluster.version == 1
    assert traffic.announced == []


def test_every_gradient_is_sent_in_turn_under_a_rule_without_a_barrier():
    traffic = learned("async", places=1, workers=3)

    assert traffic.announce(1, 0, 2) == [1]
    assert traffic.arrive(1, after=1.0) == [0]
    assert traffic.arrive(0, after=1.0) == [2]


def test_gradient_that_would_be_too_old_after_those_ahead_waits_and_is_never_sent():
    traffic = learned("async:bound=1", places=3, workers=3)

    assert traffic.announce(0, 1, 2) == [0, 1]
    traffic.arrive(0, after=0.5)
    traffic.arrive(1, after=0.5)
    assert traffic.announced == []


def test_gradient_for_a_later_update_does_not_wait_for_the_next_one():
    traffic = learned("delayed:1", places=3)
    traffic.announce(0)
    traffic.arrive(0, after=1.0)  # it has contributed to update 1 and works for update 2

    assert traffic.announce(0, 1, 2) == [0, 1, 2]


def test_slow_transfer_gives_up_its_place_after_twice_the_usual_time():
    traffic = learned("sync", places=1, usual=3.0)
    began = traffic.now

    assert traffic.announce(0, 1, 2) == [0]
    assert traffic.queue.next_at == began + PATIENCE * 3.0
    assert traffic.wait() == [1]
    assert traffic.queue.is_admitted(0)
    assert traffic.queue.placed == (1,)
    assert traffic.queue.next_at == began + 2 * PATIENCE * 3.0


def test_slow_transfer_no_longer_counts_as_ahead():
    """So the backup takes its part in the update, and the slow transfer is cancelled."""
    traffic = learned("backup:1", places=3)

    assert traffic.announce(0, 1, 2) == [0, 1]
    traffic.arrive(1, after=1.0)
    assert traffic.wait() == [2]
    traffic.arrive(2, after=1.0)
    assert traffic.announced == []
    assert 0 in traffic.cluster.cancelled


def test_slow_transfer_that_arrives_still_counts():
    traffic = learned("backup:1", places=1)
    version = traffic.cluster.version
    traffic.announce(0, 1, 2)
    traffic.wait()
    assert traffic.queue.placed == (1,)

    traffic.arrive(0, after=0.1)
    traffic.arrive(1, after=0.1)

    assert traffic.cluster.version == version + 1
    assert [c.worker for c in traffic.cluster.updates[-1].contributions] == [0, 1]


def test_worker_that_was_slow_needs_no_place_until_it_is_fast_again():
    traffic = learned("async", places=1, usual=1.0)
    traffic.announce(2)
    traffic.announce(0)
    traffic.wait()
    traffic.arrive(2, after=5.0)
    traffic.arrive(0)

    assert traffic.announce(1, 0, 2) == [1, 2]
    assert traffic.queue.placed == (1,)
    traffic.arrive(2, after=0.5)
    assert traffic.announce(2) == []
    assert traffic.arrive(1) == [0]
    assert traffic.arrive(0) == [2]


def test_worker_that_was_slow_sends_only_what_counts():
    traffic = learned("backup:1", places=2)
    traffic.announce(2)
    traffic.announce(0, 1)
    traffic.wait()
    traffic.arrive(0)
    traffic.arrive(1)
    traffic.cluster.abandon(2)

    assert traffic.announce(0, 1, 2) == [0, 1]


def test_all_that_count_are_admitted_until_the_usual_time_is_known():
    """Otherwise a first transfer that is stalled could block the run forever."""
    traffic = Traffic("backup:2", places=1)

    assert traffic.announce(2, 1, 0) == [2, 1, 0]
    assert traffic.queue.placed == ()
    assert traffic.queue.next_at == inf


def test_usual_time_is_the_median_of_recent_transfers():
    traffic = learned("async", places=1, usual=1.0)
    for took_s in [1.0, 1.0, 9.0, 1.0, 9.0, 1.0]:
        traffic.announce(0)
        traffic.arrive(0, after=took_s)
    began = traffic.now
    traffic.announce(0, 1)

    assert traffic.queue.next_at == began + PATIENCE * 1.0


def test_usual_time_follows_a_network_that_becomes_slower():
    traffic = learned("async", places=1, usual=1.0)
    for _ in range(40):
        traffic.announce(0)
        traffic.arrive(0, after=7.0)
    began = traffic.now
    traffic.announce(0, 1)

    assert traffic.queue.next_at == began + PATIENCE * 7.0


def test_withdrawn_transfer_frees_its_place():
    traffic = learned("sync", places=1)
    traffic.announce(0, 1, 2)

    assert traffic.leave(0) == [1]
    assert traffic.leave(2) == []
    assert traffic.announced == [1]


def test_non_finite_gradient_makes_room_for_another():
    traffic = learned("backup:1", places=3)
    assert traffic.announce(0, 1, 2) == [0, 1]

    assert traffic.arrive(0, after=1.0, finite=False) == [2]


def test_unknown_worker_can_be_withdrawn_and_can_arrive():
    traffic = learned("sync", places=1)

    traffic.queue.withdraw(99)
    traffic.queue.arrived(99, 1.0)

    assert 99 not in traffic.queue
    assert traffic.announce(0) == [0]


def test_worker_that_announces_again_goes_to_the_end():
    """Its first announcement was of a turn that ended when its connection was lost."""
    traffic = learned("sync", places=1)
    traffic.queue.announce(1)

    assert traffic.announce(0, 2, 1) == [0]
    assert traffic.waiting_in_order() == [2, 1]


def test_worker_that_is_no_member_is_not_admitted():
    traffic = learned("sync", places=1)
    traffic.queue.announce(99)

    assert traffic.queue.admit(traffic.now) == []
    assert not traffic.queue.is_admitted(99)


@pytest.mark.parametrize(("servers", "transfers"), [(0, 1), (1, 0)])
def test_queue_without_places_is_refused(servers, transfers):
    with pytest.raises(InternalError, match="make no sense"):
        AdmissionQueue(Cluster.of("sync").decider, servers, transfers)


class CountsForOneMoreUpdate(Policy):
    """A user's rule: two gradients make an update, and a late one goes into the next."""

    def needed(self, ledger):
        return 2

    def judge(self, ledger, work):
        return Fate.ACCEPTED if ledger.version - work.version <= 1 else Fate.STALE


# ------------------------------------------------------------------------------------ the laws

STEPS = ["announce", "arrive", "arrive", "wait", "timer", "report", "broken", "leave", "join"]

every_policy = pytest.mark.parametrize("policy", [*POLICY_TABLE, CountsForOneMoreUpdate()], ids=str)
schedules = st.lists(
    st.tuples(st.sampled_from(STEPS), st.integers(0, 6), st.sampled_from([0.0, 0.25, 1.0, 8.0])),
    max_size=40,
)
some_hosts = st.lists(st.sampled_from(["", "a", "b"]), max_size=5)


def perform(traffic, step, pick, after):
    """Perform one step of a schedule if it is possible; the laws are checked on the way."""
    cluster = traffic.cluster
    members = sorted(cluster.asked)
    choices = {
        "announce": traffic.computing,
        "arrive": traffic.sending,
        "broken": traffic.sending,
        "timer": cluster.due,
        "report": sorted(cluster.cancelled),
        "leave": members if len(members) > 1 else [],
        "join": [worker for worker in range(5) if worker not in members],
        "wait": [0] if traffic.queue.next_at < inf else [],
    }[step]
    if not choices:
        return
    chosen = choices[pick % len(choices)]
    if step == "announce":
        traffic.announce(chosen)
    elif step in ("arrive", "broken"):
        traffic.arrive(chosen, after, finite=step == "arrive")
    elif step == "leave":
        traffic.leave(chosen)
    elif step == "wait":
        traffic.wait()
    else:
        {"timer": cluster.fire, "report": cluster.abandon, "join": cluster.join}[step](chosen)
        traffic.admit()


@every_policy
@settings(max_examples=25, deadline=None)
@given(schedule=schedules, places=st.integers(1, 3), hosts=some_hosts)
def test_nothing_that_counts_waits_forever_even_if_no_transfer_ever_arrives(
    policy, schedule, places, hosts
):
    """`Traffic` checks after each step that all that is admitted counts, in order, in a place."""
    traffic = Traffic(policy, places, hosts=hosts)
    for step in schedule:
        perform(traffic, *step)

    for _ in range(10):
        traffic.wait() if traffic.queue.next_at < inf else None

    assert traffic.queue.next_at == inf
    stuck = [w for w in traffic.waiting if traffic.cluster.decider.would_accept(w)]
    assert stuck == []


@every_policy
@settings(max_examples=25, deadline=None)
@given(schedule=schedules, places=st.integers(1, 3), hosts=some_hosts)
def test_everything_that_counts_is_admitted_without_waiting_if_transfers_arrive(
    policy, schedule, places, hosts
):
    traffic = Traffic(policy, places, hosts=hosts)
    for step in schedule:
        perform(traffic, *step)

    while traffic.sending:
        traffic.arrive(traffic.sending[0])

    stuck = [w for w in traffic.waiting if traffic.cluster.decider.would_accept(w)]
    assert stuck == []


@every_policy
@settings(max_examples=10, deadline=None)
@given(schedule=schedules)
def test_the_same_calls_give_the_same_answers(policy, schedule):
    twins = Traffic(policy, 2), Traffic(policy, 2)
    for traffic in twins:
        for step in schedule:
            perform(traffic, *step)

    assert twins[0].log == twins[1].log


NEEDS_ALL = ("sync", "backup:0", "ssp", "delayed")


@pytest.mark.parametrize(
    "policy",
    [*(rule for rule in POLICY_TABLE if not rule.startswith(NEEDS_ALL)), CountsForOneMoreUpdate()],
    ids=str,
)
def test_stalled_link_never_blocks_a_rule_that_can_do_without_it(policy):
    """Worker 2 never delivers a byte; whenever the queue waits for it, time passes."""
    traffic = Traffic(policy, places=1)
    for _ in range(200):
        if traffic.cluster.version >= 8:
            break
        moving = [worker for worker in traffic.sending if worker != 2]
        if traffic.computing:
            traffic.announce(traffic.computing[-1])
        elif traffic.cluster.cancelled:
            perform(traffic, "report", 0, 0.0)
        elif moving:
            traffic.arrive(moving[0], after=1.0)
        elif traffic.cluster.due:
            perform(traffic, "timer", 0, 0.0)
        else:
            traffic.wait()
    assert traffic.cluster.version >= 8


# --------------------------------------------------------------------------------------- pools


def pooled(policy, *pools, workers=4, places=4, **spec):
    """Return traffic whose workers are in these pools, and whose usual time is known."""
    traffic = Traffic(policy, places, workers, **spec)
    members = {worker: pool for pool in pools for worker in pool}
    traffic.queue = AdmissionQueue(
        traffic.cluster.decider, servers=places, transfers=1, pool_of=lambda w: members.get(w, ())
    )
    traffic.places, traffic.transfers = inf, inf  # of single gradients; sums take one place
    return traffic


def sums(traffic):
    """Return the sums that are under way."""
    sending = [w for w in traffic.cluster.asked if traffic.queue.is_admitted(w)]
    return {traffic.queue.together_with(worker) for worker in sending}


def announce(traffic, *workers, kind=0):
    for worker in workers:
        traffic.queue.announce(worker, kind=kind)
    return traffic.queue.admit(traffic.now)


def test_pool_waits_for_all_of_its_workers_that_still_compute():
    traffic = pooled("sync", (0, 1), (2, 3))
    assert announce(traffic, 0, 2) == []
    assert announce(traffic, 1) == [0, 1]
    assert sums(traffic) == {(0, 1)}
    assert announce(traffic, 3) == [2, 3]


def test_pool_does_not_wait_for_more_than_the_update_needs():
    traffic = pooled("backup:1", (0, 1), (2, 3))
    assert announce(traffic, 0, 2) == []
    assert announce(traffic, 3) == [0, 2, 3]
    assert sums(traffic) == {(0,), (2, 3)}


def test_pool_does_not_wait_for_a_worker_that_is_gone():
    traffic = pooled("sync", (0, 1), (2, 3))
    announce(traffic, 0)
    traffic.cluster.leave(1, after=0.0)
    assert traffic.queue.admit(traffic.now) == [0]


def test_only_one_sum_of_a_pool_is_under_way():
    traffic = pooled("async", (0, 1, 2))
    assert announce(traffic, 0) == [0]
    assert announce(traffic, 1) == []
    traffic.queue.arrived(0, traffic.now)
    traffic.cluster.arrive(0, after=0.0)
    assert traffic.queue.admit(traffic.now) == [1]


def test_gradients_of_different_updates_are_never_added_up():
    """Under async, each gradient makes an update."""
    traffic = pooled("async", (0, 1, 2))
    assert announce(traffic, 0, 1, 2) == [0]


def test_rule_for_pairs_adds_up_pairs():
    traffic = pooled("softsync:2", (0, 1, 2))
    assert announce(traffic, 0, 1, 2) == [0, 1]


def test_gradients_of_different_kinds_are_never_added_up():
    traffic = pooled("sync", (0, 1, 2), workers=3)
    announce(traffic, 0, kind=1)
    announce(traffic, 1, kind=2)
    assert announce(traffic, 2, kind=1) == [0, 2]
    assert sums(traffic) == {(0, 2)}


def test_what_is_left_of_a_sum_waits_again_before_all_others():
    traffic = pooled("sync", (0, 1, 2))
    announce(traffic, 0, 1, 2)
    assert sums(traffic) == {(0, 1, 2)}
    traffic.queue.withdraw(1)
    traffic.cluster.leave(1, after=0.0)
    assert not traffic.queue.is_admitted(0)
    assert announce(traffic, 3) == [0, 2, 3]
    assert sums(traffic) == {(0, 2), (3,)}


def test_sum_that_has_arrived_is_usable_if_all_of_it_counts_for_one_update():
    traffic = pooled("backup:1", (0, 1), (2, 3))
    announce(traffic, 0, 1)
    assert traffic.queue.is_usable((0, 1))
    for worker in (2, 3):
        traffic.cluster.arrive(worker, after=0.0)
    assert not traffic.queue.is_usable((0, 1))
    assert traffic.queue.is_usable((0,))


def test_sum_takes_one_place():
    traffic = pooled("async", (0, 1), (2, 3), places=1)
    announce(traffic, 0)
    traffic.queue.arrived(0, traffic.now + 1.0)
    traffic.cluster.arrive(0, after=1.0)
    assert announce(traffic, 1) == [1]
    assert announce(traffic, 2) == []  # the only place is taken
    assert traffic.queue.placed == (1,)


@pytest.mark.parametrize("policy", POLICY_TABLE, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_pools_never_keep_a_run_waiting(policy, seed):
    """When nobody computes any more, something is under way, or nothing that waits counts."""
    rng = Random(seed)
    traffic = pooled(policy, (0, 1), (2,), workers=3)
    cluster, queue = traffic.cluster, traffic.queue
    for _ in range(200):
        busy = [w for w in cluster.working if w not in queue]
        under_way = sorted(sums(traffic))
        worthless = [
            w for w in cluster.working if w in queue and not cluster.decider.would_accept(w)
        ]
        if worthless:
            queue.withdraw(worthless[0])
            cluster.arrive(worthless[0], after=0.0)
        elif under_way and (not busy or rng.random() < 0.5):
            arrived = rng.choice(under_way)
            if queue.is_usable(arrived):
                for worker in arrived:
                    queue.arrived(worker, cluster.now)
                    cluster.arrive(worker, after=0.0)
            else:
                queue.wait_again(arrived)
        elif busy:
            queue.announce(rng.choice(busy))
        else:
            assert not cluster.working, "everybody waits, and nothing is under way"
            break
        queue.admit(cluster.now)
    assert cluster.decider.ledger.version > 5
