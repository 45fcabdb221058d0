# SPDX-License-Identifier: BSD-3-Clause
"""The fork server: it forks processes, reports their exits, and takes them with it."""

import os
import signal
from pathlib import Path

import pytest

from descendants import wait_until_gone
from forked import PATIENCE_S, ForkedScript
from paceline.errors import PeerLost
from paceline.run.launch.forkserver import ForkServer, describe_exit, modules_of
from paceline.run.launch.launcher import Launcher
from paceline.run.settings import Settings
from paceline.spec import RunSpec


def pids_of_children():
    """Return the pids of the children of this process."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_process_inherits_no_descriptors(fork, tmp_path):
    waits = "import os, time\nwhile not os.path.exists('go-on'): time.sleep(0.002)\n"
    other = fork(waits, "other.py")
    source = """
import os
for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
    try:
        print(os.readlink(f"/proc/self/fd/{fd}"))
    except OSError:  # with which this was listed
        pass
"""
    one = fork(source)
    opened = one.output()[0].decode().splitlines()
    assert one.code() == 0
    assert opened[0] == "/dev/null"
    own = ["pipe", "pipe", "/memfd", "pipe"]  # the memory is for its stack, if it hangs
    assert [name.partition(":")[0] for name in opened[1:]] == own
    assert len(set(opened[1:])) == 4
    (tmp_path / "go-on").touch()
    other.output()
    assert other.code() == 0


def test_exits_are_reported_once_and_in_any_order(fork, tmp_path):
    waits = "import os, time\nwhile not os.path.exists('go-on'): time.sleep(0.002)\nos._exit(3)\n"
    first = fork(waits, "first.py")
    second = fork("import os; os._exit(4)", "second.py")
    assert second.code() == 4
    (tmp_path / "go-on").touch()
    assert first.code() == 3
    first.output()
    second.output()


def test_unused_fork_server_is_not_started():
    before = pids_of_children()
    with ForkServer():
        assert pids_of_children() == before


KILLS_ITS_PARENT = """
import os, signal, time
from pathlib import Path
import torch
import paceline
OUT = Path(os.environ["PACELINE_RUN_DIR"])
(OUT / os.environ.get("PACELINE_WORKER", "server")).write_text(str(os.getpid()))
if "PACELINE_WORKER" not in os.environ:  # the workers start when the server is here
    model = torch.nn.Linear(1, 1)
    paceline.join().prepare(model, torch.optim.SGD(model.parameters()))
while not all((OUT / name).exists() for name in ("server", "0", "1")):
    time.sleep(0.002)
if os.environ.get("PACELINE_WORKER") == "0":
    os.kill(os.getppid(), signal.SIGKILL)
signal.pause()
"""


def test_killed_fork_server_ends_the_run_and_can_be_restarted(tmp_path, capsys):
    path = tmp_path / "script.py"
    path.write_text(KILLS_ITS_PARENT)
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
            wait_until_gone(int((tmp_path / "run" / name).read_text()))
        path.write_text("print('again')")
        again = ForkedScript(forkserver, path)
        assert again.output()[0] == b"again\n"
        assert again.code() == 0
    assert pids_of_children() == before


def test_failed_import_is_reported(monkeypatch, capfd):
    monkeypatch.setattr("paceline.run.launch.forkserver.PRELOAD", ["no_such_module"])
    with ForkServer() as forkserver:
        forkserver.start()
        with pytest.raises(PeerLost, match="the fork server failed with exit cod"):
            forkserver.wait_ready(PATIENCE_S)
    assert "No module named 'no_such_module'" in capfd.readouterr().err


def test_exit_codes_are_described():
    assert describe_exit(-signal.SIGKILL) == "was killed by SIGKILL"
    assert describe_exit(-40) == "was killed by signal 40"
    assert describe_exit(3) == "failed with exit code 3"


class Unlisted(type(Path())):
    """A path whose folder can't be listed."""

    def iterdir(self):
        raise PermissionError


def test_folder_that_cannot_be_listed_is_not_an_error(tmp_path):
    (tmp_path / "script.py").write_text("import json\nimport beside\n")
    (tmp_path / "beside.py").touch()
    assert modules_of(tmp_path / "script.py") == ["json"]
    assert modules_of(Unlisted(tmp_path / "script.py")) == []
