# SPDX-License-Identifier: BSD-3-Clause
"""What the network of a simulated cluster is like, and its string.

    model=100MB,bandwidth=125MB              parameters and gradients of 100 MB, links of 1 Gbit/s
    ...,delay=0.5ms                          how long a message takes
    ...,servers=4                            the model is spread evenly over this many servers
    ...,workers_per_host=4                   workers 0 to 3 run on host 0, 4 to 7 on host 1, ...
    ...,beside=true                          server i runs on host i, beside its workers
    ...,transfers=2                          gradients sent to each server at a time, or all
    ...; worker 3 12.5MB; workers 5-7 25MB   hosts with slower or faster links

Every host has one link, which carries `bandwidth` bytes per second in each direction. By default
all workers and servers have their own hosts. `links` computes how transfers share these links.
"""

import re
from dataclasses import dataclass
from functools import cached_property

from paceline.admission import TRANSFERS
from paceline.errors import SpecError
from paceline.latency.text import parse_ids
from paceline.spec import RunSpec, parse_bytes, parse_number, parse_seconds, split_call

__all__ = ["NETWORK_FORM", "Network", "parse_network"]

NETWORK_FORM = (
    "model=100MB,bandwidth=1.25GB,delay=0.5ms,servers=1,beside=false,transfers=2,"
    "workers_per_host=1; worker 3 125MB"
)


_SETTINGS = {
    "model",
    "bandwidth",
    "delay",
    "servers",
    "beside",
    "transfers",
    "workers_per_host",
}
_OWN_LINK = re.compile(r"workers?\s*([\d,\s-]*\d)\s+(\S+)")


@dataclass(frozen=True)
class Network:
    """The cost of moving parameters and gradients."""

    model_bytes: float
    bandwidth: float
    delay: float = 0.0
    servers: int = 1
    beside: bool = False  # whether server i runs on host i, beside its workers
    transfers: int | None = TRANSFERS  # at a time for each server and host; None: all
    own_links: tuple[tuple[int, float], ...] = ()  # workers whose host has another bandwidth
    workers_per_host: int = 1

    def __post_init__(self) -> None:
        if self.model_bytes <= 0:
            raise SpecError(f"model must be > 0 bytes, got {self.model_bytes}")
        if self.workers_per_host < 1:
            raise SpecError(f"workers_per_host must be >= 1, got {self.workers_per_host}")
        for worker, bandwidth in self.own_links:
            if self.link(worker) != bandwidth:
                raise SpecError(f"worker {worker} is on a host whose link is given twice")
        slowest = min([self.bandwidth, *self._own.values()])
        if slowest <= 0:
            raise SpecError(f"bandwidth must be > 0 bytes a second, got {slowest}")
        if self.delay < 0:
            raise SpecError(f"delay must be >= 0 seconds, got {self.delay}")
        if self.servers < 1:
            raise SpecError(f"servers must be >= 1, got {self.servers}")
        if self.transfers is not None and self.transfers < 1:
            raise SpecError(f"transfers must be >= 1 or all, got {self.transfers}")

    @cached_property
    def _own(self) -> dict[int, float]:
        return {self.host(worker): bandwidth for worker, bandwidth in self.own_links}

    def host(self, worker: int) -> int:
        """Return the number of the host on which this worker runs."""
        return worker // self.workers_per_host

    def link(self, worker: int) -> float:
        """Return the bandwidth of this worker's host."""
        return self.link_of_host(self.host(worker))

    def link_of_host(self, host: int) -> float:
        """Return the bandwidth of a host with workers."""
        return self._own.get(host, self.bandwidth)

    def hosts_server(self, worker: int) -> bool:
        """Return whether a server runs on the host of this worker."""
        return self.beside and self.host(worker) < self.servers

    def validate(self, spec: RunSpec) -> None:
        """Raise `SpecError` if it names workers or hosts that the run doesn't have."""
        for worker, _ in self.own_links:
            if worker >= spec.workers:
                raise SpecError(
                    f"network '{self}' names worker {worker}; the workers are 0 to "
                    f"{spec.workers - 1}"
                )
        hosts = 1 + self.host(spec.workers - 1)
        if self.beside and self.servers > hosts:
            where = f"{spec.workers} workers"
            if self.workers_per_host > 1:
                where += f" on {hosts} host{'s' * (hosts > 1)}"
            raise SpecError(
                f"{self.servers} servers can't run beside {where}; write servers={hosts}"
            )

    def __str__(self) -> str:
        transfers = "all" if self.transfers is None else self.transfers
        parts = [
            f"model={self.model_bytes:g},bandwidth={self.bandwidth:g},"
            f"delay={self.delay:g},servers={self.servers},"
            f"beside={str(self.beside).lower()},transfers={transfers},"
            f"workers_per_host={self.workers_per_host}"
        ]
        parts += [f"worker {worker} {bandwidth:g}" for worker, bandwidth in self.own_links]
        return "; ".join(parts)


def parse_network(text: str) -> Network:
    """Parse a network string such as `NETWORK_FORM`."""
    settings, *own_links = (part.strip() for part in text.split(";"))
    _, values, named = split_call(f"network:{settings}")
    unknown = values or sorted(named.keys() - _SETTINGS)
    missing = sorted({"model", "bandwidth"} - named.keys())
    if unknown or missing:
        what = f"{unknown[0]!r} is not a setting" if unknown else f"{missing[0]} is missing"
        raise SpecError(f"network {text!r}: {what}; write {NETWORK_FORM}")
    try:
        return Network(
            model_bytes=parse_bytes(named["model"], "model"),
            bandwidth=parse_bytes(named["bandwidth"], "bandwidth"),
            delay=parse_seconds(named.get("delay", "0"), "delay"),
            servers=_whole(named.get("servers", "1"), "servers"),
            beside=_yes_or_no(named.get("beside", "false"), "beside"),
            transfers=_whole_or_all(named.get("transfers", str(TRANSFERS)), "transfers"),
            own_links=tuple(link for part in own_links for link in _own_links(part)),
            workers_per_host=_whole(named.get("workers_per_host", "1"), "workers_per_host"),
        )
    except SpecError as error:
        raise SpecError(f"network {text!r}: {error}; write {NETWORK_FORM}") from None


def _own_links(text: str) -> list[tuple[int, float]]:
    found = _OWN_LINK.fullmatch(text)
    if found is None:
        raise SpecError(f"{text!r} is not the link of a worker")
    bandwidth = parse_bytes(found[2], "bandwidth")
    return [(worker, bandwidth) for worker in parse_ids(found[1])]


def _whole(text: str, what: str) -> int:
    number = parse_number(text, what)
    if number != int(number):
        raise SpecError(f"{what} must be a whole number, got {text!r}")
    return int(number)


def _whole_or_all(text: str, what: str) -> int | None:
    return None if text == "all" else _whole(text, what)


def _yes_or_no(text: str, what: str) -> bool:
    if text not in ("true", "false"):
        raise SpecError(f"{what} must be true or false, got {text!r}")
    return text == "true"
