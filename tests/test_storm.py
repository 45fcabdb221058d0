# SPDX-License-Identifier: BSD-3-Clause
"""No simulated disaster breaks a law; `make storm` runs more of them than these."""

import gc
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch._dynamo  # optimizers import it, and it sets an environment variable

import storm
from paceline.run.server.server import Server
from paceline.run.settings import Settings
from paceline.run.tensors.shard import Shard
from paceline.run.worker.worker import Worker
from paceline.spec import RunSpec
from storm.liar import LIES
from storm.scenario import (
    DISK_FAULTS,
    NOTICE_FAULTS,
    OTHER_SERVER_FAULTS,
    RUN_FAULTS,
    SERVER_FAULTS,
    WORKER_FAULTS,
    Fault,
    Scenario,
    make_scenario,
)
from storm.script import ScriptFault
from storm.shrink import shrink
from storm.storm import Outcome, run_storm
from storm.world import World

assert torch._dynamo

STORMS = 200
BLOCK = 50
PARTS = 8  # that the points of a server's life are divided into


@pytest.mark.parametrize("first", range(0, STORMS, BLOCK))
def test_no_law_is_broken(first):
    planned = happened = 0
    for seed in range(first, first + BLOCK):
        outcome = run_storm(make_scenario(seed))
        assert outcome.violation == "", f"repeat it with: make storm SEED={seed}"
        planned += outcome.scenario.fault_count
        happened += outcome.faults
    assert happened > planned * 0.6  # a fault that comes too late tests nothing


def test_every_kind_of_fault_is_planned():
    planned = {fault.kind for seed in range(1000) for fault in make_scenario(seed).faults}
    assert planned == {
        *(*WORKER_FAULTS, *NOTICE_FAULTS, *SERVER_FAULTS, *OTHER_SERVER_FAULTS),
        *(*DISK_FAULTS, *RUN_FAULTS),
    }


def test_same_seed_gives_the_same_story():
    scenario = stormy()
    first, second = run_storm(scenario), run_storm(scenario)
    assert len(first.story) > 10
    assert first.story == second.story
    assert (first.steps, first.virtual_s) == (second.steps, second.virtual_s)


def test_story_is_the_same_in_another_process():
    outcome = run_storm(stormy())
    command = [sys.executable, str(Path(storm.__file__).parent), "--seed", str(stormy().seed)]
    environ = {**os.environ, "PYTHONHASHSEED": "1"}
    found = subprocess.run(
        [*command, "--story"], capture_output=True, text=True, check=False, env=environ
    )
    assert "\n".join(outcome.story) in found.stdout


def stormy():
    """Return a scenario with several faults."""
    return next(s for s in map(make_scenario, range(100)) if s.fault_count >= 4)


def test_other_seed_gives_another_order():
    scenario = calm(steps=4)
    stories = [run_storm(replace(scenario, seed=seed)) for seed in range(2)]
    assert stories[0].virtual_s != stories[1].virtual_s


def calm(steps, policy="sync", checkpoint_every="1"):
    """Return a scenario without faults."""
    settings = Settings(
        spec=RunSpec(workers=2, steps=steps), policy=policy, checkpoint_every=checkpoint_every
    )
    return Scenario(0, settings, epochs=2, batch_size=5, compute_s=0.01, delay_max_s=0.001)


def test_calm_run_reaches_its_goal():
    outcome = run_storm(calm(steps=4))
    assert (outcome.violation, outcome.codes, outcome.version) == ("", [0], 4)


def test_stop_does_not_prolong_the_grace_period():
    scenario = calm(steps=4, policy="backup:1")
    hang, stop = ScriptFault(worker=1, step=1, kind="hang"), Fault(55.0, "terminate")
    outcome = run_storm(replace(scenario, script_faults=(hang,), faults=(stop,)))
    assert outcome.violation == ""
    assert any("stopping;" in line for line in outcome.story)
    assert outcome.virtual_s < scenario.settings.grace_s + 1.0


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_liars_do_no_harm(policy):
    for number, lie in enumerate(LIES):
        fault = Fault(0.03, "liar", worker=50, point=number)
        scenario = replace(calm(steps=20, policy=policy), epochs=20, faults=(fault,))
        outcome = run_storm(scenario)
        assert (outcome.violation, outcome.codes, outcome.version) == ("", [0], 20), lie
        assert any(f"lies: {lie}" in line or "refused" in line for line in outcome.story), lie


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("policy", ["sync", "async"])
def test_server_may_be_killed_at_every_point(part, policy):
    """At every wait, message and write of its life, the run still reaches its goal."""
    scenario = calm(steps=2, policy=policy)
    killed = torn = 0
    for point in count(part + 1, PARTS):
        fault = Fault(0.0, "kill server at a point", point=point)
        outcome = run_storm(replace(scenario, faults=(fault,)))
        assert outcome.violation == "", f"killed at point {point}"
        if not outcome.faults:
            break  # its life had fewer points
        killed += 1
        torn += outcome.torn_writes
    assert killed > 10
    assert torn > 0  # it was also killed while it wrote


@pytest.mark.parametrize("first", [90, 150, 210])
@pytest.mark.parametrize("policy", ["sync", "async"])
def test_server_that_restores_a_run_may_be_killed(first, policy):
    """At any point of its life, which begins at a different version each time."""
    scenario = calm(steps=3, policy=policy)
    killed = 0
    for second in range(1, 300, 23):
        faults = (
            Fault(0.0, "kill server at a point", point=first),
            Fault(0.0, "kill next server at a point", point=second),
        )
        outcome = run_storm(replace(scenario, faults=faults))
        assert outcome.violation == "", f"killed at points {first} and {second}"
        if outcome.faults < len(faults):
            break  # the life of the second one had fewer points
        killed += 1
    assert killed > 3


def test_server_frees_the_slots_of_dead_workers():
    """It does so at once: storms run without garbage collection, and check it at every wait."""
    kills = tuple(Fault(0.6 * i, "kill worker", worker=i % 2) for i in range(1, 9))
    scenario = replace(calm(steps=60), epochs=20, compute_s=0.2, faults=kills)
    outcome = run_storm(scenario)
    assert (outcome.violation, outcome.version) == ("", 60)
    assert sum("exits with -9" in line for line in outcome.story) > 4


def says(outcome, text):
    """Return whether a line of the story has this text."""
    return any(text in line for line in outcome.story)


def test_server_that_takes_a_minute_to_save_is_not_replaced():
    outcome = run_storm(replace(calm(steps=4), faults=(Fault(0.0, "very slow disk", lasts_s=9.0),)))
    assert (outcome.violation, outcome.codes) == ("", [0])
    assert outcome.virtual_s > 40
    assert not says(outcome, "killing it")


def test_server_in_a_dead_lock_is_replaced():
    outcome = run_storm(replace(calm(steps=4), faults=(Fault(0.01, "lock server"),)))
    assert (outcome.violation, outcome.codes, outcome.faults) == ("", [0], 1)
    assert says(outcome, "server has neither answered nor used the processor for 30 s; killing it")


def test_second_signal_ends_the_run_at_once():
    scenario = replace(
        calm(steps=4),
        faults=(Fault(1.0, "terminate twice", lasts_s=3.0),),
        script_faults=(ScriptFault(1, 2, "hang"),),
    )
    outcome = run_storm(scenario)
    assert (outcome.violation, outcome.codes) == ("", [128 + signal.SIGINT, 0])
    assert outcome.virtual_s < 6


def test_worker_that_leaves_with_notice_is_not_waited_for():
    scenario = replace(calm(steps=9), faults=(Fault(0.01, "notice worker", worker=1),))
    outcome = run_storm(scenario)
    assert (outcome.violation, outcome.codes, outcome.version) == ("", [0], 9)
    assert says(outcome, "worker 1 left: with notice")
    assert not says(outcome, "restarting")


def test_crash_of_a_script_ends_the_run():
    outcome = run_storm(replace(calm(steps=4), faults=(Fault(0.01, "crash worker"),)))
    assert (outcome.violation, outcome.codes) == ("", [1])
    assert says(outcome, "worker 0 was killed by SIGSEGV; ending the run")


def parts_in_memory():
    """Count what other tests, too, may have left in this process."""
    gc.collect()
    parts = (World, Server, Worker, Shard)
    return Counter(type(one) for one in gc.get_objects() if type(one) in parts)


def test_storms_leave_nothing_behind():
    """Simulated processes end without freeing anything, as real ones do; so cycles are collected.

    Only then does nothing refer to them.
    """
    before, descriptors = parts_in_memory(), len(os.listdir("/proc/self/fd"))
    for policy in ("sync", "async"):
        run_storm(calm(steps=4, policy=policy))
    assert len(os.listdir("/proc/self/fd")) == descriptors
    for seed in range(5):
        run_storm(make_scenario(seed))
    assert parts_in_memory() - before == Counter()


def test_failing_storm_is_shrunk_to_the_faults_that_it_needs():
    faults = tuple(Fault(float(at), "kill worker") for at in range(5))
    scenario = replace(calm(steps=3), faults=faults)

    def run(scenario):
        needed = {1.0, 3.0} <= {fault.at_s for fault in scenario.faults}
        return Outcome(scenario, violation="too many kills" if needed else "")

    kept, outcome = shrink(scenario, run)
    assert kept == [1, 3]
    assert [fault.at_s for fault in outcome.scenario.faults] == [1.0, 3.0]


def test_storm_is_shrunk_only_as_long_as_it_breaks_the_same_law():
    scenario = replace(calm(steps=3), faults=(Fault(0.0, "kill worker"), Fault(1.0, "kill server")))

    def run(scenario):
        count = len(scenario.faults)
        law = "update 7 is lost" if count == 2 else "the run took 9 s"
        return Outcome(scenario, violation=law)

    assert shrink(scenario, run).kept == [0, 1]
