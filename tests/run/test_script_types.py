# SPDX-License-Identifier: BSD-3-Clause
"""What a type checker knows about `run.prepare()`."""

import re
from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[2]

SCRIPT = """
import paceline
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
batches: DataLoader[Tensor] = DataLoader(torch.ones(8, 2))  # type: ignore[arg-type]
run = paceline.join()
reveal_type(run)
reveal_type(run.prepare(optimizer))
reveal_type(run.prepare(model, optimizer))
reveal_type(run.prepare(model, optimizer, scheduler, batches))
reveal_type(run.prepare(model, model, optimizer, optimizer, scheduler, batches))
reveal_type(run.prepare(model, model, model, optimizer, optimizer, scheduler, batches))
first, second, third = run.prepare(model, optimizer)
run.prepare()
"""

LINEAR = "torch.nn.modules.linear.Linear"
SGD = "torch.optim.sgd.SGD"
STEP_LR = "torch.optim.lr_scheduler.StepLR"
LOADER = "torch.utils.data.dataloader.DataLoader[torch._tensor.Tensor]"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What mypy says about the script."""
    path = tmp_path_factory.mktemp("types") / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    # The project's own cache, if there is one, saves half a minute for torch.
    options = ("--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache")
    out, err, _ = api.run([*map(str, options), str(path)])
    assert err == ""
    return out


def test_objects_come_back_with_their_own_types_in_their_order(said: str) -> None:
    revealed = re.findall(r'Revealed type is "(.*)"', said)
    assert revealed == [
        "paceline.run.script.Run",
        SGD,
        f"tuple[{LINEAR}, {SGD}]",
        f"tuple[{LINEAR}, {SGD}, {STEP_LR}, {LOADER}]",
        f"tuple[{LINEAR}, {LINEAR}, {SGD}, {SGD}, {STEP_LR}, {LOADER}]",
        f"tuple[{LINEAR}, {LINEAR}, {LINEAR}, {SGD}, {SGD}, {STEP_LR}, {LOADER}]",
    ]


def test_unpacking_into_too_many_names_is_a_type_error(said: str) -> None:
    assert "Need more than 2 values to unpack (3 expected)" in said


def test_preparing_nothing_is_a_type_error(said: str) -> None:
    assert 'All overload variants of "prepare" of "Run" require at least one argument' in said
    assert said.count("error: ") == 2
