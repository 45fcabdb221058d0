# SPDX-License-Identifier: BSD-3-Clause
"""`one_thread` limits torch inside its block only."""

import pytest
import torch

from paceline.lab.threads import one_thread


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_number_of_threads_is_restored():
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_number_of_threads_is_restored_after_an_exception():
    with pytest.raises(KeyError), one_thread():
        raise KeyError
    assert torch.get_num_threads() == 2
