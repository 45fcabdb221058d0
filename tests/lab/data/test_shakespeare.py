# SPDX-License-Identifier: BSD-3-Clause
"""tiny-shakespeare has its known content, and damaged files are reported."""

from collections.abc import Callable

import pytest

from paceline.lab.data.shakespeare import Text, load_shakespeare


@pytest.mark.parametrize(
    ("data", "why"),
    [(b"", "it is empty"), (b"First Citizen:\nBefore", "got 11cb5a73")],
    ids=["empty", "truncated"],
)
def test_damaged_text_is_reported(load_damaged: Callable[..., str], data: bytes, why: str) -> None:
    assert why in load_damaged(load_shakespeare, "tiny-shakespeare/input.txt", data)


def test_shakespeare_has_its_known_content(shakespeare: Text) -> None:
    assert (len(shakespeare.train), len(shakespeare.test)) == (1_003_854, 111_540)
    assert len(shakespeare.symbols) == 65
    assert shakespeare.symbols.startswith("\n !$&',-.3:;?ABC")
    first = "".join(shakespeare.symbols[code] for code in shakespeare.train[:45])
    assert first == "First Citizen:\nBefore we proceed any further,"
    last = "".join(shakespeare.symbols[code] for code in shakespeare.test[-17:])
    assert last == "Whiles thou art waking.\n"[-17:]
