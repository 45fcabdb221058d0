# SPDX-License-Identifier: BSD-3-Clause
"""What `run.prepare()` accepts: sorted by kind, and checked."""

import pytest
import torch
import torch._dynamo  # optimizers import it, and it sets an environment variable
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from paceline.errors import SpecError
from paceline.run.prepare_arguments import Prepared

MODEL = nn.Linear(2, 1)
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)
SCHEDULER = StepLR(SGD, step_size=1)
PLATEAU = ReduceLROnPlateau(SGD)
LOADER = DataLoader(range(4))


def test_objects_are_sorted_by_kind_in_their_order():
    other, batches = nn.Linear(1, 1), [torch.ones(2)]
    given = (LOADER, other, SCHEDULER, MODEL, PLATEAU, batches, SGD, range(3))
    prepared = Prepared.sort(given)
    assert prepared.given == given
    assert prepared.models == [other, MODEL]
    assert prepared.optimizers == [SGD]
    assert prepared.schedulers == [SCHEDULER, PLATEAU]
    assert prepared.loaders == [LOADER, batches, range(3)]
    prepared.check()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([3.0], "takes models, optimizers, schedulers and loaders, got float"),
        (["text"], "got str"),
        ([b"bytes"], "got bytes"),
        ([[MODEL], SGD], "one by one, not in lists"),
        ([MODEL, (SGD,)], "one by one, not in lists"),
        ([MODEL, SCHEDULER], "StepLR was passed to run.prepare() without its optimizer"),
    ],
    ids=["number", "text", "bytes", "models", "optimizers", "scheduler"],
)
def test_object_that_a_run_cannot_use_is_refused(given, message):
    with pytest.raises(SpecError) as caught:
        Prepared.sort(given)
    assert message in str(caught.value)


def test_run_needs_an_optimizer():
    with pytest.raises(SpecError, match="needs at least one optimizer, got none"):
        Prepared.sort([MODEL]).check()


def test_optimizer_that_needs_a_closure_is_refused():
    with pytest.raises(SpecError, match="LBFGS needs a closure"):
        Prepared.sort([torch.optim.LBFGS(MODEL.parameters())]).check()
