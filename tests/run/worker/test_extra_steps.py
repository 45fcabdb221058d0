# SPDX-License-Identifier: BSD-3-Clause
"""Steps after the end of a run: the first does nothing, the second ends the script."""

import pytest

from paceline.run.worker.extra_steps import ExtraSteps, LoopEnded


def test_second_extra_step_of_an_optimizer_ends_the_script_with_exit_code_0(capsys):
    steps = ExtraSteps()
    steps.count(0, version=7)
    with pytest.raises(LoopEnded) as end:
        steps.count(0, version=7)
    assert end.value.code == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("the run ended at update 7")
    assert "run.finished" in err


def test_each_optimizer_has_its_own_first_extra_step(capsys):
    """As in a GAN, which steps both of them in the iteration in which the run ends."""
    steps = ExtraSteps()
    for optimizer in (1, 0, 2):
        steps.count(optimizer, version=7)
    assert capsys.readouterr().err == ""
    with pytest.raises(LoopEnded):
        steps.count(1, version=7)


def test_script_that_catches_exceptions_does_not_catch_its_end():
    assert issubclass(LoopEnded, SystemExit)
