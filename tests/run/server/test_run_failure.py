# SPDX-License-Identifier: BSD-3-Clause
"""A run fails for its first reason, or because all its gradients are refused."""

from paceline.run.server.run_failure import NON_FINITE_MAX, SKIPPED_MAX, RunFailure
from paceline.run.server.timers import ASLEEP_S
from paceline.run.settings import Settings
from paceline.spec import RunSpec


def test_run_does_not_fail_by_itself():
    assert RunFailure().failure == ""


def test_run_of_refused_gradients_fails_unless_an_update_interrupts_them():
    failures = RunFailure()
    for _ in range(2):
        for _ in range(3 * NON_FINITE_MAX - 1):
            failures.count_refusal(workers=3)
        assert failures.failure == ""
        failures.count_step()
    for _ in range(3 * NON_FINITE_MAX):
        failures.count_refusal(workers=3)
    assert failures.failure.startswith("the last 300 gradients all contained NaN or infinity")


def test_refusals_count_even_if_their_worker_has_left():
    failures = RunFailure()
    for _ in range(NON_FINITE_MAX):
        failures.count_refusal(workers=0)
    assert failures.failure.startswith("the last 100 gradients")


def test_run_fails_after_many_updates_in_a_row_without_a_step():
    failures = RunFailure()
    for _ in range(2):
        for _ in range(SKIPPED_MAX - 1):
            failures.count_skipped()
        assert failures.failure == ""
        failures.count_step()
    for _ in range(SKIPPED_MAX):
        failures.count_skipped()
    assert failures.failure.startswith("the last 100 updates did not step")


def test_update_without_a_step_does_not_interrupt_refused_gradients():
    failures = RunFailure()
    for _ in range(NON_FINITE_MAX - 1):
        failures.count_refusal(workers=1)
    failures.count_skipped()
    failures.count_refusal(workers=1)
    assert failures.failure.startswith("the last 100 gradients all contained NaN")


def test_only_time_in_the_current_pause_counts():
    failures = RunFailure()
    settings = Settings(spec=RunSpec(workers=3, min_workers=2), patience_s=5.0)
    for now, is_stuck in [(1.0, False), (2.0, True), (6.0, True), (7.0, False), (8.0, True)]:
        failures.check_patience(settings, is_stuck, here=1, now=now)
        assert failures.failure == ""
    failures.check_patience(settings, is_stuck=True, here=1, now=13.0)
    assert failures.failure == "only 1 of at least 2 workers were here for 5 s"


def test_time_in_which_the_machine_was_suspended_does_not_count():
    failures = RunFailure()
    settings = Settings(spec=RunSpec(workers=3, min_workers=2), patience_s=2 * ASLEEP_S)
    for now in (1.0, 2.0, 10_000.0):
        failures.check_patience(settings, is_stuck=True, here=1, now=now)
    assert failures.failure == ""


def test_first_failure_counts():
    failures = RunFailure()
    failures.fail("one")
    failures.fail("two")
    assert failures.failure == "one"
