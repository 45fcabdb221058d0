# SPDX-License-Identifier: BSD-3-Clause
"""A host runs a process for a launcher that is elsewhere, and reports what it does."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import SpecError
from paceline.run.launch import remote_host
from paceline.run.launch.child import Task, decode_failure
from paceline.run.launch.environment import Identity, variables
from paceline.run.launch.remote_host import Luggage, RemoteHost
from paceline.run.net.address import dial

TOKEN = "a" * 64
SHOW = """
import os
from paceline.run.launch.environment import identity
who = identity()
mode = oct(who.token_file.stat().st_mode)
print(who.token(), who.address_file.read_text(), who.run_dir, mode, sep="|")
"""


class Host:
    """A host, and the tasks for it."""

    def __init__(self, folder, **options):
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        self.script = folder / "script.py"
        self.luggage = Luggage(TOKEN, b"{}", self.run_dir, options.pop("files", {}))
        options = {"threads": 1, "is_away": False, **options}
        self.host = RemoteHost(self.luggage, "127.0.0.1", **options)

    def start(self, source, worker=0):
        """Start a process that executes this source."""
        self.script.write_text(source, encoding="utf-8")
        who = Identity("", Path("nowhere"), self.run_dir, worker)
        who = replace(who, address_file=Path("nowhere"))
        folder = str(self.script.parent)
        return self.host.start(Task(variables(who), str(self.script), (), folder, 0, 1))

    def wait(self):
        """Return all that the process printed, and its exit code."""
        streams = [b"", b"", b""]
        while True:
            report = self.host.report(1.0)
            streams = [before + new for before, new in zip(streams, report.streams, strict=True)]
            if report.code is not None:
                return streams, report.code

    def wait_for_output(self):
        """Wait until the process has printed something."""
        while not self.host.report(1.0).streams[0]:
            pass


@pytest.fixture
def make(tmp_path, forkserver):
    made = []

    def make_it(**options):
        made.append(Host(tmp_path, **{"forkserver": forkserver, **options}))
        return made[-1]

    yield make_it
    for host in made:
        host.host.close()


@pytest.fixture
def host(make):
    return make()


def test_process_gets_what_the_launcher_has(host):
    host.host.move_head("tcp:10.0.0.5:29400", 1)
    assert host.start(SHOW).error == ""
    (out, err, _), code = host.wait()
    token, address, run_dir, mode = out.decode().strip().split("|")
    assert (token, address, mode, err, code) == (TOKEN, "tcp:10.0.0.5:29400", "0o100600", b"", 0)
    assert (Path(run_dir) / "spec.json").read_bytes() == b"{}"  # the run's folder isn't there


def test_process_uses_the_folder_of_the_run_if_it_is_there(host):
    (host.run_dir / "token").write_text(TOKEN, encoding="ascii")
    host.start(SHOW)
    assert host.wait()[0][0].decode().split("|")[2] == str(host.run_dir)


def test_older_address_of_the_head_does_not_replace_a_newer_one(host):
    host.host.move_head("tcp:10.0.0.6:29400", 2)
    host.host.move_head("tcp:10.0.0.5:29400", 1)
    host.start(SHOW)
    assert host.wait()[0][0].decode().split("|")[1] == "tcp:10.0.0.6:29400"


def test_output_of_any_length_is_reported_before_the_exit(host):
    host.start("import sys; print('x' * 300_000); print('oh', file=sys.stderr); sys.exit(3)")
    (out, err, failure), code = host.wait()
    assert (len(out), err, failure, code) == (300_001, b"oh\n", b"", 3)


def test_exception_of_the_script_is_reported(host):
    host.start("1 / 0")
    (_, _, failure), code = host.wait()
    text, error_code = decode_failure(failure)
    assert text.endswith("ZeroDivisionError: division by zero\n")
    assert (code, error_code) == (1, 1)


def test_process_can_be_started_again(host):
    host.start("print('first')")
    assert host.wait()[0][0] == b"first\n"
    host.start("print('second')")
    assert host.wait()[0][0] == b"second\n"


def test_signal_reaches_the_process(host):
    host.start("import time; print('here', flush=True); time.sleep(1000)")
    host.wait_for_output()
    assert host.host.report(0.0).state == "S"
    host.host.signal(signal.SIGTERM)
    assert host.wait()[1] == -signal.SIGTERM
    host.host.signal(signal.SIGTERM)  # it is gone


def test_closed_output_of_a_running_process_is_no_news(host):
    source = (
        "import os, time; print('here', flush=True); os.close(1); os.close(2); time.sleep(1000)"
    )
    host.start(source)
    host.wait_for_output()
    while host.host._selector.get_map().keys() & set(host.host._pipes[:2]):
        host.host.report(0.1)  # or every report would return at once
    host.host.signal(signal.SIGKILL)
    assert host.wait()[1] == -signal.SIGKILL


def test_stack_is_reported(host):
    host.start("import time\nprint('here', flush=True)\ntime.sleep(1000)")
    host.wait_for_output()
    host.host.ask_stack()
    while "script.py" not in host.host.report(0.1).stack:
        pass


def test_missing_script_is_named(host):
    host.start("pass")
    host.wait()
    host.script.unlink()
    who = variables(Identity("x", Path("x"), host.run_dir, 0))
    started = host.host.start(Task(who, str(host.script), (), "/", 0, 1))
    assert started.error.startswith(f"there is no script {host.script} on 127.0.0.1; it must be")
    assert started.code == SpecError.exit_code


def test_head_needs_the_folder_of_the_run(host):
    started = host.start("pass", worker=None)
    assert started.error.startswith(f"the folder of the run, {host.run_dir}, isn't there on 127.")


def test_head_keeps_its_address_when_it_is_started_again(host):
    (host.run_dir / "token").write_text(TOKEN, encoding="ascii")
    source = """
import os, socket, time
socket.socket(fileno=int(os.environ["PACELINE_LISTENING_FD"])).listen()
print("here", flush=True)
time.sleep(1000)
"""
    addresses = []
    for _ in range(2):
        addresses.append(host.start(source, worker=None).address)
        host.wait_for_output()
        dial(addresses[-1]).close()
        host.host.signal(signal.SIGKILL)
        host.wait()
    assert addresses[0] == addresses[1]
    assert addresses[0].startswith("tcp:127.0.0.1:")


@pytest.mark.parametrize("is_away", [False, True])
def test_head_away_from_a_launcher_that_asks_no_more_is_killed(make, monkeypatch, is_away):
    """There may be another head by now, and two must not write to one folder."""
    host = make(is_away=is_away)
    (host.run_dir / "token").write_text(TOKEN, encoding="ascii")
    host.start("import time; print('here', flush=True); time.sleep(1000)", worker=None)
    host.wait_for_output()
    host.host.kill_if_abandoned()  # it was asked just now
    monkeypatch.setattr(remote_host, "ABANDONED_S", -1.0)
    host.host.kill_if_abandoned()
    if not is_away:
        host.host.signal(signal.SIGTERM)
    assert host.wait()[1] == (-signal.SIGKILL if is_away else -signal.SIGTERM)


def test_script_of_the_launcher_replaces_its_path_here(make):
    host = make(files={"script.py": b"open(__file__ + '.word', 'w').write('mine')"})
    host.start("print('this is not it')")
    assert host.wait()[0][0] == b""
    assert host.host.read_file("script.py.word") == b"mine"
    assert host.host.read_file("nothing") is None


def test_nothing_is_left_behind(make):
    host = make(forkserver=None)
    host.start("import time; print('here', flush=True); time.sleep(1000)")
    host.wait_for_output()
    pid, folder = host.host._pid, host.host._folder
    host.host.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not folder.exists()
