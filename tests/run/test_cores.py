# SPDX-License-Identifier: BSD-3-Clause
"""The cores that a run may use: those of the affinity, and fewer if a control group limits them."""

import os

import pytest

from paceline.run.cores import available_cores, threads_of


@pytest.fixture
def limited(tmp_path, monkeypatch):
    """Return the cores of a machine with 8, given the limits of control groups by their path."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))

    def cores(own_group, limits):
        (tmp_path / "cgroup").write_text(own_group)
        for path, limit in limits.items():
            group = tmp_path / "groups" / path
            group.mkdir(parents=True, exist_ok=True)
            (group / "cpu.max").write_text(limit)
        return available_cores(tmp_path / "cgroup", tmp_path / "groups")

    return cores


def test_without_control_groups_the_affinity_counts(tmp_path):
    missing = tmp_path / "none"
    assert available_cores(missing, missing) == len(os.sched_getaffinity(0))


def test_real_machine_has_cores():
    assert 0 < available_cores() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("limits", "cores"),
    [
        ({"": "150000 100000\n"}, 1.5),
        ({"a": "200000 100000\n", "a/b": "max 100000\n"}, 2),
        ({"a": "max 100000\n", "a/b": "300000 100000\n"}, 3),
        ({"a": "200000 100000\n", "a/b": "100000 100000\n"}, 1),
        ({"a/b": "9900000 100000\n"}, 8),
        ({"other": "100000 100000\n"}, 8),
        ({"a/b": "0 0\n"}, 8),
        ({"a/b": "nonsense\n"}, 8),
        ({}, 8),
    ],
)
def test_smallest_limit_of_a_group_and_those_around_it_counts(limits, cores, limited):
    assert limited("0::/a/b\n", limits) == cores


def test_older_control_groups_are_ignored(limited):
    assert limited("4:cpu:/a\n", {"a": "100000 100000\n"}) == 8


def test_processes_share_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = int(available_cores())
    assert threads_of(1) == max(1, cores)
    assert threads_of(64 * cores) == 1


@pytest.mark.parametrize(("chosen", "threads"), [("1", 1), ("3", 3), (" 4,2", 4)])
def test_users_choose_the_threads(chosen, threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    assert threads_of(1) == threads_of(64) == threads


@pytest.mark.parametrize("chosen", ["", "0", "-1", "many"])
def test_what_openmp_ignores_is_ignored(chosen, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    assert threads_of(64) == 1
