# SPDX-License-Identifier: BSD-3-Clause
"""Several hosts on one machine: network namespaces with a network of their own between them.

Each host has an interface `eth0` with an address, and a cable to a switch. The switch is in a
namespace too, so nothing changes in the network of the machine, and nothing outside is reachable.
Links can be slow, lossy, delayed or cut. Hosts share everything except the network: files, shared
memory, processes and CPUs.

    with Hosts(2, bandwidth=GBIT) as hosts:
        server = hosts.popen(0, [sys.executable, "server.py", hosts.address(0)])
        hosts.cut(1)

On exit, programs that still run in a host are killed and every namespace is removed. A process that
is killed can't do that; the next `Hosts` on the machine does, or `python tests/hosts.py`.

    eth0 (host 0) ── cable0 ┐
    eth0 (host 1) ── cable1 ┼ switch (a bridge)
    eth0 (host 2) ── cable2 = delay ═ far2 ── port2 ┘     with a delay: see link_delay.py
"""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Any, Self

import pytest

from namespaces import (
    enter,
    entered,
    ip,
    ip_json,
    name_of,
    nft,
    nft_json,
    remove,
    remove_leftovers,
    tc,
    why_unavailable,
)

__all__ = ["GBIT", "MBIT", "Hosts", "needs_hosts"]

MBIT = 125e3
"""One Mbit/s in bytes per second."""
GBIT = 1000 * MBIT

BURST_S = 0.001  # a shaped link may send this much at once, so timers of 1 ms suffice
BURST_MIN = 128 * 1024  # larger than the largest packet (64 KB), or packets would be split
QUEUE_S = 0.02  # what fits into the queue of a shaped link; the rest is dropped, as by a switch
QUEUE_MIN = 256 * 1024

SEGMENTS_MAX = 65535  # as the kernel sets it
DELAY_PROGRAM = Path(__file__).with_name("link_delay.py")

_serials = count(1)

_reason = why_unavailable()
needs_hosts = pytest.mark.skipif(_reason is not None, reason=_reason or "")
"""Skip tests where hosts can't be created, and say why."""


class Hosts:
    """Hosts with the numbers 0 to `count - 1`.

    `bandwidth` is in bytes per second, in each direction. `congestion` is TCP's congestion control,
    such as `cubic`, if not the default of this machine.
    """

    def __init__(
        self, count: int, bandwidth: float | None = None, congestion: str | None = None
    ) -> None:
        serial = next(_serials)
        self.count = count
        self.bandwidth = bandwidth
        self.congestion = congestion
        self._network = f"10.77.{serial % 256}"
        self._switch = name_of(serial, "switch")
        self._names = [name_of(serial, f"host{host}") for host in range(count)]
        self._programs: list[subprocess.Popen[Any]] = []
        self._delays: dict[int, subprocess.Popen[Any]] = {}
        self._shaped: set[int] = set()

    def __enter__(self) -> Self:
        remove_leftovers()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what still runs in the hosts and remove them."""
        programs = [*self._programs, *self._delays.values()]
        for program in programs:
            program.kill()
        remove([*self._names, self._switch])  # kills their children too
        for program in programs:
            program.wait()
            for pipe in (program.stdin, program.stdout, program.stderr):
                if pipe:
                    pipe.close()

    def address(self, host: int) -> str:
        """Return the IP address of a host."""
        return f"{self._network}.{host + 1}"

    def namespace(self, host: int) -> str:
        """Return the name of a host's network namespace."""
        return self._names[host]

    def popen(self, host: int, command: Sequence[Any], **options: Any) -> subprocess.Popen[Any]:
        """Start a program in a host, as `subprocess.Popen` does. The pid is the program's own."""
        program = subprocess.Popen(enter(self._names[host], command), **options)
        self._programs.append(program)
        return program

    def inside(self, host: int) -> AbstractContextManager[None]:
        """Move this thread into a host. Sockets made in this block stay there afterwards."""
        return entered(self._names[host])

    def run(self, host: int, command: Sequence[Any], **options: Any) -> Any:
        """Run a program in a host until it ends, as `subprocess.run` does. It must succeed."""
        return subprocess.run(enter(self._names[host], command), check=True, **options)

    def shape(self, host: int, rate: float | None) -> None:
        """Limit a host's link to this many bytes per second in each direction. None removes it."""
        for device, namespace in self._ends(host):
            if rate is not None:
                tc(f"qdisc replace dev {device} root tbf {_bucket(rate)}", namespace)
            elif host in self._shaped:
                tc(f"qdisc delete dev {device} root", namespace)
        (self._shaped.discard if rate is None else self._shaped.add)(host)

    def lose(self, host: int, percent: float) -> None:
        """Drop this share of a host's IP packets at random, in each direction. 0 removes it.

        Packets are then no larger than the MTU. Otherwise a cable carries up to 64 KB in one piece.
        """
        for device, namespace in self._ends(host):
            ip(
                f"link set {device} gso_max_segs {1 if percent else SEGMENTS_MAX}",
                namespace=namespace,
            )
        for family, namespace, hook, match in self._loss_places(host):
            table = f"table {family} loss{host}"
            nft(f"{table}; delete {table}", namespace)
            if percent:
                drop = f"{match} numgen random mod 10000 <= {round(100 * percent) - 1} counter drop"
                chain = f"type filter hook {hook} priority 0; {drop}"
                nft(f"{table} {{ chain loss {{ {chain}; }}; }}", namespace)

    def lost(self, host: int) -> int:
        """Return the number of packets that `lose` dropped since it was last called."""
        rules = [
            entry["rule"]
            for family, namespace, *_ in self._loss_places(host)
            for entry in nft_json(f"list ruleset {family}", namespace)
            if entry.get("rule", {}).get("table") == f"loss{host}"
        ]
        counters = [part.get("counter", {}) for rule in rules for part in rule["expr"]]
        return sum(counter.get("packets", 0) for counter in counters)

    def delay(self, host: int, seconds: float) -> None:
        """Delay every packet of a host, in each direction. 0 removes it.

        A round trip gets longer by twice as much. Calling this loses the packets on their way.
        """
        if program := self._delays.pop(host, None):
            program.communicate()  # closes its standard input, which ends it
            lines = [f"link delete {_port(host)}", f"link set {_cable(host)} master switch"]
            ip(*lines, namespace=self._switch)
        if not seconds:
            return
        ip(
            f"link add {_port(host)} type veth peer name far{host}",
            f"link set {_port(host)} addrgenmode none master switch up",
            f"link set far{host} addrgenmode none up",
            f"link set {_cable(host)} nomaster",
            namespace=self._switch,
        )
        words = [sys.executable, "-IS", DELAY_PROGRAM, _cable(host), f"far{host}", seconds]
        pipe = subprocess.PIPE
        program = subprocess.Popen(enter(self._switch, words), stdin=pipe, stdout=pipe)
        self._delays[host] = program
        assert program.stdout is not None
        program.stdout.readline()  # it is forwarding now

    def cut(self, host: int) -> None:
        """Unplug a host's cable. Its address stays, and what it sends is lost."""
        ip(f"link set {_cable(host)} down", namespace=self._switch)

    def restore(self, host: int) -> None:
        """Plug a host's cable in again."""
        ip(f"link set {_cable(host)} up", namespace=self._switch)

    def bytes_sent(self, host: int) -> int:
        """Return the bytes that a host's interface has sent, headers included."""
        return int(self._counters(host)["tx"]["bytes"])

    def bytes_received(self, host: int) -> int:
        """Return the bytes that a host's interface has received, headers included."""
        return int(self._counters(host)["rx"]["bytes"])

    def _build(self) -> None:
        everyone = [self._switch, *self._names]
        ip(*[f"netns add {name}" for name in everyone])
        ip(
            "link add switch type bridge mcast_snooping 0",
            "link set switch addrgenmode none up",
            namespace=self._switch,
        )
        for host, name in enumerate(self._names):
            cable = f"{_cable(host)} netns {self._switch}"
            ip(f"link add eth0 netns {name} type veth peer name {cable}")
            ip(
                "link set lo up",
                "link set eth0 addrgenmode none up",
                f"address add {self.address(host)}/24 dev eth0",
                namespace=name,
            )
            if self.congestion:  # in a namespace, the kernel refuses a change of the default
                route = f"route change {self._network}.0/24 dev eth0 src {self.address(host)}"
                ip(f"{route} congctl {self.congestion}", namespace=name)
        ports = [
            f"link set {_cable(h)} addrgenmode none master switch up" for h in range(self.count)
        ]
        ip(*ports, namespace=self._switch)
        if self.bandwidth is not None:
            for host in range(self.count):
                self.shape(host, self.bandwidth)

    def _ends(self, host: int) -> list[tuple[str, str]]:
        """Return both ends of a host's cable, with their namespaces."""
        return [("eth0", self._names[host]), (_cable(host), self._switch)]

    def _loss_places(self, host: int) -> list[tuple[str, str, str, str]]:
        """Return where packets are dropped: family, namespace, hook and match.

        Both places are where packets arrive. A program that sends would notice a drop of its own.
        """
        ports = f'{{ "{_cable(host)}", "{_port(host)}" }}'
        return [
            ("bridge", self._switch, "forward", f"iifname {ports} ether type ip"),
            ("netdev", self._names[host], 'ingress device "eth0"', "ether type ip"),
        ]

    def _counters(self, host: int) -> Any:
        [link] = ip_json("-statistics link show eth0", self._names[host])
        return link["stats64"]


def _cable(host: int) -> str:
    return f"cable{host}"


def _port(host: int) -> str:
    return f"port{host}"


def _bucket(rate: float) -> str:
    burst = max(BURST_MIN, round(rate * BURST_S))
    queue = max(QUEUE_MIN, round(rate * QUEUE_S))
    return f"rate {round(8 * rate)}bit burst {burst} limit {burst + queue}"


if __name__ == "__main__":
    print("\n".join(f"removed {name}" for name in remove_leftovers()) or "no leftovers")
