# SPDX-License-Identifier: BSD-3-Clause
"""How simultaneous transfers share the links of a cluster.

A transfer between a worker and the servers is spread evenly over them. Of a transfer at rate r,
each of s servers carries r/s, and the link of the worker's host carries all of it, except the share
of a server on the same host. Rates are max-min fair: all transfers get the same rate, until a link
is full; the transfers on it keep that rate and the others share what is left, and so on. No
transfer is faster than the link of its worker's host. On a stalled link no byte moves.

Workers with the same kind of link form a *group*, whose transfers all have the same rate. So one
number describes their progress: the *level*, the bytes that a transfer started at time 0 would have
received by now. A transfer ends when the level has grown by its size. Starting or aborting a
transfer only changes how fast the levels grow.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Literal

from paceline.sim.engine import Engine
from paceline.sim.network import Network

__all__ = ["Direction", "Links", "Transfer"]

Direction = Literal["up", "down"]  # as seen from the worker: it pushes up and pulls down

LOCAL_BANDWIDTH = 10e9  # bytes a second between a worker and a server on the same host
REMEMBERED_RATES = 1 << 14
ROUNDING = 1e-9

Resource = tuple[int, Direction]  # the link of a host that transfers share, in one direction
SERVERS = -1  # in place of the number of a host: those of all servers that have their own


@dataclass(eq=False, slots=True)
class Group:
    """Transfers in one direction that all have the same rate."""

    uses: dict[Resource, float]  # the share of a transfer that each shared link carries
    at_most: float  # no transfer is faster
    level: float = 0.0
    rate: float = 0.0
    active: int = 0
    ends: list[tuple[float, int, "Transfer"]] = field(default_factory=list)  # a heap by level

    def next_s(self) -> float:
        """Return the seconds until the first of its transfers ends."""
        while self.ends and self.ends[0][2].number != self.ends[0][1]:
            heappop(self.ends)  # it left the group
        if not self.ends or not self.rate:
            return inf
        return max(0.0, self.ends[0][0] - self.level) / self.rate


@dataclass(eq=False, slots=True)
class Transfer:
    """Bytes in transit."""

    direction: Direction
    worker: int
    size_bytes: float
    done: Callable[[], None]
    left_bytes: float  # when it entered its group
    entry_level: float = 0.0  # of its group, when it entered
    number: int = 0  # of its entry in its group's heap; 0: in no group


class Links:
    """The links of all hosts, and the transfers on them."""

    def __init__(self, engine: Engine, network: Network) -> None:
        self._engine = engine
        self._network = network
        self._capacity: dict[Resource, float] = {}
        # On hosts of their own, servers have equally full links at any time: one stands for all.
        self._servers = range(network.servers) if network.beside else [SERVERS]
        self._groups: dict[Hashable, Group] = {}
        self._stalled: set[int] = set()
        self._rates = lru_cache(REMEMBERED_RATES)(self._fair_rates)
        self._levels_at = 0.0
        self._numbers = count(1)
        self._wake = 0  # number of the newest wake-up; older ones are obsolete

    def begin(
        self, direction: Direction, worker: int, size_bytes: float, done: Callable[[], None]
    ) -> Transfer:
        """Start a transfer; `done` is called at its end."""
        transfer = Transfer(direction, worker, size_bytes, done, left_bytes=size_bytes)
        self._advance()
        self._enter(transfer)
        return transfer

    def abort(self, transfer: Transfer) -> float:
        """Stop a transfer in progress; return how many of its bytes were moved."""
        self._advance()
        self._leave(transfer)
        return transfer.size_bytes - transfer.left_bytes

    def set_stalled(self, worker: int, is_stalled: bool, transfer: Transfer | None) -> None:
        """Let the link of a worker stall or recover; `transfer` is the one that is on it."""
        self._advance()
        if transfer is not None:
            self._leave(transfer)
        if is_stalled:
            self._stalled.add(worker)
        else:
            self._stalled.discard(worker)
        if transfer is not None:
            self._enter(transfer)

    # -------------------------------------------------------------------------------- progress

    def _enter(self, transfer: Transfer) -> None:
        group = self._group(transfer.direction, transfer.worker)
        transfer.entry_level = group.level
        transfer.number = next(self._numbers)
        heappush(group.ends, (group.level + transfer.left_bytes, transfer.number, transfer))
        self._change(group, 1)

    def _leave(self, transfer: Transfer) -> None:
        group = self._group(transfer.direction, transfer.worker)
        moved_bytes = group.level - transfer.entry_level
        transfer.left_bytes = max(0.0, transfer.left_bytes - moved_bytes)
        transfer.number = 0
        self._change(group, -1)

    def _advance(self) -> None:
        """Let the levels grow until now."""
        passed_s = self._engine.now - self._levels_at
        for group in self._groups.values():
            if group.active:
                group.level += group.rate * passed_s
        self._levels_at = self._engine.now

    def _change(self, group: Group, more: int) -> None:
        """Change the number of transfers of a group; compute the rates and the next end."""
        group.active += more
        groups = self._groups.values()
        rates = self._rates(tuple([each.active for each in groups]))
        wait_s, first = inf, group
        for each, rate in zip(groups, rates, strict=True):
            each.rate = rate
            if each.active and (next_s := each.next_s()) < wait_s:
                wait_s, first = next_s, each
        self._wake += 1
        if wait_s < inf:  # otherwise all transfers are stalled
            self._engine.at(self._engine.now + wait_s, self._on_wake, self._wake, first)

    def _on_wake(self, wake: int, group: Group) -> None:
        if wake != self._wake:
            return
        self._advance()
        end_level, _, transfer = heappop(group.ends)
        group.level = max(group.level, end_level)  # otherwise rounding could leave a byte behind
        self._change(group, -1)
        transfer.done()

    # ----------------------------------------------------------------------------------- rates

    def _group(self, direction: Direction, worker: int) -> Group:
        """Return the group of a worker's transfers in this direction."""
        key: Hashable
        if worker in self._stalled:
            key = "stalled"
        elif self._shares_link(worker):
            key = direction, self._network.host(worker), "shared"
        else:
            key = direction, self._network.link(worker)
        group = self._groups.get(key)
        if group is None:
            is_stalled = key == "stalled"
            group = Group({}, at_most=0.0) if is_stalled else self._new_group(direction, worker)
            self._groups[key] = group
        return group

    def _shares_link(self, worker: int) -> bool:
        """Return whether anybody else is on the host of this worker."""
        return self._network.workers_per_host > 1 or self._network.hosts_server(worker)

    def _new_group(self, direction: Direction, worker: int) -> Group:
        network, host = self._network, self._network.host(worker)
        opposite: Direction = "down" if direction == "up" else "up"
        share = 1 / len(self._servers)
        others = [server for server in self._servers if server != host]
        uses: dict[Resource, float] = {(server, opposite): share for server in others}
        if others and self._shares_link(worker):
            uses[host, direction] = share * len(others)
        for resource in uses:
            self._capacity.setdefault(resource, self._capacity_of(resource[0]))
        is_beside = network.hosts_server(worker)
        return Group(uses, at_most=LOCAL_BANDWIDTH if is_beside else network.link(worker))

    def _capacity_of(self, host: int) -> float:
        network = self._network
        if host == SERVERS:
            return network.bandwidth * network.servers
        return network.link_of_host(host)

    def _fair_rates(self, active: tuple[int, ...]) -> list[float]:
        """Return the rate of each group's transfers, given how many transfers each has."""
        groups = list(self._groups.values())
        rates = [0.0] * len(groups)
        left = dict(self._capacity)
        rising = [i for i, transfers in enumerate(active) if transfers]
        while rising:
            load = dict.fromkeys(left, 0.0)
            for i in rising:
                for link, share in groups[i].uses.items():
                    load[link] += active[i] * share
            full_at = {link: left[link] / load[link] for link in left if load[link]}
            rate_of = {
                i: min([groups[i].at_most, *(full_at[link] for link in groups[i].uses)])
                for i in rising
            }
            rate = min(rate_of.values())
            stopped = [i for i in rising if rate_of[i] <= rate * (1 + ROUNDING)]
            for i in stopped:
                rates[i] = rate
                for link, share in groups[i].uses.items():
                    left[link] -= active[i] * share * rate
            rising = [i for i in rising if i not in stopped]
        return rates
