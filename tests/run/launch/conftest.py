# SPDX-License-Identifier: BSD-3-Clause
"""What tests of the launcher's connection to the server have in common."""

import secrets
from selectors import DefaultSelector

import pytest

from paceline.run.launch.environment import Identity
from paceline.run.net.handshake import new_token


@pytest.fixture
def selector():
    """The launcher's selector."""
    with DefaultSelector() as selector:
        yield selector


@pytest.fixture
def identity(tmp_path):
    """Return the identity of a server that nobody has started."""
    (tmp_path / "token").write_text(new_token())
    address = f"unix:@paceline-test-{secrets.token_hex(8)}"
    return Identity(address, tmp_path / "token", tmp_path, None)
