# SPDX-License-Identifier: BSD-3-Clause
"""The identity of a process, which it gets through environment variables."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import SpecError
from paceline.run.launch.environment import (
    Identity,
    adopt,
    identity,
    large_pages,
    threads,
    variables,
)
from paceline.run.net.handshake import new_token
from paceline.run.net.tls import TlsFiles

SERVER = Identity("unix:@name", Path("/run/token"), Path("/run"), None)
WORKER = Identity("unix:@name", Path("/run/token"), Path("/run"), 3)
WITH_SOCKET = Identity("unix:@name", Path("/run/token"), Path("/run"), None, listening_fd=7)


WITH_TLS = replace(SERVER, tls=TlsFiles("/cert", "/key", "/ca"))
WITH_CA = replace(WORKER, tls=TlsFiles(ca="/ca"))
OTHER_SERVER = replace(SERVER, run_dir=Path(), server=2, listen="tcp:10.0.0.6:29401")

ELSEWHERE = replace(WORKER, run_dir=Path(), workers=4, seat=b"seat")


@pytest.mark.parametrize(
    "who", [SERVER, WORKER, WITH_SOCKET, WITH_TLS, WITH_CA, OTHER_SERVER, ELSEWHERE]
)
def test_identity_survives_the_environment(who):
    assert identity(variables(who)) == who


def test_process_without_a_role_has_no_identity():
    assert identity({"PACELINE_ADDRESS": "unix:@name", "HOME": "/"}) is None


@pytest.mark.parametrize(
    ("who", "changes", "what"),
    [
        (SERVER, {"PACELINE_ROLE": "boss"}, "must be 'server' or 'worker', got 'boss'"),
        (SERVER, {"PACELINE_ROLE": ""}, "must be 'server' or 'worker', got ''"),
        (SERVER, {"PACELINE_ADDRESS": None}, "'server', but PACELINE_ADDRESS is not set"),
        (SERVER, {"PACELINE_TOKEN_FILE": ""}, "'server', but PACELINE_TOKEN_FILE is not set"),
        (SERVER, {"PACELINE_RUN_DIR": None}, "'server', but PACELINE_RUN_DIR is not set"),
        (WORKER, {"PACELINE_WORKER": None}, "'worker', but PACELINE_WORKER is not set"),
        (
            WORKER,
            {"PACELINE_WORKER": None, "PACELINE_ADDRESS": None},
            "'worker', but PACELINE_ADDRESS, PACELINE_WORKER is not set",
        ),
        (WORKER, {"PACELINE_WORKER": "-1"}, "the number of a worker, got '-1'"),
        (WORKER, {"PACELINE_WORKER": "first"}, "the number of a worker, got 'first'"),
        (WORKER, {"PACELINE_WORKER": "²"}, "the number of a worker, got '²'"),
        (WORKER, {"PACELINE_SEAT": "here"}, "PACELINE_SEAT must be hexadecimal, got 'here'"),
        (SERVER, {"PACELINE_SERVER": "-1"}, "the number of a server, got '-1'"),
        (SERVER, {"PACELINE_SERVER": "first"}, "the number of a server, got 'first'"),
        (SERVER, {"PACELINE_SERVER": ""}, "the number of a server, got ''"),
        (OTHER_SERVER, {"PACELINE_ADDRESS": None}, "'server', but PACELINE_ADDRESS is not set"),
    ],
)
def test_bad_environment_is_named(who, changes, what):
    environ = {**variables(who), **changes}
    with pytest.raises(SpecError, match=what):
        identity({name: value for name, value in environ.items() if value is not None})


def test_another_server_needs_no_run_folder():
    environ = variables(OTHER_SERVER)
    environ.pop("PACELINE_RUN_DIR", None)
    assert identity(environ) == OTHER_SERVER


def test_only_the_first_server_is_the_head():
    assert [who.is_head for who in (SERVER, OTHER_SERVER, WORKER)] == [True, False, False]


def test_worker_has_no_server_number_of_the_environment():
    environ = {**variables(WORKER), "PACELINE_SERVER": "2"}
    assert identity(environ).server == 0


def test_adopted_identity_has_nothing_of_another_server(monkeypatch):
    for name in (*variables(SERVER), "PACELINE_THREADS", "PACELINE_SERVER", "PACELINE_LISTEN"):
        monkeypatch.setenv(name, "2")
    adopt(SERVER, threads=2)
    assert identity() == SERVER


def test_worker_needs_no_run_folder():
    environ = variables(WORKER)
    del environ["PACELINE_RUN_DIR"]
    assert identity(environ).run_dir == Path()


def test_adopted_identity_has_no_tls_of_the_launchers_environment(monkeypatch):
    for name in (*variables(WORKER), "PACELINE_THREADS", "PACELINE_TLS_CA"):
        monkeypatch.setenv(name, "/other")
    adopt(WORKER, threads=2)
    assert identity() == WORKER
    monkeypatch.setenv("PACELINE_TLS_CA", "/other")


def test_adopted_identity_is_found(monkeypatch):
    for name in (*variables(WORKER), "PACELINE_THREADS"):
        monkeypatch.setenv(name, "")  # so that they are restored at the end
    adopt(WORKER, threads=2)
    assert (identity(), threads()) == (WORKER, 2)


@pytest.mark.parametrize("text", ["", "0", "-1", "many", "1.5", "²"])
def test_bad_number_of_threads_is_ignored(monkeypatch, text):
    monkeypatch.setenv("PACELINE_THREADS", text)
    assert threads() is None


def test_token_is_read_from_its_file(tmp_path):
    path = tmp_path / "token"
    who = Identity("unix:@name", path, tmp_path, None)
    token = new_token()
    path.write_text(f"{token}\n", encoding="ascii")
    assert who.token() == token


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "cannot read the token in .*No such file"),
        (b"\xff", "cannot read the token in .*ascii"),
        (b"", "the token file .* is empty"),
        (b" \n", "the token file .* is empty"),
    ],
)
def test_missing_token_is_named(tmp_path, content, what):
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpecError, match=what):
        Identity("unix:@name", path, tmp_path, None).token()


@pytest.mark.parametrize("value", [None, "0", "1"])
def test_large_pages_are_requested_unless_the_user_decided(monkeypatch, value):
    name = "THP_MEM_ALLOC_ENABLE"
    monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv(name, value)
    with large_pages():
        assert os.environ[name] == (value or "1")
    assert os.environ.get(name) == value
