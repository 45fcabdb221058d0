# SPDX-License-Identifier: BSD-3-Clause
"""A parameter that a script replaces during a run is noticed with the next step."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from paceline.errors import SpecError
from paceline.run.worker.replaced_parameters import ReplacedParameters


@pytest.fixture
def model():
    inner = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    return nn.ModuleDict({"body": inner, "head": nn.Linear(3, 1), "spare": nn.Linear(3, 1)})


def replace_module(model):
    model["body"][0] = nn.Linear(2, 3)


def replace_container(model):
    model["body"] = nn.Sequential(nn.Linear(2, 3))


def replace_parameter(model):
    model["head"].weight = nn.Parameter(torch.zeros(1, 3))


REPLACED = {
    replace_module: "body.0.weight",
    replace_container: "body.0.weight",
    replace_parameter: "head.weight",
}


@pytest.mark.parametrize("replace", REPLACED)
def test_replaced_parameter_is_named(model, replace):
    replaced = ReplacedParameters([model], list(model.parameters()))
    replaced.check()
    replace(model)
    with pytest.raises(SpecError, match=rf"parameter '{REPLACED[replace]}' was replaced after"):
        replaced.check()


def remove_module(model):
    del model["spare"]


def replace_what_has_no_parameters(model):
    model["body"][1] = nn.GELU()


def move_module(model):
    model["head"], model["spare"] = model["spare"], model["head"]


def prune_module(model):
    prune.l1_unstructured(model["head"], "weight", amount=1)


@pytest.mark.parametrize(
    "change", [remove_module, replace_what_has_no_parameters, move_module, prune_module]
)
def test_other_changes_are_allowed(model, change):
    replaced = ReplacedParameters([model], list(model.parameters()))
    change(model)
    replaced.check()
    replace_module(model)
    with pytest.raises(SpecError, match=r"parameter 'body\.0\.weight'"):
        replaced.check()
