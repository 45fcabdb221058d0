# SPDX-License-Identifier: BSD-3-Clause
"""What processes with another launcher are given, and what they are told."""

import os
from pathlib import Path

import pytest

from paceline.errors import SpecError
from paceline.run.launch import outer_launcher
from paceline.run.launch.environment import Identity
from paceline.run.launch.outer_launcher import (
    announce,
    announce_to,
    given_options,
    given_token_file,
    is_announced,
    read_announcement,
)

SERVER = Identity("tcp:127.0.0.1:29400", Path("/run/token"), Path("/run"), None)


def test_options_are_split_as_a_shell_does(monkeypatch):
    monkeypatch.setenv("PACELINE_OPTIONS", "--latency '50ms + exp:20ms' -p sync")
    assert given_options() == ["--latency", "50ms + exp:20ms", "-p", "sync"]
    monkeypatch.delenv("PACELINE_OPTIONS")
    assert given_options() == []


def test_options_that_no_shell_could_read_are_refused(monkeypatch):
    monkeypatch.setenv("PACELINE_OPTIONS", "--out 'runs")
    with pytest.raises(SpecError, match="No closing quotation"):
        given_options()


def test_token_file_is_found_in_any_folder(monkeypatch, tmp_path):
    assert given_token_file() is None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_TOKEN_FILE", "token")
    assert given_token_file() == tmp_path / "token"


def test_server_is_announced_only_to_a_process_that_asks(monkeypatch):
    monkeypatch.setattr(outer_launcher, "_pipes", [])
    announce(SERVER)
    assert not is_announced()
    told, pipe = os.pipe()
    announce_to(pipe)
    assert is_announced()
    announce(SERVER)
    os.close(pipe)
    assert read_announcement(told) == SERVER


def test_launcher_that_exits_first_announces_nothing():
    told, pipe = os.pipe()
    os.close(pipe)
    assert read_announcement(told) is None
