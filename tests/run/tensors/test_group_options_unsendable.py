# SPDX-License-Identifier: BSD-3-Clause
"""Options that a script sets to values that can't be sent to the server."""

import pytest
import torch
from torch import nn

from paceline.errors import SpecError
from paceline.run.tensors.group_options import KnownOptions


@pytest.fixture
def optimizers():
    return [torch.optim.AdamW(nn.Linear(2, 1).parameters(), lr=0.1, betas=(0.9, 0.99))]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lr", torch.tensor([0.5, 0.25]), "a finite number like 0.1, got tensor([0.5000, 0.2500])"),
        ("lr", torch.zeros(9, 9), "a finite number like 0.1, got tensor([[0., 0., 0., 0., 0., "),
        ("lr", 1j, "a finite number like 0.1, got 1j"),
        ("lr", torch.tensor(1j), "a finite number like 0.1, got tensor(0.+1.j)"),
        ("betas", ("a", "b"), "a tuple of finite numbers like (0.9, 0.99), got ('a', 'b')"),
        ("foreach", [None], "a finite number, True, False or None, got [None]"),
    ],
)
def test_value_that_cannot_be_sent_is_refused_until_it_is_replaced(
    optimizers, name, value, message
):
    known, group = KnownOptions(optimizers), optimizers[0].param_groups[0]
    before, group[name] = group[name], value
    for _ in range(2):
        with pytest.raises(SpecError) as error:
            known.changed()
        assert str(error.value).startswith(f"{name} of parameter group 0 must be {message}")
        assert "\n" not in str(error.value)
    group[name] = before
    assert known.changed() == []


def test_option_that_could_never_be_sent_stays_in_its_worker(optimizers):
    group = optimizers[0].param_groups[0]
    group["own"] = {"a": 1}
    known = KnownOptions(optimizers)
    group["own"] = {"a": 2}
    assert known.changed() == []
