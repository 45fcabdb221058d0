# SPDX-License-Identifier: BSD-3-Clause
"""Workers that are started apart from their server, as users start them; all on this host."""

import os
import select
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from failures import LOOP, TRAINING, joins_and_leaves, troubled
from paceline.trace.reader import read_trace
from paceline.trace.schema import Joined
from paceline.watch.audit import audit
from started import Started, lines_until

QUIET = "def trouble(run): pass\n"
SAYS_ITS_NUMBER = """
run = paceline.join()
print("number", run.worker, "of", run.workers, flush=True)
paceline.join = lambda: run
"""


@pytest.fixture
def started(tmp_path):
    started = Started(tmp_path)
    yield started
    started.close()


def test_workers_started_first_wait_for_the_server_and_get_numbers(
    started, script: Callable[[str], Path], tmp_path
):
    path = script(TRAINING + SAYS_ITS_NUMBER + QUIET + LOOP)
    two, one = started.work(path, "--processes", 2), started.work(path)
    [waiting] = lines_until(two.stderr, "")
    assert waiting == (
        "paceline  | waiting for the server, up to 10 minutes: no server at "
        f"tcp:{started.address}: Connection refused\n"
    )
    server = started.serve(path, 3, "--steps", 5)
    numbers = set()
    for program, count in ((two, 2), (one, 1)):
        out, err = program.communicate()
        assert program.returncode == 0, err
        own = [n for n in range(3) if f"starting worker {n} of a run with 3 workers" in err]
        assert len(own) == count
        numbers |= set(own)
        [shown] = [line for line in out.splitlines() if "number" in line]
        assert shown in [f"worker {n}  | number {n} of 3" for n in own]
    assert numbers == {0, 1, 2}
    out, err = server.communicate()
    assert server.returncode == 0, err
    assert "sync with 3 workers: 5 updates" in out
    trace = read_trace(tmp_path / "run" / "trace.jsonl")
    audit(trace)
    assert {one.worker for one in trace.records if isinstance(one, Joined)} == {0, 1, 2}


DIES_ONCE = """
def trouble(run):
    if run.worker == 1 and run.version == 2 and not was_told("struck-1"):
        strike()
"""


def test_worker_that_dies_is_restarted_with_its_number(started, script, tmp_path):
    path = script(troubled(DIES_ONCE))
    server = started.serve(path, 2, "--steps", 8, "--min-workers", 2)
    host = started.work(path, "--processes", 2)
    _, err = host.communicate()
    assert host.returncode == 0, err
    assert "worker 1 was killed by SIGKILL; restarting in 0.5 s (attempt 1 of 5)" in err
    _, err = server.communicate()
    assert server.returncode == 0, err
    trace = read_trace(tmp_path / "run" / "trace.jsonl")
    audit(trace)
    joined = [one.worker for one in trace.records if isinstance(one, Joined)]
    assert sorted(joined) == [0, 1, 1]


def test_workers_that_do_not_belong_to_the_run_are_refused_with_a_line(started, script, tmp_path):
    path = script(TRAINING + QUIET + LOOP)
    other = tmp_path / "other.py"
    other.write_text(path.read_text().replace("8", "9"))
    (tmp_path / "wrong").write_text("0" * 64)
    (tmp_path / "wrong").chmod(0o600)
    server = started.serve(path, 1, "--steps", 5)
    lines_until(server.stderr, "listening at")
    refused = {
        f"paceline  | the server at tcp:{started.address} has a different token": (
            started.work(path, "--token-file", "wrong")
        ),
        "the server refused worker 0: the worker's script differs from the server's": (
            started.work(other)
        ),
    }
    for what, host in refused.items():
        _, err = host.communicate()
        assert host.returncode == 4, err
        lines = [line for line in err.splitlines() if "starting worker" not in line]
        assert [what in line for line in lines] == [True], err
    host = started.work(path)
    assert host.wait() == 0
    assert server.wait() == 0


def test_ctrl_c_ends_workers_that_wait_for_their_server(started, script):
    host = started.work(script(TRAINING + QUIET + LOOP))
    lines_until(host.stderr, "waiting for the server")
    host.send_signal(signal.SIGINT)
    assert host.wait() == 128 + signal.SIGINT


SEES_THE_SERVER_DIE = """
if ROLE == "server":
    tell(f"server-{len(list(OUT.glob('server-*.word')))}", os.getpid())

def trouble(run):
    if run.worker == 0 and run.version == 4 and not was_told("killed"):
        tell("ready")
        wait_for("killed")
"""


def test_workers_keep_their_numbers_when_the_server_was_restarted(started, script, tmp_path):
    path = script(troubled(SEES_THE_SERVER_DIE))
    server = started.serve(path, 2, "--steps", 8, "--checkpoint-every", 1)
    host = started.work(path, "--processes", 2)
    wait_for(tmp_path / "ready.word", server)
    os.kill(int((tmp_path / "server-0.word").read_text()), signal.SIGKILL)
    (tmp_path / "killed.word").touch()
    _, err = host.communicate()
    assert host.returncode == 0, err
    assert err.count("starting worker") == 2
    _, err = server.communicate()
    assert server.returncode == 0, err
    trace = read_trace(tmp_path / "run" / "trace.jsonl")
    audit(trace)
    joined = [one.worker for one in trace.records if isinstance(one, Joined)]
    assert sorted(joined) == [0, 0, 1, 1]


def wait_for(path, program):
    """Wait until a script has written this file, while a program runs."""
    while not path.exists():
        assert program.poll() is None
        select.select([], [], [], 0.01)


COMPUTES_LONG = """
def trouble(run):
    if run.worker == 1 and run.version == 4 and not was_told("ready"):
        tell("ready")
        wait_for("never")
"""


def test_host_that_goes_with_notice_is_no_failure_and_another_takes_its_place(
    started, script, tmp_path
):
    path = script(troubled(COMPUTES_LONG))
    server = started.serve(path, 2, "--steps", 8, "--min-workers", 2)
    stays = started.work(path)
    lines_until(stays.stderr, "starting worker 0 of a run with 2 workers")
    goes = started.work(path)
    lines_until(goes.stderr, "starting worker 1 of a run with 2 workers")
    wait_for(tmp_path / "ready.word", server)
    goes.send_signal(signal.SIGTERM)
    _, err = goes.communicate()
    assert goes.returncode == 0, err
    assert err == "paceline  | leaving the run; interrupt again to stop immediately\n"
    comes = started.work(path)
    for host, number in ((comes, 1), (stays, 0)):
        _, err = host.communicate()
        assert host.returncode == 0, err
        assert (f"starting worker {number} of a run" in err) == (host is comes)
    out, err = server.communicate()
    assert server.returncode == 0, err
    trace = read_trace(tmp_path / "run" / "trace.jsonl")
    audit(trace)
    assert joins_and_leaves(trace, 1)[:3] == ["joined", "with notice", "joined"]
    assert "Worker 1 left at " in out
    assert "(with notice) and came back." in out
