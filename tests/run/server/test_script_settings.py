# SPDX-License-Identifier: BSD-3-Clause
"""What a script does to options and schedulers reaches the server's optimizers and all workers."""

import pytest

from executor_bench import ExecutorBench
from paceline.core.events import SendParams
from paceline.errors import ProtocolError
from paceline.run.net import messages
from paceline.run.settings import Settings
from paceline.run.tensors.state_spec import OptionChange, SchedulerCalls
from paceline.spec import RunSpec


@pytest.fixture
def bench(tmp_path):
    settings = Settings(spec=RunSpec(workers=2, steps=100), checkpoint_every="0")
    return ExecutorBench(settings, tmp_path)


def test_new_worker_gets_all_options_and_later_only_the_changed_ones(bench):
    bench.join(0)
    bench.perform(SendParams(0, 1, 0))
    [first] = bench.inbox(0)
    assert OptionChange(0, 0, "lr", 0.5) in first.options
    assert len(first.options) > 1
    bench.perform(SendParams(0, 2, 0))
    assert [message.options for message in bench.inbox(0)] == [()]
    bench.executor.script_settings.set_options((OptionChange(0, 0, "lr", 0.25),), 0)
    bench.optimizer.param_groups[0]["lr"] = 0.125  # by a scheduler
    bench.perform(SendParams(0, 3, 0))
    assert bench.inbox(0)[0].options == (OptionChange(0, 0, "lr", 0.125),)


def test_option_of_an_older_version_does_not_replace_a_newer_one(bench):
    bench.executor.script_settings.set_options((OptionChange(0, 0, "lr", 0.25),), 3)
    bench.executor.script_settings.set_options((OptionChange(0, 0, "lr", 0.75),), 2)
    assert bench.optimizer.param_groups[0]["lr"] == 0.25


def test_scheduler_that_a_script_has_called_steps_and_says_once_what_it_follows(bench, capsys):
    bench.join(0)
    bench.call_scheduler("epoch")
    bench.call_scheduler("epoch")
    assert bench.optimizer.param_groups[0]["lr"] == 0.25
    assert capsys.readouterr().out == "ExponentialLR: one step per epoch\n"
    bench.perform(SendParams(0, 1, 0))
    assert bench.inbox(0)[0].scheduler_steps == (1,)


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # this scheduler takes no metric
def test_rate_that_a_metric_has_changed_is_sent_to_workers(bench):
    bench.join(0)
    bench.perform(SendParams(0, 1, 0))
    bench.inbox(0)
    bench.call_scheduler("metric", metrics=(0.5,))
    bench.perform(SendParams(0, 2, 0))
    assert (
        OptionChange(0, 0, "lr", bench.optimizer.param_groups[0]["lr"]) in bench.inbox(0)[0].options
    )


def test_scheduler_that_fails_ends_the_run(bench, monkeypatch, capsys):
    bench.join(0)
    monkeypatch.setattr(bench.scheduler, "get_lr", lambda: 1 / 0)
    bench.call_scheduler("epoch")
    assert bench.parts.failures.failure.startswith("a scheduler failed: ZeroDivisionError")
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"options": (OptionChange(0, 9, "lr", 0.1),)}, "no such parameter group"),
        ({"optimizer": 1}, "there is no optimizer 1"),
        ({"schedulers": (SchedulerCalls(1, "epoch", 1),)}, "there is no scheduler 1"),
        (
            {"schedulers": (SchedulerCalls(0, "given", 1, epoch=float("nan")),)},
            "needs a finite epoch",
        ),
        ({"options": (OptionChange(0, 0, "lr", "0.1"),)}, "lr of parameter group 0 must be"),
        ({"options": (OptionChange(0, 0, "lr", float("nan")),)}, "must be a finite number"),
        ({"options": (OptionChange(0, 0, "own", 1.0),)}, "has no option 'own'"),
    ],
)
def test_setting_of_something_unknown_or_impossible_is_refused(bench, fields, what):
    with pytest.raises(ProtocolError, match=what):
        bench.executor.script_settings.check(messages.AbandonReport(1, 0.0, **fields))
