# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures for damaged data files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import SpecError
from paceline.lab.data import a9a, cifar10, mnist, shakespeare, tiny_imagenet

SOURCES = [s for m in (mnist, cifar10, tiny_imagenet, shakespeare, a9a) for s in m.SOURCES]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which every file exists but is empty, so that nothing is downloaded."""
    for source in SOURCES:
        (tmp_path / source.path).parent.mkdir(exist_ok=True)
        (tmp_path / source.path).touch()
    return tmp_path


@pytest.fixture
def load_damaged(folder: Path) -> Callable[..., str]:
    """Load a data set with this content in one of its files, and return the reported reason."""

    def load_it(load: Callable[[Path], Any], path: str, data: bytes) -> str:
        (folder / path).write_bytes(data)
        with pytest.raises(SpecError) as caught:
            load(folder)
        before, damage, why = str(caught.value).partition(" is damaged: ")
        assert before == str(folder / path)
        assert damage
        assert "\n" not in why
        what, _, way_out = why.partition("; ")
        assert way_out == "delete it, and it will be downloaded again"
        return what

    return load_it
