# SPDX-License-Identifier: BSD-3-Clause
"""A server that cannot listen where it should touches nothing: the run may be another's."""

import os
import secrets

import pytest
import torch
import torch._dynamo  # an optimizer loads it, and it sets a variable of the environment
from torch import nn

from paceline.errors import SpecError
from paceline.run.launch.environment import Identity
from paceline.run.net.channel import listen, new_token
from paceline.run.script import ServerRun
from paceline.run.settings import Settings
from paceline.spec import RunSpec


@pytest.fixture
def identity(tmp_path):
    """A server that is to serve the run in a folder, in which another one is just writing."""
    Settings(spec=RunSpec(workers=1, steps=3)).write(tmp_path / "spec.json")
    (tmp_path / "token").write_text(new_token())
    (tmp_path / "trace.jsonl").write_text('{"type":"header"}\n{"type":"jo')
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "0000000003.ckpt").write_text("it seems to be torn")
    (tmp_path / "checkpoints" / "0000000004.partial").write_text("half of it")
    address = f"unix:@paceline-test-{secrets.token_hex(8)}"
    return Identity(address, tmp_path / "token", tmp_path, None)


@pytest.fixture(autouse=True)
def _threads_are_as_they_were():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def start(identity):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ServerRun(identity).prepare(model, optimizer)


def test_a_second_server_ends_and_changes_nothing(identity):
    before = files(identity.run_dir)
    with (
        listen(identity.address),
        pytest.raises(SpecError, match=f"cannot listen at {identity.address}: Address already"),
    ):
        start(identity)
    assert files(identity.run_dir) == before


@pytest.mark.parametrize("trace", ["there", "not there"])
def test_a_server_that_has_no_address_changes_nothing(identity, trace):
    if trace == "not there":
        (identity.run_dir / "trace.jsonl").unlink()
    before = files(identity.run_dir)
    nowhere = f"unix:{identity.run_dir}/nowhere/server"
    with pytest.raises(SpecError, match=r"cannot listen at .*: No such file"):
        start(Identity(nowhere, identity.token_file, identity.run_dir, None))
    assert files(identity.run_dir) == before


def test_a_server_without_a_token_changes_nothing(identity):
    os.truncate(identity.token_file, 0)
    before = files(identity.run_dir)
    with pytest.raises(SpecError, match="token"):
        start(identity)
    assert files(identity.run_dir) == before
