# SPDX-License-Identifier: BSD-3-Clause
"""Where a process finds how many workers its run has; test_serve.py asks over TLS."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import SpecError
from paceline.run.launch.environment import Identity
from paceline.run.net import messages
from paceline.run.server.run_size import workers_of
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from server_harness import TOKEN, serve

ELSEWHERE = Identity("tcp:10.0.0.5:29400", Path("token"), Path(), 1)


def test_launcher_has_told_it():
    assert workers_of(replace(ELSEWHERE, workers=7)) == 7


@pytest.mark.parametrize("worker", [None, 3])
def test_folder_of_the_run_has_it(tmp_path, worker):
    Settings(spec=RunSpec(workers=5)).write(tmp_path / "spec.json")
    assert workers_of(Identity("unix:@a", tmp_path / "token", tmp_path, worker)) == 5


def test_first_server_never_asks_another_one():
    with pytest.raises(SpecError, match=r"cannot read spec\.json"):
        workers_of(replace(ELSEWHERE, worker=None))


@pytest.mark.parametrize("who", [{"worker": 1}, {"worker": None, "server": 1}])
def test_process_on_another_host_asks_the_head(tmp_path, who):
    (tmp_path / "token").write_text(TOKEN)
    answers = []

    def play(harness):
        asking = Identity(harness.address, tmp_path / "token", Path(), **who)
        answers.append(workers_of(asking))
        peer = harness.connect().join(0, harness.spec)
        assignment = peer.receive_assignment()
        peer.send(peer.gradient(assignment, *peer.parameters.parameters[0]))
        assert isinstance(peer.receive_assignment(), messages.RunEnded)

    settings = Settings(spec=RunSpec(workers=1, steps=1), checkpoint_every="0")
    assert serve(play, tmp_path, settings, alone=True).failure == ""
    assert answers == [1]
