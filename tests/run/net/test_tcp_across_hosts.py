# SPDX-License-Identifier: BSD-3-Clause
"""Runs across hosts, which are network namespaces: slow, lossy, delayed and cut links.

The server is on host 0 and worker n on host n + 1, or server n and worker n are on host n. Each
process enters its host when it starts.
"""

import os
from contextlib import closing
from threading import Thread

import pytest
import torch

from hosts import MBIT, Hosts, needs_hosts
from paceline.core.events import Fate
from paceline.run.launch import launcher
from paceline.trace.schema import Gradient, Joined, Left

pytestmark = needs_hosts

MODEL_BYTES = 4 * (1000 * 1000 + 1000)

SCRIPT = """
import ctypes
import os
from paceline.run.net import address

ROLE = os.environ["PACELINE_ROLE"]
WORKER = int(os.environ.get("PACELINE_WORKER", "-1"))
SERVER = int(os.environ.get("PACELINE_SERVER", "0"))

def enter_host(name):
    with open(f"/run/netns/{name}") as file:
        assert ctypes.CDLL(None).setns(file.fileno(), 0x40000000) == 0

def tell(word):
    with open(OUT.parent / word, "w") as fifo:
        fifo.write(word)

def hear(word):
    with open(OUT.parent / word) as fifo:
        assert fifo.read() == word

if ROLE == "worker":
    enter_host(HOSTS[WORKER + 1 - ARE_BESIDE])
elif SERVER:
    enter_host(HOSTS[SERVER])
    os.environ["PACELINE_LISTEN"] = f"tcp:{ADDRESSES[SERVER]}:0"
torch.manual_seed(0)
model = nn.Linear(WIDTH, WIDTH)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
BEFORE
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
generator = torch.Generator().manual_seed(run.worker)
step = 0
while not run.finished:
    inputs = torch.randn(8, WIDTH, generator=generator)
    optimizer.zero_grad()
    run.backward(model(inputs).square().mean())
    optimizer.step()
    step += 1
    DURING
keep(run, weight=model.weight.detach().clone(), steps=step)
"""


class Across:
    """Launches the script across hosts."""

    def __init__(self, launch, hosts, folder):
        self._launch = launch
        self._folder = folder
        self._waiting = {}  # threads, by the word that they wait for
        self.hosts = hosts

    def run(self, *, before="", during="pass", width=1000, **options):
        """Run the script with this code before it joins and after each step.

        With several `servers`, they are beside the workers.
        """
        names = [self.hosts.namespace(host) for host in range(self.hosts.count)]
        addresses = [self.hosts.address(host) for host in range(self.hosts.count)]
        are_beside = "servers" in options
        source = SCRIPT.replace("BEFORE", before).replace("DURING", during.replace("\n", "\n    "))
        source = f"HOSTS, ADDRESSES = {names!r}, {addresses!r}\n{source}"
        source = f"WIDTH, ARE_BESIDE = {width}, {are_beside}\n{source}"
        workers = self.hosts.count - (not are_beside)
        with self.hosts.inside(0):
            return self._launch(source, workers=workers, **options)

    def when_told(self, word, act):
        """Act when the script tells this word."""
        os.mkfifo(self._folder / word)

        def wait_and_act():
            if (self._folder / word).read_text() == word:
                act()

        thread = Thread(target=wait_and_act)
        thread.start()
        self._waiting[word] = thread

    def tell(self, word):
        """Tell the script a word that it waits to hear."""
        (self._folder / word).write_text(word)

    def expect(self, word):
        """Prepare for `tell`."""
        os.mkfifo(self._folder / word)

    def close(self):
        """End the threads, also those that were never told their word."""
        for word, thread in self._waiting.items():
            os.close(os.open(self._folder / word, os.O_RDWR))
            thread.join()


@pytest.fixture
def across(launch, forkserver, tmp_path, monkeypatch):
    """Launch runs on one host for the server and three for workers."""
    forkserver.start()  # outside of the hosts: it outlives them
    with Hosts(4) as hosts:
        monkeypatch.setattr(launcher, "new_address", lambda _: f"tcp:{hosts.address(0)}:0")
        with closing(Across(launch, hosts, tmp_path)) as across:
            yield across


def gradients(ran, worker, fate=None):
    return [
        record
        for record in ran.trace.records
        if isinstance(record, Gradient) and record.worker == worker and fate in (None, record.fate)
    ]


def on_one_host():
    """Return the script for processes that stay where they are."""
    source = SCRIPT.replace("enter_host(HOSTS[WORKER + 1 - ARE_BESIDE])", "pass")
    return "WIDTH = 1000\n" + source.replace("BEFORE", "").replace("DURING", "pass")


def test_servers_beside_all_workers_move_what_a_ring_does_and_equal_one_host(
    across, launch, monkeypatch
):
    before = [across.hosts.bytes_sent(host) for host in range(4)]
    there = across.run(steps=20, servers=4)
    sent = [across.hosts.bytes_sent(host) - before[host] for host in range(4)]
    monkeypatch.undo()
    here = launch(on_one_host(), workers=4, steps=20)
    assert (there.code, here.code) == (0, 0)
    for worker in range(4):
        assert torch.equal(there.kept[worker]["weight"], here.kept[worker]["weight"])
    # 2 (W - 1) / W of the model in each step; a little more for packets, the beginning and the end.
    ring = 2 * 3 / 4 * MODEL_BYTES * 20
    assert all(0.9 * ring < one < 1.3 * ring for one in sent), [one / ring for one in sent]


def test_sync_across_hosts_equals_sync_on_one_host_bit_for_bit(across, launch, monkeypatch):
    there = across.run(steps=8)
    moved = [one.pushed_bytes for one in gradients(there, 2)]
    monkeypatch.undo()
    here = launch(on_one_host(), workers=3, steps=8)
    assert (there.code, here.code) == (0, 0)
    assert all(bytes_ >= MODEL_BYTES for bytes_ in moved)
    assert [one.pushed_bytes for one in gradients(here, 2)] == [0] * 8
    for worker in range(3):
        assert torch.equal(there.kept[worker]["weight"], here.kept[worker]["weight"])


def test_slow_link_is_handled_like_a_slow_worker(across):
    across.hosts.shape(3, 100 * MBIT)
    ran = across.run(steps=40, policy="backup:1")
    assert ran.code == 0
    accepted = [len(gradients(ran, worker, Fate.ACCEPTED)) for worker in range(3)]
    assert accepted[2] < min(accepted[:2])
    assert sum(accepted) == 80


def test_lossy_link_loses_no_gradient(across):
    across.hosts.lose(3, 5)
    ran = across.run(steps=8, width=200)
    assert ran.code == 0
    assert across.hosts.lost(3) > 0
    assert [len(gradients(ran, worker, Fate.ACCEPTED)) for worker in range(3)] == [8] * 3


def test_delayed_link_changes_nothing_but_the_time(across):
    across.hosts.delay(3, 0.02)
    ran = across.run(steps=5)
    assert ran.code == 0
    times = [one.t - one.asked_at for one in gradients(ran, 2)]
    assert min(times) >= 0.06  # parameters, announcement and gradient
    assert torch.equal(ran.kept[0]["weight"], ran.kept[2]["weight"])


def test_run_continues_while_a_link_is_cut_and_the_worker_comes_back(across):
    across.when_told("cut", lambda: across.hosts.cut(3))
    across.when_told("restore", lambda: across.hosts.restore(3))
    ran = across.run(
        width=100,
        steps=4000,
        policy="backup:1",
        latency="50ms",
        during="""
if run.worker == 0 and step == 20: tell("cut")
if run.worker == 0 and step == 220: tell("restore")
if run.worker == 2 and run.last.fate == "accepted" and run.last.version > 220: run.stop()
""",
    )
    assert ran.code == 0
    times = {record.update: record.t for record in ran.trace.updates()}
    assert times[220] - times[20] >= 9.5  # seconds, in which 200 updates of 50 ms were made
    accepted = [one.t for one in gradients(ran, 2, Fate.ACCEPTED)]
    assert min(accepted) < times[20]
    assert max(accepted) > times[220]


def test_host_that_is_gone_leaves_the_run_and_may_come_back(across):
    across.when_told("cut", lambda: across.hosts.cut(3))
    across.when_told("restore", lambda: across.hosts.restore(3))
    ran = across.run(
        width=100,
        steps=4000,
        before="address.VANISHED_S, address.KEEP_ALIVE_S = 3, 1",
        latency="20ms",
        during="""
if run.worker == 2 and step == 5: tell("cut")
if run.worker == 0 and step == 20: tell("restore")
if run.worker == 2 and run.last.fate == "accepted" and run.last.version > 20: run.stop()
""",
    )
    assert ran.code == 0
    moves = [one for one in ran.trace.records if isinstance(one, Left | Joined) and one.worker == 2]
    assert [type(one) for one in moves[:3]] == [Joined, Left, Joined]
    assert gradients(ran, 2, Fate.ACCEPTED)[-1].t > moves[2].t


def test_host_may_join_late(across):
    across.expect("join")
    across.when_told("begun", lambda: across.tell("join"))
    ran = across.run(
        steps=60,
        policy="backup:1",
        before='if WORKER == 2: hear("join")',
        during='if run.worker == 0 and step == 10: tell("begun")',
    )
    assert ran.code == 0
    [joined] = [one for one in ran.trace.records if isinstance(one, Joined) and one.worker == 2]
    times = {record.update: record.t for record in ran.trace.updates()}
    assert joined.t > times[9]
    assert ran.kept[2]["steps"] >= 1
