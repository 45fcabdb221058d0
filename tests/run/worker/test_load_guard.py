# SPDX-License-Identifier: BSD-3-Clause
"""Loading weights into a model of a run is noticed, and the model itself is left as it is."""

import copy

import pytest
import torch
from torch import nn

from paceline.errors import SpecError
from paceline.run.worker.load_guard import guard_loading


class Guarded:
    """A model under guard until the run is over."""

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.is_over = False
        guard_loading([self.model], self.check)

    def check(self):
        if not self.is_over:
            raise SpecError("the run isn't over")


@pytest.fixture
def guarded(monkeypatch):
    monkeypatch.setattr(nn.Module, "load_state_dict", nn.Module.load_state_dict)  # restored later
    return Guarded()


@pytest.mark.parametrize(
    "select",
    [lambda model: model, lambda model: model[0], nn.Sequential],
    ids=["model", "part", "parent"],
)
def test_loading_is_refused_until_the_guard_allows_it(guarded, select):
    module = select(guarded.model)
    state = {name: torch.ones_like(value) for name, value in module.state_dict().items()}
    with pytest.raises(SpecError, match="the run isn't over"):
        module.load_state_dict(state)
    guarded.is_over = True
    module.load_state_dict(state)
    assert guarded.model[0].weight.eq(1).all()


def test_copies_and_other_models_may_load(guarded):
    for other in (copy.deepcopy(guarded.model), nn.Sequential(nn.Linear(2, 2))):
        other.load_state_dict(guarded.model.state_dict(), strict=False)
        torch.testing.assert_close(other[0].weight, guarded.model[0].weight)


def test_guard_leaves_no_hook_in_the_model(guarded):
    for module in guarded.model.modules():
        assert not module._load_state_dict_pre_hooks
        assert not module._load_state_dict_post_hooks
