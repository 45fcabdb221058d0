# SPDX-License-Identifier: BSD-3-Clause
"""The process that all others are forked from: what it gives them, and that all end with it."""

import os
import select
import signal
from pathlib import Path

import msgspec
import pytest

from paceline.errors import PeerLost
from paceline.run.launch.child import END_OF_FAILURE, ChildPipes, Task
from paceline.run.launch.environment import Identity, variables
from paceline.run.launch.forkserver import ForkServer, describe_exit
from paceline.run.launch.launcher import Launcher
from paceline.run.settings import Settings
from paceline.spec import RunSpec

PATIENCE_S = 60  # for what takes a moment


class Born:
    """A process that was forked from a forkserver, and our ends of its pipes."""

    def __init__(self, forkserver, path, **changes):
        self._forkserver = forkserver
        who = Identity("unix:@nowhere", Path("no-token"), path.parent, worker=3)
        task = Task(variables(who), str(path), (), str(path.parent), seed=0, threads=1)
        forkserver.start()
        while not forkserver.wait_ready(1.0):
            pass
        (self.out, out), (self.err, err), (self.told, told) = (os.pipe() for _ in range(3))
        self.pid = forkserver.fork(
            msgspec.structs.replace(task, **changes), ChildPipes(out, err, told)
        )
        for fd in (out, err, told):
            os.close(fd)

    def code(self):
        """Wait for its end, and return its exit code."""
        while True:
            select.select([self._forkserver], [], [], PATIENCE_S)
            for ended in self._forkserver.take_exited():
                if ended.pid == self.pid:
                    return ended.code

    def words(self):
        """What it said through each of its pipes, once that is closed."""
        found = []
        for fd in (self.out, self.err, self.told):
            with open(fd, "rb") as pipe:
                found.append(pipe.read())
        return found


@pytest.fixture
def bear(forkserver, tmp_path):
    """Fork a process that executes this source."""

    def make(source, name="script.py", **changes):
        path = tmp_path / name
        path.write_text(source, encoding="utf-8")
        return Born(forkserver, path, **changes)

    return make


def pids_of_children():
    """The processes that this one has."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


# ------------------------------------------------------------------------------ what they are given


def test_a_script_finds_what_a_plain_one_would_find(bear, tmp_path):
    source = """
import os, sys
print(sys.argv[1:], sys.path[0], os.getcwd(), __name__, __file__)
print([sys.stdin.read()], open("/proc/self/comm").read().strip(), os.getsid(0) == os.getpid())
print("to the other", file=sys.stderr)
"""
    (tmp_path / "elsewhere").mkdir()
    one = bear(source, arguments=("--lr", "ö", ""), folder=str(tmp_path / "elsewhere"))
    out, err, told = one.words()
    assert out.decode().splitlines() == [
        f"['--lr', 'ö', ''] {tmp_path} {tmp_path}/elsewhere __main__ {tmp_path}/script.py",
        "[''] paceline-w3 True",
    ]
    assert (err, told) == (b"to the other\n", b"")
    assert one.code() == 0


@pytest.mark.parametrize(
    ("source", "code", "err", "told"),
    [
        ("", 0, "", ""),
        ("import sys; sys.exit()", 0, "", ""),
        ("import sys; sys.exit(7)", 7, "", ""),
        ("import sys; sys.exit(-1)", 255, "", ""),
        ("import sys; sys.exit('no luck')", 1, "no luck\n", ""),
        ("raise ValueError('no luck')", 1, "", "ValueError: no luck"),
        ("raise KeyboardInterrupt", 1, "", "KeyboardInterrupt"),
        ("import paceline; raise paceline.SpecError('no luck')", 2, "", "script.py:1: no luck"),
        ("def", 1, "", "SyntaxError: invalid syntax"),
        ("import os; os.kill(os.getpid(), 9)", -9, "", ""),
        ("import os; os.kill(os.getpid(), 2)", -2, "", ""),
        ("import os; os.kill(os.getpid(), 15)", -15, "", ""),
    ],
)
def test_the_end_of_a_script_is_told_as_it_was(bear, source, code, err, told):
    one = bear(source)
    printed = one.words()
    assert one.code() == code
    assert printed[1].decode() == err
    text = printed[2].removesuffix(END_OF_FAILURE).decode()
    assert text.rstrip("\n").endswith(told)
    assert bool(text) is bool(told)
    assert "runpy" not in text
    assert "forkserver" not in text


def test_an_error_of_ours_is_a_sentence_that_names_the_line_which_has_called_us(bear, tmp_path):
    beside = "import paceline\n\ndef go():\n    paceline.RunSpec(workers=0)\n"
    (tmp_path / "beside.py").write_text(beside, encoding="utf-8")
    _, _, told = bear("import beside\nbeside.go()\n").words()
    assert told == b"beside.py:4: workers must be >= 1, got 0\n" + END_OF_FAILURE


def test_a_bug_of_ours_keeps_its_traceback(bear):
    _, _, told = bear("from paceline import errors\nraise errors.InternalError('oh')\n").words()
    first, *_, last = told.removesuffix(END_OF_FAILURE).decode().splitlines()
    assert first == "Traceback (most recent call last):"
    assert last == "paceline.errors.InternalError: oh"


def test_what_a_script_leaves_for_its_end_is_done(bear):
    source = """
import atexit, threading, time
atexit.register(print, "at the exit")
threading.Thread(target=lambda: (time.sleep(0.05), print("a thread"))).start()
print("no end of line", end=" ")
"""
    one = bear(source)
    assert one.words()[0] == b"no end of line a thread\nat the exit\n"
    assert one.code() == 0


def test_a_process_has_no_descriptors_but_its_own(bear, tmp_path):
    waits = "import os, time\nwhile not os.path.exists('go-on'): time.sleep(0.002)\n"
    other = bear(waits, "other.py")
    source = """
import os
for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
    try:
        print(os.readlink(f"/proc/self/fd/{fd}"))
    except OSError:  # with which this was listed
        pass
"""
    one = bear(source)
    opened = one.words()[0].decode().splitlines()
    assert one.code() == 0
    assert opened[0] == "/dev/null"
    assert [name.partition(":")[0] for name in opened[1:]] == ["pipe"] * 3
    assert len(set(opened[1:])) == 3
    (tmp_path / "go-on").touch()
    other.words()
    assert other.code() == 0


def test_processes_end_in_any_order_and_each_end_is_told_once(bear, tmp_path):
    waits = "import os, time\nwhile not os.path.exists('go-on'): time.sleep(0.002)\nos._exit(3)\n"
    first = bear(waits, "first.py")
    second = bear("import os; os._exit(4)", "second.py")
    assert second.code() == 4
    (tmp_path / "go-on").touch()
    assert first.code() == 3
    first.words()
    second.words()


# ------------------------------------------------------------------------------------ how it ends


def test_a_forkserver_that_nobody_needs_is_not_started():
    before = pids_of_children()
    with ForkServer():
        assert pids_of_children() == before


ENDS_ITS_PARENT = """
import os, signal, time
from pathlib import Path
OUT = Path(os.environ["PACELINE_RUN_DIR"])
(OUT / os.environ.get("PACELINE_WORKER", "server")).write_text(str(os.getpid()))
while not all((OUT / name).exists() for name in ("server", "0", "1")):
    time.sleep(0.002)
if os.environ.get("PACELINE_WORKER") == "0":
    os.kill(os.getppid(), signal.SIGKILL)
signal.pause()
"""


def test_when_it_is_killed_all_die_and_the_run_ends_and_it_can_be_started_again(tmp_path, capsys):
    path = tmp_path / "script.py"
    path.write_text(ENDS_ITS_PARENT)
    (tmp_path / "run").mkdir()
    settings = Settings(spec=RunSpec(workers=2, steps=3), script=str(path))
    before = pids_of_children()
    with ForkServer() as forkserver:
        code = Launcher(settings, tmp_path / "run", forkserver).run()
        assert code == 1
        assert capsys.readouterr().err == (
            "paceline  | the fork server was killed by SIGKILL; the run can't continue\n"
        )
        for name in ("server", "0", "1"):
            wait_until_it_is_gone(int((tmp_path / "run" / name).read_text()))
        path.write_text("print('again')")
        again = Born(forkserver, path)
        assert again.words()[0] == b"again\n"
        assert again.code() == 0
    assert pids_of_children() == before


def wait_until_it_is_gone(pid):
    """It was killed, and ends soon."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(PATIENCE_S * 1000)
    os.close(fd)


def test_one_that_cannot_load_is_told_of(monkeypatch, capfd):
    monkeypatch.setattr("paceline.run.launch.forkserver.PRELOAD", ["no_such_module"])
    with ForkServer() as forkserver:
        forkserver.start()
        with pytest.raises(PeerLost, match="the fork server failed with exit cod"):
            forkserver.wait_ready(PATIENCE_S)
    assert "No module named 'no_such_module'" in capfd.readouterr().err


def test_signals_without_a_name_have_a_number():
    assert describe_exit(-signal.SIGKILL) == "was killed by SIGKILL"
    assert describe_exit(-40) == "was killed by signal 40"
    assert describe_exit(3) == "failed with exit code 3"
