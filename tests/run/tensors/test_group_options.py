# SPDX-License-Identifier: BSD-3-Clause
"""Options of parameter groups: changes are found, and the newest one wins."""

import re

import numpy as np
import pytest
import torch
import torch._dynamo  # optimizers import it, and it sets an environment variable
from torch import nn

from paceline.errors import ProtocolError
from paceline.run.net.messages import GradientReport as Report
from paceline.run.net.messages import decode_worker, encode
from paceline.run.tensors.group_options import (
    KnownOptions,
    OptionLog,
    all_options,
    check_options,
    group_of,
    ignored_changes,
    set_option,
)
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


def test_option_that_the_server_does_not_have_is_not_sent(optimizers):
    """A scheduler that isn't prepared adds some to the groups of its worker."""
    known = KnownOptions(optimizers)
    group = optimizers[1].param_groups[0]
    group["initial_lr"] = 0.5
    group["lr"] = 0.25
    assert known.changed() == [OptionChange(1, 0, "lr", 0.25)]
    group["initial_lr"] = 0.75
    assert known.changed() == []


@pytest.mark.parametrize("way", ["sent by the server", "in a state that the server has loaded"])
def test_option_that_the_server_has_got_since_is_sent(optimizers, way):
    known = KnownOptions(optimizers)
    if way == "sent by the server":
        with known.change():
            set_option(optimizers, OptionChange(1, 0, "own", 0.5))
            known.learn([OptionChange(1, 0, "own", 0.5)])
    else:
        optimizers[1].param_groups[0]["own"] = 0.5
        known.read_all()
    assert known.changed() == []
    optimizers[1].param_groups[0]["own"] = 0.75
    assert known.changed() == [OptionChange(1, 0, "own", 0.75)]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("old", "new", "is_valid"),
    [
        (0.1, 0.2, True),
        (1, 0.5, True),
        (0, 0.9, True),
        (0.1, 1, True),
        (INF, 1.0, True),
        (INF, NAN, True),
        (torch.tensor(0.1), 0.2, True),
        (False, True, True),
        (False, None, True),
        (None, False, True),
        (None, 2.0, True),
        (None, None, True),
        ((0.9, 0.99), (0.5, 0.5), True),
        ("min", "max", True),
        (0.1, "0.1", False),
        (0.1, NAN, False),
        (0.1, INF, False),
        (0, None, False),
        (0.1, None, False),
        (0.1, True, False),
        (torch.tensor(0.1), NAN, False),
        (torch.tensor(0.1), "0.1", False),
        (False, 1, False),
        (None, "0.1", False),
        (None, NAN, False),
        ((0.9, 0.99), (0.5,), False),
        ((0.9, 0.99), (0.5, NAN), False),
        ((0.9, 0.99), 0.5, False),
        ("min", 1.0, False),
        ({"a": 1}, 0.1, False),
    ],
)
def test_option_keeps_its_type_and_a_number_stays_finite(optimizers, old, new, is_valid):
    optimizers[0].param_groups[1]["own"] = old
    option = OptionChange(0, 1, "own", new)
    if is_valid:
        check_options(optimizers, [option])
        return
    with pytest.raises(ProtocolError, match=r"own of parameter group 1 must be .*, got "):
        check_options(optimizers, [option])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (0.1, NAN, "own of parameter group 1 must be a finite number like 0.1, got nan"),
        (torch.tensor(0.5), "a", "own of parameter group 1 must be a finite number like 0.5, "),
        (False, 1, "own of parameter group 1 must be True, False or None, got 1"),
        (None, "a", "own of parameter group 1 must be a finite number, True, False or None, got "),
        ("min", 1, "own of parameter group 1 must be a string like 'min', got 1"),
        ((0.5, 1.0), (0.5,), "must be a tuple of finite numbers like (0.5, 1.0), got (0.5,)"),
        ({"a": 1}, 1, "own of parameter group 1 must be a dict, got 1"),
    ],
)
def test_refusal_says_what_an_option_must_be(optimizers, old, new, message):
    optimizers[0].param_groups[1]["own"] = old
    with pytest.raises(ProtocolError, match=re.escape(message)):
        check_options(optimizers, [OptionChange(0, 1, "own", new)])


def stepped(kind, **options):
    """Return an optimizer of two parameters, one of which has been stepped."""
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), **options)
    model.weight.grad = torch.ones(2, 3)
    optimizer.step()
    return optimizer


SGD, ADAM, RMSPROP = torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop


@pytest.mark.parametrize(
    ("optimizer", "name", "value", "reason"),
    [
        (
            stepped(ADAM),
            "betas",
            (1.0, 0.999),
            "betas of parameter group 0 can't be (1.0, 0.999): Invalid beta parameter at index 0",
        ),
        (stepped(ADAM), "lr", -1.0, "Invalid learning rate: -1.0"),
        (stepped(ADAM, lr=torch.tensor(0.1)), "lr", -1.0, "Invalid learning rate: -1.0"),
        (stepped(SGD), "weight_decay", -0.1, "Invalid weight_decay value: -0.1"),
        (
            stepped(ADAM),
            "capturable",
            True,
            "parameter group 0 can't have capturable=True: the optimizer's next step would fail",
        ),
        (stepped(ADAM), "amsgrad", True, "would fail with KeyError: 'max_exp_avg_sq'"),
        (stepped(RMSPROP), "momentum", 0.9, "would fail with KeyError: 'momentum_buffer'"),
        (stepped(SGD), "lr", 1e308, "lr=1e+308: the optimizer's next step would fail with "),
        (stepped(SGD, lr=torch.tensor(0.1)), "lr", 1e308, "lr=1e+308: value cannot be converted"),
        (stepped(ADAM), "lr", 1e38, "lr=1e+38: the optimizer's next step would fail with "),
    ],
)
def test_value_that_torch_cannot_step_with_is_refused(optimizer, name, value, reason):
    before = str(optimizer.state_dict())
    with pytest.raises(ProtocolError, match=re.escape(reason)):
        check_options([optimizer], [OptionChange(0, 0, name, value)])
    assert str(optimizer.state_dict()) == before


def test_values_that_torch_cannot_step_with_together_are_refused():
    optimizer = stepped(ADAM)
    options = [OptionChange(0, 0, name, True) for name in ("foreach", "differentiable")]
    for option in options:
        check_options([optimizer], [option])
    with pytest.raises(ProtocolError, match="can't have foreach=True, differentiable=True: the"):
        check_options([optimizer], options)


class Own(torch.optim.Adam):
    """An optimizer whose constructor takes other arguments."""

    def __init__(self, parameters, strength):
        super().__init__(parameters, lr=strength)


@pytest.mark.parametrize(
    ("optimizer", "name", "value"),
    [
        (stepped(SGD, momentum=0.9), "momentum", 0),
        (stepped(SGD), "momentum", 0.9),
        (stepped(SGD, momentum=0.9, nesterov=True), "momentum", 0.0),
        (stepped(SGD), "nesterov", True),  # momentum may follow
        (stepped(ADAM), "betas", (0.85, 0.999)),
        (stepped(ADAM), "lr", 0),
        (stepped(SGD), "lr", 30.0),
        (ADAM(nn.Linear(3, 2).parameters()), "amsgrad", True),  # it has no state yet
        (stepped(ADAM, amsgrad=True), "amsgrad", False),
        (stepped(ADAM), "fused", True),
        (stepped(ADAM), "foreach", True),
        (stepped(torch.optim.Adafactor), "d", 2.0),
        (stepped(torch.optim.AdamW), "decoupled_weight_decay", True),
        (stepped(Own, strength=0.1), "lr", -1.0),
        (torch.optim.LBFGS(nn.Linear(3, 2).parameters()), "history_size", 5),
        (torch.optim.SGD([{"params": []}]), "momentum", 0.9),
    ],
)
def test_value_that_torch_can_step_with_is_accepted(optimizer, name, value):
    check_options([optimizer], [OptionChange(0, 0, name, value)])


def test_option_that_was_on_before_may_be_turned_on_again():
    optimizer = stepped(ADAM, amsgrad=True)
    set_option([optimizer], OptionChange(0, 0, "amsgrad", False))
    check_options([optimizer], [OptionChange(0, 0, "amsgrad", True)])


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
    with pytest.raises(ProtocolError, match=what):
        check_options(optimizers, [option])
    for use in (group_of, set_option):
        with pytest.raises(ProtocolError, match=what):
            use(optimizers, option)
    assert known.changed() == []


def test_unknown_option_is_refused(optimizers):
    with pytest.raises(ProtocolError, match="group 0 has no option 'own'; add it before"):
        check_options(optimizers, [OptionChange(0, 0, "own", 1.0)])


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


# --------------------------------------------------------------------------------- after a resume


def test_options_that_the_script_has_changed_since_the_run_began_are_named(optimizers):
    script = all_options(optimizers)
    assert ignored_changes(script, script, optimizers) == ""
    other = {"lr": 0.5, "betas": (0.5, 0.75), "initial_lr": 0.5}
    first = [
        OptionChange(o.optimizer, o.group, o.name, other.get(o.name, o.value))
        if (o.optimizer, o.group) == (0, 1)
        else o
        for o in script
    ]
    optimizers[0].param_groups[1]["lr"] = 0.25  # from the checkpoint
    optimizers[0].param_groups[1]["betas"] = (0.5, 0.75)
    assert ignored_changes(script, first, optimizers) == (
        "the script has lr=0.2, betas=(0.9, 0.99), but the run continues with lr=0.25, "
        "betas=(0.5, 0.75) from its checkpoint; to change it, set "
        "optimizer.param_groups[1]['lr'] after run.prepare()"
    )


def test_option_that_the_run_has_changed_itself_is_not_named(optimizers):
    script = all_options(optimizers)
    optimizers[0].param_groups[0]["lr"] = 0.25  # by a scheduler or by hand
    assert ignored_changes(script, script, optimizers) == ""
