# SPDX-License-Identifier: BSD-3-Clause
"""The options for Ray are those of `paceline run` only."""

import os

import pytest

from paceline.cli.ray_options import PRIVATE, PlacedRunOptions, keep_ray_private
from paceline.cli.run import RAY_OPTIONS
from paceline.cli.verb_options import RunOptions, ServeOptions


def fields(kind):
    return set(kind.__dataclass_fields__)


def test_they_are_added_to_those_of_a_run():
    assert fields(PlacedRunOptions) - fields(RunOptions) == RAY_OPTIONS | {"on"}
    assert not fields(ServeOptions) & RAY_OPTIONS


@pytest.mark.parametrize("name", sorted(RAY_OPTIONS))
def test_help_says_that_they_need_ray(call, name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    option = f"--{name.replace('_', '-')}"
    lines = call("run", "--help").out.splitlines()
    [line] = [line for line in lines if line.lstrip(" │").startswith(f"{option} ")]
    assert "With --on ray: " in line


@pytest.mark.parametrize("address", [None, "10.0.0.5:6379"])
def test_only_a_ray_of_the_run_itself_is_kept_private(monkeypatch, address):
    for name in PRIVATE:
        monkeypatch.setenv(name, "")  # so that it is restored at the end
        monkeypatch.delenv(name)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    keep_ray_private(PlacedRunOptions(context=None, address=address))
    assert {name: os.environ[name] for name in PRIVATE if name in os.environ} == (
        {} if address else PRIVATE
    )


def test_ray_at_the_address_in_the_environment_is_left_as_it_is(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:6379")
    keep_ray_private(PlacedRunOptions(context=None))
    assert not PRIVATE.keys() & os.environ.keys()
