# SPDX-License-Identifier: BSD-3-Clause
"""The processes of a run: started, reported when they exit, and killed."""

import os
import select
import signal
from pathlib import Path
from selectors import DefaultSelector

import pytest

from paceline.errors import PacelineError, PeerLost
from paceline.run.launch.environment import Identity
from paceline.run.launch.output import Output
from paceline.run.launch.processes import Child, Processes
from paceline.run.launch.screen import PlainScreen
from paceline.run.settings import Settings
from paceline.spec import RunSpec

PATIENCE_S = 60


class Group:
    """Processes that execute one script."""

    def __init__(self, forkserver, folder):
        self.folder = folder
        self.path = folder / "script.py"
        self.selector = DefaultSelector()
        self.output = Output(self.selector, PlainScreen(), folder / "output")
        settings = Settings(
            spec=RunSpec(workers=2),
            script=str(self.path),
            folder=str(folder),
            arguments=("x",),
            output="all",
        )
        self.processes = Processes(forkserver, self.output, settings)
        self._forkserver = forkserver
        forkserver.start()
        while not forkserver.wait_ready(1.0):
            pass

    def start(self, source, worker=0):
        """Start a process that executes this source."""
        self.path.write_text(source, encoding="utf-8")
        who = Identity("unix:@nowhere", Path("no-token"), self.folder, worker)
        child = Child(f"worker {worker}", who, threads=1)
        self.processes.start(child)
        return child

    def wait(self):
        """Wait until a process exits."""
        while True:
            select.select([self._forkserver], [], [], PATIENCE_S)
            if exited := self.processes.take_exited():
                return exited


@pytest.fixture
def group(forkserver, tmp_path):
    made = Group(forkserver, tmp_path)
    yield made
    made.processes.kill()
    while made.processes:
        made.wait()
    made.output.close()
    made.selector.close()


def test_process_runs_the_script_with_its_identity(group, capsys):
    source = "import os, sys\nprint(sys.argv[1:], os.environ['PACELINE_WORKER'])"
    child = group.start(source, worker=1)
    assert group.processes
    assert child.pid is not None
    assert group.wait() == [child]
    assert (child.pid, child.code, child.failure) == (None, 0, "")
    assert not group.processes
    assert capsys.readouterr().out == "worker 1  | ['x'] 1\n"


def test_failure_is_kept_and_compared_with_earlier_ones(group, capsys):
    for worker, text in ((0, "failed with exit code 1"), (1, "failed in the same way as worker 0")):
        child = group.start("raise ValueError('bad luck')", worker)
        group.wait()
        assert child.exit_text == text
        assert child.failure.endswith("ValueError: bad luck\n")
    child = group.start("raise ValueError('bad luck')", 0)
    group.wait()
    assert child.exit_text == "failed in the same way as before"
    assert capsys.readouterr().err.count("ValueError: bad luck") == 1


def test_losing_the_server_is_not_a_failure_of_the_script(group):
    child = group.start("import paceline\nraise paceline.PeerLost('the server is gone')")
    group.wait()
    assert (child.code, child.failure) == (PeerLost.exit_code, "")


CRASH = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"
JOIN = "from paceline.run.launch.child import tell_joining\ntell_joining()\n"


def test_segmentation_fault_of_a_worker_names_the_line_and_its_likely_cause(group, capsys):
    worker = group.start(JOIN + CRASH)
    group.wait()
    assert worker.is_broken
    assert worker.exit_text.startswith(
        "was killed by SIGSEGV at script.py:4 (`os.kill(os.getpid(), signal.SIGSEGV)`); a worker's "
        "parameters are read-only"
    )
    assert capsys.readouterr().err == "", "the launcher says what happened"
    saved = (group.folder / "output" / "worker-0.log").read_text()
    assert 'script.py", line 4 in <module>' in saved


def test_segmentation_fault_before_a_worker_joins_is_a_crash_like_others(group, capsys):
    """Its parameters are its own until then, and so are those of the next process."""
    for source in (CRASH, JOIN + "raise ValueError", CRASH):
        worker = group.start(source)
        group.wait()
        assert not worker.is_broken
    assert worker.exit_text == "was killed by SIGSEGV"
    err = capsys.readouterr().err
    assert err.startswith("worker 0  | Fatal Python error: Segmentation fault\n")
    assert 'script.py", line 2 in <module>' in err


def test_forked_process_of_a_script_does_not_join(group):
    source = """
import os, signal
from paceline.run.launch.child import tell_joining
pid = os.fork()
if not pid:
    tell_joining()
    os._exit(0)
os.waitpid(pid, 0)
os.kill(os.getpid(), signal.SIGSEGV)
"""
    worker = group.start(source)
    group.wait()
    assert (worker.is_broken, worker.exit_text) == (False, "was killed by SIGSEGV")


def test_other_crash_of_a_worker_shows_what_the_fault_handler_wrote(group, capsys):
    worker = group.start("import os\nos.abort()")
    group.wait()
    assert (worker.is_broken, worker.exit_text) == (False, "was killed by SIGABRT")
    err = capsys.readouterr().err
    assert err.startswith("worker 0  | Fatal Python error: Aborted\n")
    assert 'script.py", line 2 in <module>' in err


def test_crash_of_a_process_that_the_script_forked_is_not_the_workers(group, capsys):
    source = """
import os, signal
pid = os.fork()
if not pid:
    os.kill(os.getpid(), signal.SIGSEGV)
os.waitpid(pid, 0)
"""
    worker = group.start(source)
    group.wait()
    assert (worker.is_broken, worker.code) == (False, 0)
    assert "Fatal Python error: Segmentation fault" in capsys.readouterr().err


def test_processes_can_be_killed_silently(group, capsys):
    child = group.start("import signal\nsignal.pause()")
    group.processes.kill_silently([child])
    group.wait()
    assert child.is_killed
    group.processes.kill_silently([child])
    assert capsys.readouterr().err == ""


def test_killed_process_takes_what_its_script_started_with_it(group, tmp_path, capsys):
    source = """
import os, subprocess, signal
pid = subprocess.Popen(["sleep", "1000"]).pid
with open("pid.partial", "w") as file:
    file.write(str(pid))
os.rename("pid.partial", "pid")
signal.pause()
"""
    child = group.start(source)
    while not (tmp_path / "pid").exists():
        select.select([], [], [], 0.01)
    grandchild = os.pidfd_open(int((tmp_path / "pid").read_text()))
    group.processes.kill()
    group.processes.kill()  # says nothing new
    assert group.wait() == [child]
    assert (child.code, child.is_killed) == (-signal.SIGKILL, True)
    assert select.select([grandchild], [], [], PATIENCE_S)[0] == [grandchild]
    os.close(grandchild)
    assert capsys.readouterr().err == "paceline  | worker 0 was still running and was killed\n"


def test_signal_to_a_process_that_is_not_running_is_ignored(group):
    child = group.start("")
    group.wait()
    group.processes.signal(child, signal.SIGTERM)


def test_process_without_pipes_is_not_started(group, monkeypatch):
    def fail():
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pipe", fail)
    with pytest.raises(PacelineError, match="cannot start a process: Too many open files"):
        group.start("")
    assert not group.processes


def test_forgotten_processes_are_not_waited_for(group):
    child = group.start("import signal\nsignal.pause()")
    pid = child.pid
    group.processes.forget()
    assert not group.processes
    os.kill(pid, signal.SIGKILL)


CRASHING = """
import os, signal, threading

source = "def nest(depth):\\n    if depth:\\n        nest(depth - 1)\\n    else:\\n        wait()"
names = {"wait": threading.Event().wait}
exec(compile(source, "a" * 400, "exec"), names)  # its frames make a report longer than a pipe holds
for _ in range(4):
    threading.Thread(target=names["nest"], args=(90,), daemon=True).start()
while threading.active_count() < 5:
    pass
os.kill(os.getpid(), signal.SIGSEGV)
"""


def test_report_of_a_crash_is_not_shown_if_the_process_is_killed_meanwhile(group, capsys):
    """Several workers crash at one line; the run ends with the first."""
    child = group.start(CRASHING)  # before it joins, so the report would be shown
    assert group.selector.select(PATIENCE_S), "it writes its report"
    group.processes.kill_silently([child])
    assert group.wait() == [child]
    assert child.code == -signal.SIGKILL
    assert capsys.readouterr().err == ""
    assert "Fatal Python error" in (group.folder / "output" / "worker-0.log").read_text()
