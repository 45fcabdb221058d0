# SPDX-License-Identifier: BSD-3-Clause
"""Options of parameter groups: changes are found, and the newest one wins."""

import numpy as np
import pytest
import torch
import torch._dynamo  # optimizers import it, and it sets an environment variable
from torch import nn

from paceline.errors import ProtocolError
from paceline.run.net.messages import GradientReport as Report
from paceline.run.net.messages import decode_worker, encode
from paceline.run.tensors.group_options import KnownOptions, OptionLog, group_of, set_option
from paceline.run.tensors.state_spec import OptionChange


@pytest.fixture
def optimizers():
    model = nn.Linear(2, 1)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}]
    return [
        torch.optim.AdamW(groups, betas=(0.9, 0.99)),
        torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=torch.tensor(0.3)),
    ]


def test_unchanged_options_are_not_returned(optimizers):
    assert KnownOptions(optimizers).changed() == []


def test_change_is_returned_once(optimizers):
    known = KnownOptions(optimizers)
    optimizers[0].param_groups[0]["lr"] = 0.5
    assert known.changed() == [OptionChange(0, 0, "lr", 0.5)]
    assert known.changed() == []


def test_option_set_by_the_server_is_not_a_change(optimizers):
    known = KnownOptions(optimizers)
    set_option(optimizers, OptionChange(0, 0, "lr", 0.5))
    known.read()
    assert known.changed() == []


def test_learning_rate_changed_in_place_is_found(optimizers):
    known = KnownOptions(optimizers)
    optimizers[1].param_groups[0]["lr"].fill_(0.5)
    assert known.changed() == [OptionChange(1, 0, "lr", 0.5)]


@pytest.mark.parametrize(
    ("number", "group", "name", "value", "travels_as"),
    [
        (0, 1, "lr", 0.5, 0.5),
        (0, 0, "lr", 1, 1),
        (0, 0, "lr", np.float64(0.5), 0.5),
        (0, 0, "lr", np.float32(0.5), 0.5),
        (0, 0, "lr", np.int64(2), 2),
        (0, 0, "lr", torch.tensor(0.5), 0.5),
        (0, 0, "lr", torch.tensor([0.5]), 0.5),
        (1, 0, "lr", torch.tensor(0.5), 0.5),
        (0, 0, "betas", (0.5, 0.75), (0.5, 0.75)),
        (0, 0, "betas", [0.5, 0.75], (0.5, 0.75)),
        (0, 0, "betas", (np.float32(0.5), 1), (0.5, 1.0)),
        (1, 0, "nesterov", True, True),
        (1, 0, "foreach", False, False),
        (1, 0, "own", "text", "text"),
        (1, 0, "own", None, None),
    ],
)
def test_changed_option_is_sent(optimizers, number, group, name, value, travels_as):
    known = KnownOptions(optimizers)
    optimizers[number].param_groups[group][name] = value
    [option] = known.changed()
    assert option == OptionChange(number, group, name, travels_as)
    assert type(option.value) is type(travels_as)
    report = Report(1, 0, 0, 1, 0.0, 1.0, options=(option,))
    assert decode_worker(encode(report)) == report


@pytest.mark.parametrize("value", [object(), {"a": 1}, {1}, torch.ones(2), ("a", "b"), (None, 1.0)])
def test_option_that_cannot_be_sent_is_ignored(optimizers, value):
    known = KnownOptions(optimizers)
    optimizers[0].param_groups[0]["own"] = value
    assert known.changed() == []


def test_option_is_set_in_its_group(optimizers):
    for option in (OptionChange(0, 1, "lr", 0.5), OptionChange(1, 0, "new", "text")):
        set_option(optimizers, option)
    assert [group["lr"] for group in optimizers[0].param_groups] == [0.1, 0.5]
    assert optimizers[1].param_groups[0]["new"] == "text"


def test_tensor_learning_rate_stays_the_same_tensor(optimizers):
    """Captured and compiled steps refer to that tensor."""
    tensor = optimizers[1].param_groups[0]["lr"]
    set_option(optimizers, OptionChange(1, 0, "lr", 0.5))
    assert optimizers[1].param_groups[0]["lr"] is tensor
    assert tensor == 0.5


@pytest.mark.parametrize(
    ("option", "what"),
    [
        (OptionChange(2, 0, "lr", 0.5), "no such parameter group"),
        (OptionChange(0, 2, "lr", 0.5), "no such parameter group"),
        (OptionChange(2**53, 2**53, "lr", 0.5), "no such parameter group"),
        (OptionChange(0, 0, "params", 0.5), "the parameters of a group can't be changed"),
        (OptionChange(0, 0, "param_names", "a"), "the parameters of a group can't be changed"),
    ],
)
def test_option_of_an_unknown_group_is_refused_and_changes_nothing(optimizers, option, what):
    known = KnownOptions(optimizers)
    for use in (group_of, set_option):
        with pytest.raises(ProtocolError, match=what):
            use(optimizers, option)
    assert known.changed() == []


# ----------------------------------------------------------------------------------- who knows what


def test_worker_gets_the_changes_it_does_not_know():
    log = OptionLog()
    assert log.since(0) == ()
    first, second, third = (OptionChange(0, 0, name, 1.0) for name in ("a", "b", "c"))
    for version, option in enumerate((first, second, third)):
        assert log.add(option, version)
    assert log.since(0) == (first, second, third)
    assert log.since(2) == (third,)
    assert log.since(log.edition) == ()


def test_change_at_the_newer_version_wins():
    log = OptionLog()
    old, new, same = (OptionChange(0, 0, "lr", value) for value in (0.1, 0.2, 0.3))
    assert log.add(new, version=5)
    assert not log.add(old, version=4)
    assert log.since(0) == (new,)
    assert log.add(same, version=5)  # the later change at one version
    assert log.since(0) == (same,)


def test_option_that_was_changed_twice_is_returned_once():
    log = OptionLog()
    for version in range(10):
        log.add(OptionChange(0, 0, "lr", version / 10), version)
    assert log.since(0) == (OptionChange(0, 0, "lr", 0.9),)
    assert log.since(9) == (OptionChange(0, 0, "lr", 0.9),)
