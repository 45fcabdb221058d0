# SPDX-License-Identifier: BSD-3-Clause
"""The simulated world: its clock, its processes, its disk and its connections."""

import errno
from contextlib import suppress

import pytest
import torch

from paceline.errors import PeerLost
from paceline.run.net.in_process import InProcessStore
from paceline.run.net.messages import Watch
from paceline.run.tensors.layout import gather
from storm.disk import StormDisk
from storm.network import Kernel
from storm.storm import own_process_state
from storm.world import Deadlock, Endless, LeftBehind, Process, World

STORE = InProcessStore(gather([torch.nn.Linear(1, 1)], []).spec)


@pytest.fixture
def world():
    world = World(seed=1)
    yield world
    world.end()


def run(world, *works):
    """Run each work in a process of its own until all have ended; return the processes."""
    processes = []
    for number, work in enumerate(works):
        process = Process(world, f"process {number}")
        processes.append(process)
        process.spawn(lambda work=work, process=process: (work(), process.exit(0)), "main")
    world.run(lambda: not any(process.is_alive for process in processes))
    return processes


def test_clock_moves_only_while_everything_waits(world):
    times = []

    def work():
        world.sleep(5.0)
        times.append(world.monotonic())
        times.append(world.monotonic())

    run(world, work)
    assert times[0] == times[1] == pytest.approx(1005.0, abs=0.001)


def test_waiting_ends_when_the_condition_is_met(world):
    found = []

    def wait():
        found.append(world.wait_for(lambda: bool(found), 100.0))

    run(world, wait, lambda: (world.sleep(3.0), found.append("news")))
    assert found == ["news", True]
    assert world.now < 1004


def test_killed_process_does_nothing_more(world):
    done = []

    def victim():
        try:
            world.sleep(10.0)
            done.append("survived")
        finally:
            world.sleep(1.0)  # what it does on its way out fails
            done.append("cleaned up")

    process = Process(world, "victim")
    process.spawn(victim, "main")
    world.at(1005.0, lambda: process.exit(-9))
    world.run(lambda: not world.tasks)
    assert (process.code, done) == (-9, [])


def test_generator_that_a_killed_process_leaves_behind_does_nothing_more(world):
    """Python closes it when its last frame is gone, where nothing can catch an exception."""
    done = []

    def batches():
        try:
            yield 1
        finally:
            done.append("closing")
            world.touch()
            done.append("cleaned up")

    def victim():
        for _ in batches():
            world.sleep(10.0)

    process = Process(world, "victim")
    process.spawn(victim, "main")
    world.at(1005.0, lambda: process.exit(-9))
    with own_process_state():
        world.run(lambda: not world.tasks)
    assert done == ["closing"]


def test_process_dies_at_the_chosen_point(world):
    done = []

    def work():
        for number in range(10):
            world.touch()
            done.append(number)

    process = Process(world, "victim")
    process.dies_at = 4
    process.spawn(work, "main")
    world.run(lambda: not world.tasks)
    assert done == [0, 1, 2]


def test_frozen_process_continues_later(world):
    process = Process(world, "frozen")
    process.spawn(lambda: (world.sleep(1.0), process.exit(0)), "main")
    process.is_frozen = True
    world.at(1050.0, lambda: setattr(process, "is_frozen", False))
    world.run(lambda: not process.is_alive)
    assert world.now >= 1050


def test_waiting_for_nothing_is_a_deadlock(world):
    with pytest.raises(Deadlock, match="process 0/main"):
        run(world, lambda: world.wait_for(lambda: False))


def test_error_in_a_process_is_raised(world):
    with pytest.raises(ZeroDivisionError):
        run(world, lambda: 1 / 0)


# -------------------------------------------------------------------------------------- the disk


@pytest.fixture
def disk(world):
    return StormDisk(world)


def test_synced_content_survives_a_power_failure(disk, tmp_path):
    with disk.open(tmp_path / "file", "wb") as file:
        file.write(b"durable")
        file.sync()
        disk.sync_folder(tmp_path)
        file.write(b" and not")
    disk.lose_power()
    assert (tmp_path / "file").read_bytes().startswith(b"durable")


def test_unsynced_content_is_lost_in_some_power_failures(tmp_path):
    found = set()
    for seed in range(40):
        disk = StormDisk(World(seed))
        folder = tmp_path / str(seed)
        folder.mkdir()
        with disk.open(folder / "file", "wb") as file:
            file.write(b"abc")
        disk.sync_folder(folder)
        disk.lose_power()
        found.add((folder / "file").read_bytes())
    assert {b"", b"abc"} < found


def test_name_is_lost_with_its_folder(tmp_path):
    found = set()
    for seed in range(40):
        disk = StormDisk(World(seed))
        folder = tmp_path / str(seed)
        folder.mkdir()
        with disk.open(folder / "old", "wb") as file:
            file.write(b"abc")
            file.sync()
        disk.sync_folder(folder)
        disk.replace(folder / "old", folder / "new")
        disk.lose_power()
        found.add(tuple(path.name for path in folder.iterdir()))
    assert found == {("old",), ("new",)}


def test_full_disk_refuses_writes_and_not_renames(disk, tmp_path):
    file = disk.open(tmp_path / "file", "wb")
    disk.is_full = True
    with pytest.raises(OSError, match="No space left") as raised:
        file.write(b"abc")
    assert raised.value.errno == errno.ENOSPC
    file.close()
    disk.replace(tmp_path / "file", tmp_path / "other")
    assert disk.open_files == []


def test_killed_process_leaves_a_part_of_its_write(tmp_path):
    found = set()
    for seed in range(20):
        world = World(seed)
        disk = StormDisk(world)
        path = tmp_path / str(seed)
        process = Process(world, "victim")

        def work(disk=disk, path=path):
            with disk.open(path, "wb") as file:
                file.write(b"abc")

        process.dies_at = 2  # 1: it opens the file
        process.spawn(work, "main")
        world.run(lambda world=world: not world.tasks)
        assert (process.code, disk.torn_writes) == (-9, 1)
        found.add(path.read_bytes())
    assert found == {b"", b"a", b"ab", b"abc"}


def test_file_is_as_old_as_its_last_write(world, disk, tmp_path):
    def work():
        with disk.open(tmp_path / "file", "wb") as file:
            world.sleep(3.0)
            file.write(b"abc")
        world.wall_offset_s -= 100.0
        world.sleep(10.0)

    before = world.wall_time()
    run(world, work)
    assert disk.modified_at(tmp_path / "file") == pytest.approx(before + 3.0, abs=0.001)
    assert world.wall_time() == pytest.approx(before - 87.0, abs=0.001)
    with pytest.raises(FileNotFoundError):
        disk.modified_at(tmp_path / "other")


def test_threads_of_a_process_take_turns_at_the_disk(world, disk, tmp_path):
    order = []

    def write(name):
        with disk.open(tmp_path / name, "wb") as file:
            for _ in range(20):
                file.write(b"abc")
                order.append(name)

    run(world, lambda: write("a"), lambda: write("b"))
    assert order != sorted(order)


def test_very_slow_disk_takes_its_time_to_sync(world, disk, tmp_path):
    disk.sync_s = 50.0

    def work():
        with disk.open(tmp_path / "file", "wb") as file:
            file.write(b"abc")
            file.sync()

    run(world, work)
    assert disk.busy_until == pytest.approx(1050.0, abs=0.001)
    assert world.now >= disk.busy_until


# ----------------------------------------------------------------------------- what is left behind


def test_process_that_exits_must_have_closed_its_files(world, disk, tmp_path):
    with pytest.raises(LeftBehind, match=r"process 0 exits, but leaves: .*file"):
        run(world, lambda: disk.open(tmp_path / "file", "wb"))


def test_process_that_exits_must_have_ended_its_threads(world):
    with pytest.raises(LeftBehind, match="process 0 exits, but leaves: process 0/background"):
        run(world, lambda: world.process.spawn(lambda: world.sleep(5.0), "background"))


def test_process_must_not_open_file_after_file(world, disk, tmp_path):
    def work():
        files = [disk.open(tmp_path / str(number), "wb") for number in range(20)]
        for file in files:
            file.close()

    with pytest.raises(LeftBehind, match="process 0 has too many open files"):
        run(world, work)


def test_endless_loop_is_reported_with_its_stack(world, monkeypatch):
    monkeypatch.setattr("storm.world.TURN_MAX_S", 1)

    def spin():
        while True:
            pass

    with pytest.raises(Endless, match=r"(?s)process 0/main runs without end:.*in spin"):
        run(world, spin)


# --------------------------------------------------------------------------------- connections


@pytest.fixture
def kernel(world):
    return Kernel(world, delay_max_s=0.01)


def test_connection_waits_for_the_next_server(world, kernel):
    """The launcher holds the listening socket, so connections outlast a server that is killed."""
    client, first, second = (Process(world, name) for name in ("client", "first", "second"))
    with pytest.raises(PeerLost):
        kernel.dial(client)
    kernel.listen(first, STORE)
    first.exit(-9)
    end = kernel.dial(client)
    end.send(Watch(1, waits=False))
    connections = kernel.listen(second, STORE)
    world.now += 1.0
    assert [message for peer in connections._peers for message in peer.receive_nowait()] == [
        Watch(1, waits=False)
    ]
    kernel.close_socket()
    second.exit(0)
    with pytest.raises(PeerLost):
        kernel.dial(client)


def test_old_server_that_exits_late_does_not_close_the_new_ones_socket(world, kernel):
    old, new = Process(world, "old"), Process(world, "new")
    kernel.listen(old, STORE)
    connections = kernel.listen(new, STORE)
    old.exit(-9)
    assert kernel.listening is connections


def test_cut_loses_some_of_the_last_messages():
    found = set()
    for seed in range(60):
        world = World(seed)
        kernel = Kernel(world, delay_max_s=0.01)
        client = Process(world, "client")
        connections = kernel.listen(Process(world, "server"), STORE)
        end = kernel.dial(client)
        for number in range(3):
            end.send(Watch(number, waits=False))
        connections.cut(client)
        world.now += 1.0
        [peer] = connections._peers
        found.add(tuple(received(peer)))
        with pytest.raises(PeerLost):
            list(peer.receive_nowait())
    assert found == {(), (0,), (0, 1), (0, 1, 2)}


def received(peer):
    """Return the numbers of the messages that arrived before the end."""
    with suppress(PeerLost):
        return [message.request for message in peer.receive_nowait()]
    return []
