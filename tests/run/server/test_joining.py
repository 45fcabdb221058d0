# SPDX-License-Identifier: BSD-3-Clause
"""Joining with a reserved number; test_other_servers.py and test_server_churn.py have the rest."""

import pytest

from paceline.release import RELEASE
from paceline.run.net import messages
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from server_harness import serve

ONE = Settings(spec=RunSpec(workers=1, steps=1), checkpoint_every="0")


def reserve(harness, seat, wanted=None):
    """Reserve a number; return it and the connection that holds it."""
    launcher = harness.connect()
    launcher.send(messages.ReserveNumber(seat, RELEASE, wanted))
    return launcher.receive().number, launcher


def finish(worker):
    assignment = worker.receive_assignment()
    worker.send(worker.gradient(assignment, *worker.parameters.parameters[0]))
    assert isinstance(worker.receive_assignment(), messages.RunEnded)


def test_reserved_number_is_for_the_worker_of_that_seat(tmp_path, capsys):
    def play(harness):
        number, _ = reserve(harness, b"mine")
        assert number == 0
        other = harness.connect()
        other.send(messages.Join(0, RELEASE, harness.spec, seat=b"other"))
        assert "there is already a worker 0" in other.wait_closed()
        finish(harness.connect().join(0, harness.spec, seat=b"mine"))

    assert serve(play, tmp_path, ONE, alone=True).failure == ""


@pytest.mark.parametrize("has_joined", [False, True])
def test_number_is_free_when_its_launcher_and_worker_are_gone(tmp_path, has_joined):
    def play(harness):
        _, launcher = reserve(harness, b"gone")
        if has_joined:
            harness.connect().join(0, harness.spec, seat=b"gone").close()
        launcher.close()
        number, waits = reserve(harness, b"next", wanted=0)
        while number:  # the server may notice it later than it gets this
            waits.close()
            number, waits = reserve(harness, b"next", wanted=0)
        finish(harness.connect().join(0, harness.spec, seat=b"next"))

    assert serve(play, tmp_path, ONE, alone=True).failure == ""


def test_launcher_of_another_release_is_told_why_it_is_refused(tmp_path):
    def play(harness):
        launcher = harness.connect()
        launcher.send(messages.ReserveNumber(b"seat", "0.0.0"))
        assert launcher.wait_closed() == f"expected Paceline {RELEASE} in a worker, got 0.0.0"
        finish(harness.connect().join(0, harness.spec))

    assert serve(play, tmp_path, ONE, alone=True).failure == ""
