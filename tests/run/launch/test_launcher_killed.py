# SPDX-License-Identifier: BSD-3-Clause
"""SIGKILL for the launcher or for all processes: nothing is left, and the run can be resumed."""

import os
import select
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from paceline.trace.reader import read_trace
from paceline.trace.schema import Restored
from paceline.watch.audit import audit
from sandbox import PACELINE, SCRIPT, children_of

PATIENCE_S = 120
STEPS = 60


# Python's streams fail at exit only if they are buffered, as they are by default.
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


class StartedRun:
    """A run as a user starts it, and all its processes."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        script = folder / "train.py"
        script.write_text(SCRIPT, encoding="utf-8")
        (folder / "tmp").mkdir(exist_ok=True)
        self.launcher = subprocess.Popen(
            [PACELINE, "run", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**BUFFERED, "TMPDIR": str(folder / "tmp")},
        )

    def wait_for(self, word: str) -> None:
        """Wait until a line with this word is printed, and note all processes."""
        for line in self.launcher.stdout:
            if word in line:
                break
        self.pids = [self.launcher.pid]
        for pid in self.pids:  # grows as it is walked
            self.pids += [child for child, _ in children_of(pid)]
        self._fds = [os.pidfd_open(pid) for pid in self.pids]

    def wait_until_all_exited(self) -> None:
        self.launcher.kill()
        self.launcher.wait()
        self.launcher.stdout.close()
        for fd in self._fds:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            assert poll.poll(PATIENCE_S * 1000)
            os.close(fd)

    def end(self) -> str:
        """Wait until it ends successfully; return its output."""
        try:
            out, _ = self.launcher.communicate(timeout=PATIENCE_S)
        finally:
            self.launcher.kill()
        assert self.launcher.returncode == 0, out
        return out


def leftovers(folder: Path, pids: list[int]) -> list[str]:
    """Return what is left of a run: sockets, shared memory, temporary files."""
    address = (folder / "run" / "address").read_text().removeprefix("unix:")
    found = [line for line in Path("/proc/net/unix").read_text().splitlines() if address in line]
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if "memfd:paceline" in os.readlink(link) and int(link.parts[2]) in pids:
                found.append(str(link))
    found += [path.name for path in Path("/dev/shm").iterdir() if "paceline" in path.name]
    return found + [path.name for path in (folder / "tmp").iterdir()]


@pytest.mark.parametrize("victims", ["launcher", "all"])
def test_killed_run_leaves_nothing_and_can_be_resumed(tmp_path, victims):
    steps = ("-w", "3", "--steps", str(STEPS), "--checkpoint-every", "5", "--latency", "30ms")
    new = ("--out", str(tmp_path / "run"), str(tmp_path / "train.py"))
    killed = StartedRun(tmp_path, *steps, *new)
    killed.wait_for("server    | training")
    saved = tmp_path / "run" / "checkpoints"
    while not list(saved.glob("*.ckpt")):
        with suppress(subprocess.TimeoutExpired):
            killed.launcher.wait(timeout=0.1)
    for pid in killed.pids if victims == "all" else killed.pids[:1]:
        os.kill(pid, signal.SIGKILL)
    killed.wait_until_all_exited()
    assert len(killed.pids) == 1 + 1 + 1 + 3  # launcher, fork server, server, workers
    assert leftovers(tmp_path, killed.pids) == []

    resumed = StartedRun(tmp_path, "--resume", str(tmp_path / "run"))
    assert f"at the end: {STEPS}" in resumed.end()
    trace = read_trace(tmp_path / "run" / "trace.jsonl")
    audit(trace)
    restored = [record.version for record in trace.records if isinstance(record, Restored)]
    assert len(restored) == 1
    assert restored[0] >= 5
    assert list((tmp_path / "tmp").iterdir()) == []


def test_closed_pipe_does_not_stop_the_run(tmp_path):
    """As with `paceline run ... | head -1`, or `| tee` that Ctrl-C stops first."""
    new = ("--out", str(tmp_path / "run"), str(tmp_path / "train.py"))
    started = StartedRun(tmp_path, "-w", "2", "--steps", "40", "--latency", "20ms", *new)
    started.wait_for("server    | training")
    started.launcher.stdout.close()
    assert started.launcher.wait(PATIENCE_S) == 0
    started.wait_until_all_exited()
    trace = read_trace(tmp_path / "run" / "trace.jsonl")
    audit(trace)
    assert len(list(trace.updates())) == 40
    assert (tmp_path / "run" / "weights.pt").exists()
    assert "at the end: 40" in (tmp_path / "run" / "output" / "worker-0.log").read_text()


def test_closed_stderr_does_not_change_the_exit_code(tmp_path):
    """Nothing is printed to it between the first line and the last ones."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    words = ["run", "-w", "1", "--steps", "3", "--out", str(tmp_path / "run"), str(script)]
    with subprocess.Popen(
        [PACELINE, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=BUFFERED
    ) as launcher:
        launcher.stderr.readline()
        launcher.stderr.close()
        assert launcher.wait(PATIENCE_S) == 0


def test_new_run_starts_while_a_killed_one_is_exiting(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    first = StartedRun(one, "-w", "2", "--steps", "9999", "--out", f"{one}/run", f"{one}/train.py")
    first.wait_for("server    | training")
    os.kill(first.launcher.pid, signal.SIGKILL)
    second = StartedRun(two, "-w", "2", "--steps", "20", "--out", f"{two}/run", f"{two}/train.py")
    assert "at the end: 20" in second.end()
    first.wait_until_all_exited()
