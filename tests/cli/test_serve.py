# SPDX-License-Identifier: BSD-3-Clause
"""`paceline serve`: the server of a run whose workers are elsewhere."""

import subprocess

import pytest

from cli_fixtures import SCRIPT, refuse_wrong_input
from failures import LOOP, TRAINING
from paceline.trace.reader import read_trace
from paceline.watch.audit import audit

QUIET = "def trouble(run): pass\n"


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


@pytest.mark.parametrize(
    "wrong",
    [
        ("serve --listen 0.0.0.0:29400 script.py", 2, "other hosts can reach 0.0.0.0:29400"),
        ("serve --listen 29400 script.py", 2, "an address must be HOST:PORT"),
        ("serve --listen 127.0.0.1:99999 script.py", 2, "an address must be HOST:PORT"),
        ("serve", 2, "no script given"),
    ],
)
def test_wrong_input_is_one_line(call, script, tmp_path, wrong):
    script(TRAINING + QUIET + LOOP)
    refuse_wrong_input(call, tmp_path, wrong)


def test_token_that_others_can_read_is_refused_if_other_hosts_can_connect(call, script, tmp_path):
    script(TRAINING + QUIET + LOOP)
    token = tmp_path / "token"
    token.write_text("a" * 64)
    token.chmod(0o644)
    answer = call("serve", "--listen", "0.0.0.0:0", "--token-file", "token", "script.py")
    assert answer.code == 2
    assert "chmod 600" in answer.err
