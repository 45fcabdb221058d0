# SPDX-License-Identifier: BSD-3-Clause
"""`paceline serve`: the server of a run whose workers are elsewhere."""

import subprocess
import time
from contextlib import suppress

import pytest

from certificates import Authority
from cli_fixtures import SCRIPT, refuse_wrong_input
from failures import LOOP, TRAINING, troubled
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.trace.schema import Restored
from paceline.watch.audit import audit

QUIET = "def trouble(run): pass\n"
JOIN = "serve --connect 127.0.0.1:1 --token-file t"
JOIN_OPEN = "serve --connect 127.0.0.1:1 --token-file open"  # a file that others can read


def start(folder, *words):
    pipe = subprocess.PIPE
    command = [SCRIPT, *map(str, words)]
    return subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True)


def address_of(server):
    """Return the address that the server shows."""
    for line in server.stderr:
        if "listening at " in line:
            return line.split("listening at ")[1].strip()
    raise AssertionError(server.communicate())


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_workers_started_elsewhere_train_with_the_server(script, tmp_path, transport):
    """Both sides are started as users start them."""
    path = script(TRAINING + QUIET + LOOP)
    words = ("-w", 2, "--steps", 5, "--transport", transport, "--token-file", "token")
    server = start(tmp_path, "serve", *words, "--out", "run", path, tmp_path)
    join = ("work", "--connect", address_of(server), "--token-file", "token", "--number")
    workers = [start(tmp_path, *join, number, path, tmp_path) for number in range(2)]
    for worker in workers:
        _, err = worker.communicate()
        assert worker.returncode == 0, err
    out, err = server.communicate()
    assert server.returncode == 0, err
    assert "sync with 2 workers: 5 updates" in out
    assert (tmp_path / "token").stat().st_mode & 0o077 == 0
    assert (tmp_path / "run" / "weights.pt").exists()
    trace = read_trace(tmp_path / "run" / "trace.jsonl")
    audit(trace)
    moved = [record.pushed_bytes > 0 for record in trace.gradients()]
    assert moved == [transport == "tcp"] * 10


ASKS_FIRST = "assert paceline.join().workers == 2\n"  # before it calls prepare


def test_another_server_joins_the_first_over_tls(script, tmp_path):
    """All processes are started as users start them, each with a certificate of its own."""
    path = script(TRAINING + ASKS_FIRST + QUIET + LOOP)
    authority = Authority(tmp_path / "ca")

    def launch(verb, name, *words):
        files = authority.issue(name)
        tls = ("--tls-cert", files.cert, "--tls-key", files.key, "--tls-ca", files.ca)
        return start(tmp_path, verb, *words, *tls, path, tmp_path)

    words = ("-w", 2, "--steps", 5, "--servers", 2, "--token-file", "token")
    head = launch("serve", "head", *words, "--out", "run")
    join = ("--connect", address_of(head), "--token-file", "token", "--number")
    server = launch("serve", "server", *join, 1)
    workers = [launch("work", f"worker-{number}", *join, number) for number in range(2)]
    for process in [server, *workers]:
        own, err = process.communicate()
        assert process.returncode == 0, err
        assert own == "server 1: the run has ended\n" * (process is server)
    out, err = head.communicate()
    assert head.returncode == 0, err
    assert "sync with 2 workers: 5 updates" in out
    trace = read_trace(tmp_path / "run" / "trace.jsonl")
    audit(trace)
    assert trace.header.about["servers"] == "2"


WAITING = """
def trouble(run):
    if run.version == 4 and not was_told("ready"):
        # One of the two: a checkpoint isn't begun while the one before it is being written.
        folder = OUT / "run" / "checkpoints"
        wait_until(lambda: any((folder / f"000000000{n}.ckpt").exists() for n in (3, 4)))
        tell("ready")
        wait_for("killed")
"""


def test_killed_server_that_is_started_again_continues_the_run(script, tmp_path):
    """The head's launcher restarts only the head: the other server is elsewhere."""
    path = script(troubled(WAITING))
    words = ("-w", 1, "--steps", 8, "--servers", 2, "--checkpoint-every", "1")
    out = ("--token-file", "token", "--out", "run")
    head = start(tmp_path, "serve", *words, *out, path, tmp_path)
    join = ("--connect", address_of(head), "--token-file", "token", "--number")
    server = start(tmp_path, "serve", *join, 1, path, tmp_path)
    worker = start(tmp_path, "work", *join, 0, path, tmp_path)
    until = time.monotonic() + 200
    while not (tmp_path / "ready.word").exists():
        assert time.monotonic() < until
        with suppress(subprocess.TimeoutExpired):
            worker.wait(timeout=0.05)
    server.kill()
    server.communicate()
    (tmp_path / "killed.word").touch()
    server = start(tmp_path, "serve", *join, 1, path, tmp_path)
    for process in (server, worker, head):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    trace = read_trace(tmp_path / "run" / "trace.jsonl")
    audit(trace)
    [restored] = [record for record in trace.records if isinstance(record, Restored)]
    assert restored.version in (3, 4)
    assert [update.update for update in trace.updates()][-1] == 8


def test_server_that_does_not_belong_to_the_run_is_refused_with_a_line(script, tmp_path):
    """Each of them exits at once, instead of looking for another head."""
    path = script(TRAINING + QUIET + LOOP)
    other = tmp_path / "other.py"
    other.write_text(path.read_text().replace("8", "9"))
    (tmp_path / "wrong").write_text("0" * 64)
    (tmp_path / "wrong").chmod(0o600)
    words = ("-w", 1, "--steps", 5, "--servers", 2, "--token-file", "token")
    head = start(tmp_path, "serve", *words, "--out", "run", path, tmp_path)
    address = address_of(head)

    def join(number=1, token="token", source=path, listen="127.0.0.1:0"):
        where = ("--connect", address, "--listen", listen)
        return start(
            tmp_path, "serve", *where, "--token-file", token, "--number", number, source, tmp_path
        )

    refused = {
        "the head refused server 2: the servers of this run are 0 to 1, got server 2": join(2),
        "the head refused server 1: the server's script differs from the head's: its parameters "
        "differ": join(source=other),
        f"the server at tcp:{address} has a different token": join(token="wrong"),
        f"cannot listen at tcp:{address}: Address already in use": join(listen=address),
    }
    for what, server in refused.items():
        out, err = server.communicate()
        assert (out, err.count("\n")) == ("", 1), err
        assert err.startswith(what)
        assert server.returncode == (2 if "cannot" in what else 4)
    head.terminate()
    head.communicate()


@pytest.mark.parametrize(
    "wrong",
    [
        ("serve --listen 0.0.0.0:29400 script.py", 2, "other hosts can reach 0.0.0.0:29400"),
        ("serve --listen 29400 script.py", 2, "an address must be HOST:PORT"),
        ("serve --listen 127.0.0.1:99999 script.py", 2, "an address must be HOST:PORT"),
        ("serve", 2, "no script given"),
        ("serve --servers 101 script.py", 2, "servers must be between 1 and 100, got 101"),
        ("serve --number 1 script.py", 2, "--number needs --connect"),
        ("serve --connect 127.0.0.1:1 script.py", 2, "--connect also needs --number"),
        ("serve --connect 127.0.0.1:1 --number 1 script.py", 2, "and --token-file"),
        (f"{JOIN} --number 1 no.py", 2, "script no.py does not exist"),
        (f"{JOIN} --number 1", 2, "no script given"),
        (f"{JOIN} --number 1 --listen 0:x script.py", 2, "an address must be HOST:PORT"),
        (f"{JOIN} --number 1 --tls-ca no.pem script.py", 2, "no.pem"),
        (
            "serve --connect 127.0.0.1:0 --number 1 --token-file t script.py",
            2,
            "--connect needs the port of the server, got 127.0.0.1:0",
        ),
        (
            "serve --connect 127.0.0.1:1 --number 1 --token-file no script.py",
            2,
            "cannot read the token in ",
        ),
        ("serve --listen 0.0.0.0:0 --token-file open script.py", 2, "chmod 600"),
        ("serve --token-file open script.py", 2, "chmod 600"),
        (f"{JOIN_OPEN} --number 1 --listen 0.0.0.0:0 script.py", 2, "chmod 600"),
        (f"{JOIN_OPEN} --number 1 script.py", 2, "chmod 600"),
    ],
)
def test_wrong_input_is_one_line(call, script, tmp_path, wrong):
    script(TRAINING + QUIET + LOOP)
    for name, mode in (("t", 0o600), ("open", 0o644)):
        (tmp_path / name).write_text("a" * 64)
        (tmp_path / name).chmod(mode)
    refuse_wrong_input(call, tmp_path, wrong)


def test_token_of_a_resumed_run_that_others_can_read_is_refused(call, script, tmp_path):
    """Without --token-file, it stays in the run's folder."""
    path = script(TRAINING + QUIET + LOOP)
    settings = Settings(spec=RunSpec(workers=2), script=str(path), folder=str(tmp_path))
    (tmp_path / "run").mkdir()
    settings.write(tmp_path / "run" / "spec.json")
    (tmp_path / "run" / "token").write_text("a" * 64)
    (tmp_path / "run" / "token").chmod(0o644)
    answer = call("serve", "--resume", "run")
    assert answer.code == 2
    assert "chmod 600" in answer.err
