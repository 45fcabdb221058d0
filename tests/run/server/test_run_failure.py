# SPDX-License-Identifier: BSD-3-Clause
"""A run fails for its first reason, or because all its gradients are refused."""

from paceline.run.server.run_failure import NON_FINITE_MAX, SKIPPED_MAX, RunFailure


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
    assert failures.count_pause(is_stuck=False, now=1.0) < 0
    assert failures.count_pause(is_stuck=True, now=2.0) == 0
    assert failures.count_pause(is_stuck=True, now=5.0) == 3
    assert failures.count_pause(is_stuck=False, now=6.0) < 0
    assert failures.count_pause(is_stuck=True, now=7.0) == 0


def test_first_failure_counts():
    failures = RunFailure()
    failures.fail("one")
    failures.fail("two")
    assert failures.failure == "one"
