# SPDX-License-Identifier: BSD-3-Clause
"""What a script has started is ended when its process exits, and not sooner."""

import os
import signal
import subprocess
import sys

import pytest

from descendants import KINDS, STARTS_PROCESSES, is_running, pids_in, wait_until_gone
from paceline.run.launch.orphans import children_of

START = STARTS_PROCESSES + "start_processes('.')\n"


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError('bad luck')", 1),
        ("os._exit(0)", 0),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
    ],
)
def test_everything_that_a_script_started_ends_with_its_process(fork, tmp_path, end, code):
    one = fork(START + end)
    assert one.code() == code
    pids = pids_in(tmp_path)
    assert set(pids) == KINDS
    wait_until_gone(*pids.values())
    one.output()


def test_processes_of_a_living_script_are_left_alone_when_another_one_exits(fork, tmp_path):
    for name in ("lives", "exits"):
        (tmp_path / name).mkdir()
    waits = "while not os.path.exists('go-on'): time.sleep(0.002)\n"
    lives = fork(STARTS_PROCESSES + "start_processes('lives')\n" + waits, "lives.py")
    exits = fork(STARTS_PROCESSES + "start_processes('exits')\n", "exits.py")
    assert exits.code() == 0
    wait_until_gone(*pids_in(tmp_path / "exits").values())
    pids = pids_in(tmp_path / "lives")
    assert set(pids) == KINDS
    assert all(map(is_running, pids.values()))
    (tmp_path / "go-on").touch()
    assert lives.code() == 0
    wait_until_gone(*pids.values())
    for one in (lives, exits):
        one.output()


LOADER = """
import os, torch
from torch.utils.data import DataLoader, Dataset

class Pids(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([os.getpid(), os.getppid()])

if __name__ == "__main__":
    for context in ("fork", "spawn"):
        found = torch.cat(list(DataLoader(Pids(), num_workers=2, multiprocessing_context=context)))
        assert len(set(found[:, 0].tolist())) == 2
        assert set(found[:, 1].tolist()) == {os.getpid()}
    print("loaded")
"""


def test_processes_of_a_data_loader_work_as_usual(fork):
    one = fork(LOADER)
    out, err, failure = one.output()
    assert (out, err, failure) == (b"loaded\n", b"", b"")
    assert one.code() == 0


SHARED = """
import os, signal
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=64)
print(memory.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_shared_memory_of_a_killed_script_is_removed(fork):
    """A process of the standard library does that; it ignores SIGTERM and needs a moment."""
    one = fork(SHARED)
    out, _, _ = one.output()  # ends when no process has the pipe any more
    assert one.code() == -signal.SIGKILL
    assert not os.path.exists(f"/dev/shm/{out.decode().strip()}")


def test_children_are_found_whatever_their_name_is(tmp_path):
    name = tmp_path / "a) R 1 (b"
    name.symlink_to(sys.executable)
    before = children_of(os.getpid())
    with subprocess.Popen(
        [name, "-c", "input()"], stdin=subprocess.PIPE, env={"PYTHONHOME": sys.base_prefix}
    ) as child:
        assert children_of(os.getpid()) - before == {child.pid}
        child.stdin.close()
