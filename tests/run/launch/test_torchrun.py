# SPDX-License-Identifier: BSD-3-Clause
"""What a process learns from torchrun's environment; test_torchrun_runs.py has real runs."""

import os
import sys
from types import ModuleType

import pytest

from paceline.errors import SpecError
from paceline.run.launch.torchrun import Place, join_torchrun
from paceline.run.net.address import bind, of_socket

VARIABLES = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "GROUP_RANK": "0",
}


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """Return a function that gives this process the environment of one that torchrun starts."""
    script = tmp_path / "train.py"
    script.touch()
    main = ModuleType("__main__")
    main.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", [str(script)])

    def give(**changes):
        for name, value in {**VARIABLES, **changes}.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        return main

    return give


def test_environment_of_torchrun_says_which_worker_this_is():
    place = Place.read(VARIABLES)
    assert (place.rank, place.workers, place.workers_here) == (3, 8, 4)
    assert (place.host, place.port, place.shares_store) == ("127.0.0.1", 29500, True)
    assert not place.may_restart


def test_restarts_may_follow_until_the_last_one():
    more = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "2"}
    last = {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "2"}
    assert Place.read(VARIABLES | more).may_restart
    assert not Place.read(VARIABLES | last).may_restart


def test_without_torchrun_there_is_no_place():
    """RANK and WORLD_SIZE alone may come from anything."""
    others = {name: VARIABLES[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    assert Place.read({}) is None
    assert Place.read(others) is None
    assert join_torchrun() is None


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_part_of_the_environment_is_an_error_that_says_what_is_missing(environment, name):
    environment(**{name: None})
    with pytest.raises(SpecError, match=f"torchrun has started, but {name} is not set") as error:
        join_torchrun()
    assert "env -u TORCHELASTIC_RUN_ID python" in str(error.value)


def test_variable_that_is_no_number_is_an_error(environment):
    environment(RANK="first")
    with pytest.raises(SpecError, match="RANK must be a number, got 'first'"):
        join_torchrun()


def test_environment_of_a_torchrun_that_has_ended_is_an_error(environment):
    """For example variables that someone has exported in a shell."""
    with bind("tcp:127.0.0.1:0") as unused:  # nobody listens there
        port = of_socket(unused, "tcp:127.0.0.1:0").rpartition(":")[2]
        environment(MASTER_PORT=port)
        with pytest.raises(SpecError, match=f"can't be reached at 127.0.0.1:{port}") as error:
            join_torchrun()
    assert "Connection refused; to run the script by itself" in str(error.value)
    assert "PACELINE_ROLE" not in os.environ


def test_script_that_is_started_as_a_module_is_refused(environment):
    environment().__spec__ = object()
    with pytest.raises(SpecError, match="start it by its file, without -m"):
        join_torchrun()
