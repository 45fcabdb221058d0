# SPDX-License-Identifier: BSD-3-Clause
"""Hosts in network namespaces reach each other and nothing else, and leave nothing behind."""

import errno
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from time import monotonic

import pytest

import namespaces
from descendants import wait_until_gone
from hosts import MBIT, Hosts, needs_hosts
from namespaces import ip_json, names_of, remove_leftovers, why_unavailable

pytestmark = needs_hosts

PATIENCE_S = 60
SLEEP = ["sleep", "1000"]
BLOB = os.urandom(1 << 20)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


def connect(hosts: Hosts, source: int, target: int) -> tuple[socket.socket, socket.socket]:
    """Return both ends of a new connection between two hosts."""
    with hosts.inside(target):
        listener = socket.create_server((hosts.address(target), 0))
    with hosts.inside(source):
        near = socket.create_connection(listener.getsockname(), timeout=PATIENCE_S)
    far, _ = listener.accept()
    far.settimeout(PATIENCE_S)
    listener.close()
    return near, far


@contextmanager
def connected(hosts: Hosts, source: int, target: int) -> Iterator[tuple[socket.socket, ...]]:
    """Connect two hosts, and close both ends in the end."""
    with ExitStack() as stack:
        yield tuple(map(stack.enter_context, connect(hosts, source, target)))


def receive(end: socket.socket, size: int) -> bytes:
    """Return exactly this many bytes."""
    with end.makefile("rb") as file:
        return file.read(size)


def seconds_to_send(hosts: Hosts, source: int, target: int, size: int) -> float:
    """Return how long the bytes of one connection take from host to host."""
    with connected(hosts, source, target) as (near, far):
        sender = Thread(target=near.sendall, args=(bytes(size),))
        began = monotonic()
        sender.start()
        received = receive(far, size)
        took = monotonic() - began
        sender.join()
    assert len(received) == size
    return took


def test_hosts_reach_each_other(hosts):
    with connected(hosts, 0, 1) as (near, far):
        near.sendall(b"hello")
        assert receive(far, 5) == b"hello"
        assert near.getsockname()[0] == hosts.address(0)
        assert far.getsockname()[0] == hosts.address(1)


def test_nothing_outside_is_reachable(hosts):
    routes = ip_json("route show", hosts.namespace(0))
    assert [route["dst"] for route in routes] == [hosts.address(0).rpartition(".")[0] + ".0/24"]
    with hosts.inside(0), socket.socket() as end:
        outside = ("192.0.2.1", 80)  # an address for documentation, on no network
        assert end.connect_ex(outside) == errno.ENETUNREACH


def test_network_of_the_machine_is_unchanged():
    before = sorted(path.name for path in Path("/sys/class/net").iterdir())
    with Hosts(1) as hosts:
        hosts.delay(0, 0.001)
        assert sorted(path.name for path in Path("/sys/class/net").iterdir()) == before


def test_host_has_its_own_loopback(hosts):
    with hosts.inside(0):
        listener = socket.create_server(("127.0.0.1", 0))
    with listener:
        with hosts.inside(0):
            socket.create_connection(listener.getsockname()).close()
        with hosts.inside(1), pytest.raises(ConnectionRefusedError):
            socket.create_connection(listener.getsockname())


def test_program_runs_in_its_host(hosts):
    shown = hosts.run(1, ["ip", "-4", "address"], capture_output=True, text=True)
    assert hosts.address(1) in shown.stdout


def test_program_that_fails_raises(hosts):
    with pytest.raises(subprocess.CalledProcessError):
        hosts.run(0, ["false"])


def test_pid_is_that_of_the_program(hosts):
    program = hosts.popen(0, ["sh", "-c", "echo $$; cat"], stdin=-1, stdout=-1, text=True)
    assert int(program.stdout.readline()) == program.pid
    program.communicate()


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0)])
def test_shaped_link_keeps_to_its_rate(source, target, hosts):
    """The bounds are wide: the queue is free at the start, and the machine may be busy."""
    size, rate = 3_000_000, 80 * MBIT
    hosts.shape(0, rate)
    took = seconds_to_send(hosts, source, target, size)
    assert 0.7 * size / rate < took < 10 * size / rate


def test_shaping_can_be_changed_and_removed(hosts):
    size, rate = 3_000_000, 8 * MBIT
    hosts.shape(0, rate)
    hosts.shape(0, 1000 * rate)
    assert seconds_to_send(hosts, 0, 1, size) < 0.7 * size / rate
    hosts.shape(0, rate)
    hosts.shape(0, None)
    assert seconds_to_send(hosts, 0, 1, size) < 0.7 * size / rate


def test_bandwidth_applies_to_every_host():
    size, rate = 2_000_000, 80 * MBIT
    with Hosts(2, bandwidth=rate) as hosts:
        hosts.shape(0, None)
        assert seconds_to_send(hosts, 0, 1, size) > 0.7 * size / rate


def test_connections_use_the_congestion_control_of_their_hosts():
    with Hosts(2, congestion="reno") as hosts, connected(hosts, 0, 1) as ends:
        names = [end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16) for end in ends]
    assert [name.rstrip(b"\0") for name in names] == [b"reno"] * 2


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0)])
def test_lost_packets_are_counted_and_never_arrive(source, target, hosts):
    packets = 500
    seconds_to_send(hosts, source, target, 1)  # the hosts know each other's hardware addresses
    hosts.lose(0, 20)
    with hosts.inside(target):
        receiver = socket.socket(type=socket.SOCK_DGRAM)
        receiver.bind((hosts.address(target), 0))
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)  # room for all
    with hosts.inside(source):
        sender = socket.socket(type=socket.SOCK_DGRAM)
        sender.connect(receiver.getsockname())
    with sender, receiver:
        receiver.setblocking(False)
        arrived = 0
        for _ in range(packets):
            sender.send(b"packet")
        while arrived + hosts.lost(0) < packets:
            while select.select([receiver], [], [], 0.02)[0]:
                receiver.recv(100)
                arrived += 1
    assert packets * 0.5 < arrived < packets * 0.95


def test_connection_survives_loss(hosts):
    hosts.lose(1, 5)
    with connected(hosts, 0, 1) as (near, far):
        sender = Thread(target=near.sendall, args=(BLOB,))
        sender.start()
        assert receive(far, len(BLOB)) == BLOB
        sender.join()
    assert hosts.lost(1) > 0


def test_loss_can_be_removed(hosts):
    hosts.lose(0, 100)
    hosts.lose(0, 0)
    assert seconds_to_send(hosts, 0, 1, 1000) < PATIENCE_S
    assert hosts.lost(0) == 0


def test_cut_host_receives_nothing_until_it_is_restored(hosts):
    with connected(hosts, 0, 1) as (near, far):
        hosts.cut(1)
        near.sendall(b"hello")
        assert not select.select([far], [], [], 0.1)[0]
        hosts.restore(1)
        assert receive(far, 5) == b"hello"
    assert seconds_to_send(hosts, 1, 0, 1000) < PATIENCE_S  # a new connection works as well


def test_only_the_cut_host_is_cut():
    with Hosts(3) as hosts:
        hosts.cut(2)
        assert seconds_to_send(hosts, 0, 1, 1000) < PATIENCE_S


def test_delay_lengthens_a_round_trip_by_twice_as_much(hosts):
    hosts.delay(0, 0.04)
    with connected(hosts, 0, 1) as (near, far):
        began = monotonic()
        near.sendall(b"ping")
        far.sendall(receive(far, 4))
        receive(near, 4)
        assert monotonic() - began >= 0.08


def test_delayed_bytes_arrive_unchanged(hosts):
    hosts.shape(0, 800 * MBIT)
    hosts.delay(0, 0.002)
    with connected(hosts, 1, 0) as (near, far):
        sender = Thread(target=near.sendall, args=(BLOB,))
        sender.start()
        assert receive(far, len(BLOB)) == BLOB
        sender.join()


def test_delay_can_be_changed_and_removed(hosts):
    hosts.delay(0, 30.0)
    hosts.delay(0, 0.001)
    assert seconds_to_send(hosts, 0, 1, 1000) < 30
    hosts.delay(0, 30.0)
    hosts.delay(0, 0)
    assert seconds_to_send(hosts, 0, 1, 1000) < 30


def test_delayed_host_can_be_cut_and_lossy(hosts):
    hosts.delay(0, 0.001)
    hosts.lose(0, 100)
    hosts.lose(0, 0)
    hosts.cut(0)
    hosts.restore(0)
    assert seconds_to_send(hosts, 0, 1, 1000) < PATIENCE_S


def test_bytes_are_counted_at_both_ends(hosts):
    sent, received = hosts.bytes_sent(0), hosts.bytes_received(1)
    seconds_to_send(hosts, 0, 1, len(BLOB))
    assert len(BLOB) < hosts.bytes_sent(0) - sent < 1.2 * len(BLOB)
    assert len(BLOB) < hosts.bytes_received(1) - received < 1.2 * len(BLOB)


def test_nothing_is_left_after_an_exception():
    before = names_of(os.getpid())
    started = []

    def fail_with_a_program_running():
        with Hosts(2) as hosts:
            hosts.delay(1, 0.001)
            started.append(hosts.popen(0, SLEEP))
            assert len(names_of(os.getpid())) == len(before) + 3
            raise LookupError

    with pytest.raises(LookupError):
        fail_with_a_program_running()
    assert [program.returncode for program in started] == [-signal.SIGKILL]
    assert names_of(os.getpid()) == before


def test_nothing_is_left_if_hosts_cannot_be_built(monkeypatch):
    before = names_of(os.getpid())
    monkeypatch.setattr(Hosts, "shape", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Hosts(1, bandwidth=MBIT).__enter__()
    assert names_of(os.getpid()) == before


def test_leftovers_of_a_killed_process_are_removed():
    source = f"""
from hosts import Hosts
hosts = Hosts(1).__enter__()
print(hosts.popen(0, {SLEEP}).pid, flush=True)
input()
"""
    command = [sys.executable, "-c", source]
    where = Path(__file__).parent
    with subprocess.Popen(command, cwd=where, stdin=-1, stdout=-1, text=True) as owner:
        program = int(owner.stdout.readline())
        assert len(names_of(owner.pid)) == 2
        remove_leftovers()
        assert len(names_of(owner.pid)) == 2  # its owner still runs
        owner.kill()
    remove_leftovers()
    wait_until_gone(program)
    assert names_of(owner.pid) == []


def test_other_users_learn_that_root_is_needed(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_unavailable.__wrapped__() == "network namespaces need root"


def test_missing_programs_are_named_by_their_packages(monkeypatch):
    monkeypatch.setattr(namespaces, "PATH", "")
    reason = "network namespaces need the Debian packages iproute2 and nftables"
    assert why_unavailable.__wrapped__() == reason


def test_refusal_of_the_system_is_the_reason(monkeypatch):
    monkeypatch.setattr(namespaces, "NAMES", Path("/nonexistent"))

    def refuse(*_: str, namespace: str | None = None) -> None:
        raise RuntimeError("Operation not permitted")

    monkeypatch.setattr(namespaces, "ip", refuse)
    expected = "this system doesn't permit network namespaces: Operation not permitted"
    assert why_unavailable.__wrapped__() == expected
