# SPDX-License-Identifier: BSD-3-Clause
"""Real data for the tests of the lab, where it is at hand; without it they are skipped.

It is looked for in `../shared/data` from the project's root, or in PACELINE_DATA. Nothing is ever
fetched.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from paceline.lab import data
from paceline.lab.bench import Bench
from paceline.lab.data import a9a as a9a_module
from paceline.lab.data import cifar10 as cifar10_module
from paceline.lab.data import mnist as mnist_module
from paceline.lab.data import text as text_module
from paceline.lab.data import tiny_imagenet as tiny_imagenet_module
from paceline.lab.data.a9a import Table, load_a9a
from paceline.lab.data.cifar10 import load_cifar10
from paceline.lab.data.files import Source
from paceline.lab.data.images import Images
from paceline.lab.data.mnist import load_mnist
from paceline.lab.data.text import Text, load_shakespeare
from paceline.lab.data.tiny_imagenet import load_tiny_imagenet
from paceline.lab.experiment import Lab

ROOT = Path(__file__).parents[2]


def need(folder: Path, sources: Iterable[Source]) -> Path:
    """The folder, if it has these files; the test is skipped otherwise."""
    for source in sources:
        if not any((folder / path).is_file() for path in (source.path, *source.others)):
            pytest.skip(f"{source.path} is not in {folder}; set PACELINE_DATA to where it is")
    return folder


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder for data."""
    folder = Path(os.environ.get("PACELINE_DATA") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"there is no data in {folder}; set PACELINE_DATA to where it is")
    return folder


@pytest.fixture(scope="session")
def data_cache(request: pytest.FixtureRequest) -> Path:
    """Where unpacked data is kept from one run of the tests to the next.

    It is forgotten as soon as the code that unpacks is another.
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


@pytest.fixture(scope="session")
def quick(data_folder: Path, data_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """For the quick versions of the experiments."""
    return Lab(
        data=data_folder,
        cache=data_cache,
        bench=Bench(tmp_path_factory.mktemp("trials"), processes=1),
        seeds=(0,),
        quick=True,
        progress=lambda done, of, share: None,
    )
