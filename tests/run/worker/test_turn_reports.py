# SPDX-License-Identifier: BSD-3-Clause
"""A report says what was computed, or that it is no longer wanted, and what it cost."""

import pytest
import torch

from paceline.leases import Use
from paceline.run.net import messages
from paceline.run.tensors.state_spec import OptionChange
from paceline.run.worker.batches import Batch
from paceline.run.worker.optimizer_sync import SettingChanges
from scripted_server import ScriptedServer

CHANGES = SettingChanges((OptionChange(0, 0, "lr", 0.5),))
TURN = messages.Assignment(4, 3, 0, (), 0.0)


@pytest.fixture
def server():
    """A server whose worker has computed a gradient."""
    server = ScriptedServer()
    server.begin(leases=(Use(0, (7,)),))
    server.worker.batches.take(0, Batch("x", 4, number=server.worker.leases.take(0)))
    server.optimizer.zero_grad()
    server.loss().backward()
    server.worker.batches.hand_in(0)
    return server


def reports_of(server):
    return server.worker._reports


def test_gradient_is_described_by_its_turn_norm_and_settings(server):
    server.worker.log({"loss": 2.5})
    report = reports_of(server).of_gradient(TURN, 0, CHANGES)
    norm = float(sum(p.grad.square().sum() for p in server.model.parameters()))
    assert (report.turn, report.version, report.optimizer) == (4, 3, 0)
    assert report.sq_norm == pytest.approx(norm)
    assert (report.options, report.scalars) == (CHANGES.options, {"loss": 2.5})
    assert not report.cancelled
    assert (report.samples, report.new_samples) == (4, 4)
    assert (report.uses, report.pulled) == ((Use(0, (7,)),), (1,))
    assert report.compute_s >= 0


def test_gradient_that_is_not_finite_has_no_norm(server):
    with torch.no_grad():
        server._slot.parameters[0][0].fill_(float("nan"))
        for parameter in server.model.parameters():
            parameter.grad.fill_(float("nan"))
    assert reports_of(server).of_gradient(TURN, 0, CHANGES).sq_norm is None


def test_complete_gradient_that_is_not_wanted_is_reported_as_cancelled(server):
    report = reports_of(server).of_worthless(TURN, 0, CHANGES, is_cut=False)
    assert isinstance(report, messages.GradientReport)
    assert (report.turn, report.version, report.cancelled) == (4, 3, True)
    assert (report.sq_norm, report.uses, report.scalars) == (None, (), {})
    assert report.options == CHANGES.options


def test_incomplete_gradient_is_reported_as_abandoned(server):
    report = reports_of(server).of_worthless(TURN, 0, CHANGES, is_cut=True)
    assert isinstance(report, messages.AbandonReport)
    assert (report.turn, report.version, report.optimizer) == (4, 3, 0)
    assert (report.options, report.pulled) == (CHANGES.options, (1,))


def test_gradient_whose_delay_is_not_over_is_reported_as_abandoned(server):
    slow = reports_of(server)._replace(clock=_Unfinished())
    assert isinstance(slow.of_worthless(TURN, 0, CHANGES, is_cut=False), messages.AbandonReport)


class _Unfinished:
    """The clock of a turn whose injected delay isn't over."""

    elapsed_s, remaining_s = 1.0, 2.0

    def read_cpu_s(self):
        return 0.5
