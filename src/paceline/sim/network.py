# SPDX-License-Identifier: BSD-3-Clause
"""The network of a simulated cluster: a delay, and links that transfers share equally.

A transfer between a worker and the servers takes `delay` seconds plus the time for its bytes. Each
server's link carries `bandwidth` bytes per second in each direction, independently, and all
transfers in one direction share it equally. A model on several servers is spread evenly, so s
servers act as one link that is s times as wide. No transfer is faster than the worker's own link,
which has the `bandwidth` of one server's.

Because all transfers on a link have the same rate, one number describes their progress: the
*level*, the bytes that a transfer started at time 0 would have received by now. A transfer ends
when the level has grown by its size; starting or aborting transfers only changes how fast it grows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from paceline.errors import SpecError
from paceline.sim.engine import Engine
from paceline.spec import parse_bytes, parse_number, parse_seconds, split_call

__all__ = ["NETWORK_FORM", "Link", "Network", "Transfer", "parse_network"]

NETWORK_FORM = "model=100MB,bandwidth=1.25GB,delay=0.5ms,servers=1"


@dataclass(frozen=True, slots=True)
class Network:
    """The cost of moving parameters and gradients."""

    model_bytes: float
    bandwidth: float
    delay: float = 0.0
    servers: int = 1

    def __post_init__(self) -> None:
        if self.model_bytes <= 0:
            raise SpecError(f"model must be > 0 bytes, got {self.model_bytes}")
        if self.bandwidth <= 0:
            raise SpecError(f"bandwidth must be > 0 bytes a second, got {self.bandwidth}")
        if self.delay < 0:
            raise SpecError(f"delay must be >= 0 seconds, got {self.delay}")
        if self.servers < 1:
            raise SpecError(f"servers must be >= 1, got {self.servers}")

    def __str__(self) -> str:
        return (
            f"model={self.model_bytes:g},bandwidth={self.bandwidth:g},"
            f"delay={self.delay:g},servers={self.servers}"
        )


def parse_network(text: str) -> Network:
    """Parse a network string such as `NETWORK_FORM`."""
    _, values, named = split_call(f"network:{text}")
    unknown = values or sorted(named.keys() - {"model", "bandwidth", "delay", "servers"})
    missing = sorted({"model", "bandwidth"} - named.keys())
    if unknown or missing:
        what = f"{unknown[0]!r} is not a setting" if unknown else f"{missing[0]} is missing"
        raise SpecError(f"network {text!r}: {what}; write {NETWORK_FORM}")
    try:
        return Network(
            model_bytes=parse_bytes(named["model"], "model"),
            bandwidth=parse_bytes(named["bandwidth"], "bandwidth"),
            delay=parse_seconds(named.get("delay", "0"), "delay"),
            servers=_whole(named.get("servers", "1")),
        )
    except SpecError as error:
        raise SpecError(f"network {text!r}: {error}; write {NETWORK_FORM}") from None


def _whole(text: str) -> int:
    number = parse_number(text, "servers")
    if number != int(number):
        raise SpecError(f"servers must be a whole number, got {text!r}")
    return int(number)


@dataclass(eq=False, slots=True)
class Transfer:
    """Bytes in transit."""

    size_bytes: float
    begun_at_level: float
    done: Callable[[], None]
    aborted: bool = False


class Link:
    """One direction of the servers' links, shared equally by all transfers on it."""

    def __init__(self, engine: Engine, network: Network) -> None:
        self._engine = engine
        self._each_at_most = network.bandwidth
        self._capacity = network.bandwidth * network.servers
        self._level = 0.0  # bytes that a transfer started at time 0 would have received
        self._level_at = 0.0
        self._active = 0
        self._ends: list[tuple[float, int, Transfer]] = []  # a heap by the level at the end
        self._numbers = count()
        self._wake = 0  # number of the newest wake-up; older ones are obsolete

    def begin(self, size_bytes: float, done: Callable[[], None]) -> Transfer:
        """Start a transfer; `done` is called at its end."""
        self._advance()
        transfer = Transfer(size_bytes, self._level, done)
        heappush(self._ends, (self._level + size_bytes, next(self._numbers), transfer))
        self._active += 1
        self._schedule()
        return transfer

    def abort(self, transfer: Transfer) -> float:
        """Stop a transfer in progress; return how many of its bytes were moved."""
        self._advance()
        transfer.aborted = True
        self._active -= 1
        self._schedule()
        return min(transfer.size_bytes, self._level - transfer.begun_at_level)

    def _rate(self) -> float:
        return min(self._each_at_most, self._capacity / self._active)

    def _advance(self) -> None:
        if self._active:
            self._level += self._rate() * (self._engine.now - self._level_at)
        self._level_at = self._engine.now

    def _schedule(self) -> None:
        while self._ends and self._ends[0][2].aborted:
            heappop(self._ends)
        self._wake += 1
        if self._ends:
            wait_s = max(0.0, self._ends[0][0] - self._level) / self._rate()
            self._engine.at(self._engine.now + wait_s, self._on_wake, self._wake)

    def _on_wake(self, wake: int) -> None:
        if wake != self._wake:
            return
        self._advance()
        end_level, _, transfer = heappop(self._ends)
        self._level = max(self._level, end_level)  # otherwise rounding could leave a byte behind
        self._active -= 1
        self._schedule()
        transfer.done()
