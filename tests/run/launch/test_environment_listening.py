# SPDX-License-Identifier: BSD-3-Clause
"""A server listens where other hosts can connect only with a token that nobody else can read."""

import os

import pytest

from paceline.errors import SpecError
from paceline.run.launch.environment import TOKEN_MIN, check_listening
from paceline.run.net.handshake import new_token

WIDE = ["tcp:0.0.0.0:7000", "tcp::7000", "tcp:[::]:7000", "tcp:10.0.0.1:0", "tcp:node7:7000"]


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(new_token(), encoding="ascii")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    "address", ["unix:@name", "unix:/path", "tcp:127.0.0.1:0", "tcp:[::1]:1", "tcp:localhost:1"]
)
def test_address_that_only_this_host_reaches_needs_nothing(address, tmp_path):
    check_listening(address, tmp_path / "none")


@pytest.mark.parametrize("address", WIDE)
def test_wider_address_is_refused_without_a_token(address, tmp_path):
    with pytest.raises(
        SpecError, match=r"to listen at .*, where other hosts can connect, the run "
    ):
        check_listening(address, tmp_path / "none")


@pytest.mark.parametrize("address", WIDE)
def test_wider_address_is_accepted_with_a_private_token(address, token_file):
    check_listening(address, token_file)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o666, 0o607])
def test_token_that_others_can_read_is_refused(token_file, mode):
    token_file.chmod(mode)
    with pytest.raises(SpecError, match=f"only you may have access to .*chmod 600 {token_file}"):
        check_listening(WIDE[0], token_file)


@pytest.mark.parametrize("owner", [0, 1000])
def test_token_that_a_group_can_read_is_accepted_only_from_root(token_file, owner, monkeypatch):
    """Containers get their secrets as files of root and a group."""
    found = list(os.stat(token_file))
    found[0], found[4] = 0o100440, owner
    monkeypatch.setattr(type(token_file), "stat", lambda _: os.stat_result(found))
    if owner == 0:
        check_listening(WIDE[0], token_file)
    else:
        with pytest.raises(SpecError, match="its mode is -r--r-----"):
            check_listening(WIDE[0], token_file)


def test_short_or_empty_token_is_refused(token_file):
    token_file.write_text("x" * (TOKEN_MIN - 1) + "\n", encoding="ascii")
    with pytest.raises(SpecError, match=f"must have at least {TOKEN_MIN} letters"):
        check_listening(WIDE[0], token_file)
    token_file.write_text("\n", encoding="ascii")
    with pytest.raises(SpecError, match="is empty"):
        check_listening(WIDE[0], token_file)
