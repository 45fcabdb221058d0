# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures with real data; tests that need missing data are skipped.

The data is in `../shared/data` next to the project, or in PACELINE_DATA. Nothing is downloaded.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from paceline.lab import data
from paceline.lab.data import a9a as a9a_module
from paceline.lab.data import cifar10 as cifar10_module
from paceline.lab.data import mnist as mnist_module
from paceline.lab.data import shakespeare as text_module
from paceline.lab.data import tiny_imagenet as tiny_imagenet_module
from paceline.lab.data.a9a import Table, load_a9a
from paceline.lab.data.cifar10 import load_cifar10
from paceline.lab.data.download import Source
from paceline.lab.data.images import Images
from paceline.lab.data.mnist import load_mnist
from paceline.lab.data.shakespeare import Text, load_shakespeare
from paceline.lab.data.tiny_imagenet import load_tiny_imagenet

ROOT = Path(__file__).parents[1]


def need(folder: Path, sources: Iterable[Source]) -> Path:
    """Return the folder if it has these files; skip the test otherwise."""
    for source in sources:
        if not any((folder / path).is_file() for path in (source.path, *source.others)):
            pytest.skip(f"{source.path} is not in {folder}; set PACELINE_DATA to its folder")
    return folder


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The data folder."""
    folder = Path(os.environ.get("PACELINE_DATA") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"there is no data in {folder}; set PACELINE_DATA to its folder")
    return folder


@pytest.fixture(scope="session")
def data_cache(request: pytest.FixtureRequest) -> Path:
    """A folder that keeps unpacked data between test runs.

    It is emptied when the code that unpacks the data changes.
    """
    folder = request.config.cache.mkdir("data")
    digest = hashlib.sha256()
    for path in sorted(Path(data.__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    ours = folder / digest.hexdigest()[:16]
    for other in folder.iterdir():
        if other != ours:
            shutil.rmtree(other, ignore_errors=True)
    return ours


@pytest.fixture(scope="session")
def mnist(data_folder: Path) -> Images:
    return load_mnist(need(data_folder, mnist_module.SOURCES))


@pytest.fixture(scope="session")
def cifar10(data_folder: Path, data_cache: Path) -> Images:
    return load_cifar10(need(data_folder, cifar10_module.SOURCES), data_cache)


@pytest.fixture(scope="session")
def tiny_imagenet(data_folder: Path, data_cache: Path) -> Images:
    folder = need(data_folder, tiny_imagenet_module.SOURCES)
    return load_tiny_imagenet(folder, cache=data_cache)


@pytest.fixture(scope="session")
def shakespeare(data_folder: Path) -> Text:
    return load_shakespeare(need(data_folder, text_module.SOURCES))


@pytest.fixture(scope="session")
def a9a(data_folder: Path) -> Table:
    return load_a9a(need(data_folder, a9a_module.SOURCES))
