# SPDX-License-Identifier: BSD-3-Clause
"""The secret of a run."""

from paceline.run.net.handshake import new_token


def test_tokens_are_long_and_unique():
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert {len(token) for token in tokens} == {64}
