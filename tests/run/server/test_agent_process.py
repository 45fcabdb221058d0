# SPDX-License-Identifier: BSD-3-Clause
"""Workers of one host share an agent: real processes, and real kills."""

import subprocess
import sys

import pytest

from failures import LOOP, TRAINING, fates, joins_and_leaves, troubled
from paceline.trace.reader import read_trace
from paceline.watch.audit import audit
from started import Started

QUIET = "def trouble(run): pass\n"


@pytest.fixture
def started(tmp_path):
    started = Started(tmp_path)
    yield started
    started.close()


def finish(started, *hosts):
    """Wait until all have ended well; return the trace, which is sound."""
    for program in (*hosts, started.programs[0]):
        _, err = program.communicate()
        assert program.returncode == 0, err
    trace = read_trace(started.folder / "run" / "trace.jsonl")
    audit(trace)
    return trace


def moved_per_update(trace):
    """Return the bytes that were pulled and pushed per update."""
    count = len(list(trace.updates()))
    gradients = list(trace.gradients())
    pulled = sum(one.pulled_bytes for one in gradients)
    return pulled / count, sum(one.pushed_bytes for one in gradients) / count


def test_workers_of_a_host_move_as_much_as_one_worker(started, script):
    """Three workers share an agent; a fourth is alone on another host."""
    path = script(TRAINING + QUIET + LOOP)
    started.serve(path, 4, "--steps", 10, "--transport", "tcp")
    trace = finish(started, started.work(path, "--processes", 3), started.work(path))
    assert {tuple(sorted(update.contributors)) for update in trace.updates()} == {(0, 1, 2, 3)}
    gradients = list(trace.gradients())
    pushed = [one.pushed_bytes for one in gradients if one.pushed_bytes]
    pulled = [one.pulled_bytes for one in gradients if one.pulled_bytes]
    assert (len(pushed), len(set(pushed))) == (20, 1)  # a gradient and a sum for each update
    assert (len(pulled), len(set(pulled))) == (20, 1)


KILLS_THE_AGENT = """
def trouble(run):
    if run.worker == 0 and run.version == 3 and not was_told("killed"):
        tell("killed")
        os.kill(server_pid(), signal.SIGKILL)
"""


def test_agent_that_is_killed_is_started_again(started, script):
    """Its workers lose their connections, and join again through the next agent."""
    path = script(troubled(KILLS_THE_AGENT))
    started.serve(path, 3, "--steps", 10, "--transport", "tcp", "--min-workers", 3)
    host = started.work(path, "--processes", 3)
    trace = finish(started, host)
    for worker in range(3):
        assert joins_and_leaves(trace, worker)[::2][:2] == ["joined", "joined"]
    assert len(list(trace.updates())) == 10


KILLS_THE_HEAD = """
def trouble(run):
    if run.worker == 0 and run.version == 4 and not was_told("killed"):
        wait_until(lambda: any((OUT / "run" / "checkpoints").glob("*.ckpt")))
        tell("killed")
        os.kill(int((OUT / "head").read_text()), signal.SIGKILL)

if ROLE == "server":
    (OUT / "head").write_text(str(os.getpid()))
"""


def test_workers_come_back_through_the_agent_when_the_head_was_killed(started, script):
    path = script(troubled(KILLS_THE_HEAD))
    words = ("--steps", 10, "--transport", "tcp", "--checkpoint-every", 1)
    started.serve(path, 2, *words)
    trace = finish(started, started.work(path, "--processes", 2))
    assert [update.update for update in trace.updates()][-1] == 10
    assert set(fates(trace, 1)) <= {"accepted", "cancelled", "late"}


LEAVES = """
def trouble(run):
    if run.worker == 1 and run.version == 3 and not was_told("left"):
        tell("left")
        os.kill(os.getpid(), signal.SIGTERM)
"""


def test_worker_leaves_with_notice_through_the_agent(started, script):
    path = script(troubled(LEAVES))
    started.serve(path, 2, "--steps", 10, "--transport", "tcp")
    trace = finish(started, started.work(path, "--processes", 2))
    assert joins_and_leaves(trace, 1)[:2] == ["joined", "with notice"]


def test_workers_on_the_host_of_the_server_share_its_memory(started, script):
    path = script(TRAINING + QUIET + LOOP)
    started.serve(path, 2, "--steps", 5)
    trace = finish(started, started.work(path, "--processes", 2))
    assert moved_per_update(trace) == (0, 0)


def test_agent_waits_for_workers_of_its_own_host_only(tmp_path):
    source = "from paceline.run.agent import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "only `paceline work --processes` starts the agent of a host" in done.stderr
