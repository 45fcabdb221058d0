# SPDX-License-Identifier: BSD-3-Clause
"""The environment that the processes of a run are started with."""

import os

import pytest

from paceline.run.launch.environment import large_pages


@pytest.mark.parametrize("value", [None, "0", "1"])
def test_large_pages_are_requested_unless_the_user_decided(monkeypatch, value):
    name = "THP_MEM_ALLOC_ENABLE"
    monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv(name, value)
    with large_pages():
        assert os.environ[name] == (value or "1")
    assert os.environ.get(name) == value
