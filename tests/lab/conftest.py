# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures for the tests of the lab, on top of those in `data_fixtures.py`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.lab.experiment import Lab
from paceline.lab.threads import one_thread
from paceline.lab.trial_pool import TrialPool


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Compute with one thread: extra threads slow small tensors down, most of all on busy cores."""
    with one_thread():
        yield


@pytest.fixture(scope="session")
def quick(data_folder: Path, data_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """The lab for the quick versions of the experiments."""
    return Lab(
        data=data_folder,
        cache=data_cache,
        pool=TrialPool(tmp_path_factory.mktemp("trials"), processes=1),
        seeds=(0,),
        quick=True,
        progress=lambda done, of, share: None,
    )
