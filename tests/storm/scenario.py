# SPDX-License-Identifier: BSD-3-Clause
"""What happens in a storm: the settings of a run and a list of faults, all from one seed.

Each fault is a value with a time, so a scenario can be printed, repeated without some of its
faults, and shrunk. Most faults happen while the run is expected to last: one that comes too late
tests nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from random import Random
from typing import NamedTuple

import msgspec

from paceline.run.settings import Settings
from paceline.spec import RunSpec
from storm.script import SAMPLES, STEPS_PER_EPOCH, STOPS_AT, STYLES, ScriptFault

__all__ = ["Fault", "Scenario", "make_scenario"]

POLICIES = (
    *("sync", "sync", "sync", "backup:1", "backup:1", "batchsync:2", "deadline:0.5"),
    *("async", "softsync:2", "ssp:1", "delayed:1"),
)
LATENCIES = {"": 0.0, "50ms": 0.06, "exp:40ms": 0.07, "20ms + 10% 2s": 0.04}
"""Injected latencies, and by how many seconds a turn usually takes longer with each."""
ASYNCHRONOUS = ("async", "softsync", "ssp")  # rules under which workers share the updates

CHECKPOINTS = ("1", "2", "5", "1s", "4s", "0")

WORKER_FAULTS = (
    *("kill worker", "kill worker", "kill worker", "freeze worker", "freeze worker"),
    *("cut worker", "cut worker", "liar", "liar", "crash worker"),
)
SERVER_FAULTS = (
    *("kill server", "kill server", "kill server at a point", "kill server at a point"),
    *("kill next server at a point", "cut launcher", "freeze server", "lock server"),
)
DISK_FAULTS = ("full disk", "full disk", "slow disk", "slow disk", "very slow disk")
RUN_FAULTS = (
    *("terminate", "terminate twice", "kill launcher", "lose power", "clock leaps"),
    "wall clock jumps",
)
NOTICE_FAULTS = ("notice worker",)
OTHER_SERVER_FAULTS = ("kill other server", "kill other server", "freeze other server")
OTHER_SERVER_SHARE = 0.15  # of all faults, if there are other servers
NOTICE_SHARE = 0.15  # of the faults of workers: their machine is about to go, and says so
LATE = 0.1  # how many faults may happen after the expected end of the run
POINTS = 400  # a server has about so many left in its life; small numbers are more likely
SCRIPT_FAULTS = ("raise", "exit", "nan", "hang")


class Fault(NamedTuple):
    """Something that goes wrong at a time of the run."""

    at_s: float
    kind: str
    worker: int = 0  # if it is about one
    lasts_s: float = 0.0  # if it doesn't last for ever
    point: int = 0  # of a process's life, if it happens at one


@dataclass(frozen=True)
class Scenario:
    """One storm."""

    seed: int
    settings: Settings
    epochs: int  # of the script's loop
    batch_size: int
    compute_s: float
    delay_max_s: float
    style: str = "loader"  # of the script
    faults: tuple[Fault, ...] = ()
    script_faults: tuple[ScriptFault, ...] = ()

    def only(self, kept: list[int]) -> Scenario:
        """Return the scenario with only these of its faults, counted over both lists."""
        count = len(self.faults)
        return replace(
            self,
            faults=tuple(self.faults[i] for i in kept if i < count),
            script_faults=tuple(self.script_faults[i - count] for i in kept if i >= count),
        )

    def has(self, *kinds: str) -> bool:
        """Return whether it has a fault of one of these kinds."""
        found = {fault.kind for fault in (*self.faults, *self.script_faults)}
        return not found.isdisjoint(kinds)

    @property
    def fault_count(self) -> int:
        """How many faults of any kind it has."""
        return len(self.faults) + len(self.script_faults)

    def describe(self) -> list[str]:
        """Return the scenario in words."""
        spec = self.settings.spec
        lines = [
            f"{spec.workers} workers, {self.settings.policy}, {spec.steps} steps, "
            f"late={spec.late}, min_workers={spec.min_workers}, "
            f"checkpoint every {self.settings.checkpoint_every}, "
            f"latency {self.settings.latency!r}, clip {self.settings.clip_norm}, "
            f"ema {self.settings.ema}, requeue {self.settings.requeue}, "
            f"grace {self.settings.grace_s:g} s, restart {self.settings.restart}, "
            f"transport {self.settings.transport}, {self.settings.servers} servers",
            f"{self.style}: {self.epochs} epochs of batches of {self.batch_size}, "
            f"computing up to {self.compute_s} s, messages up to {self.delay_max_s} s",
        ]
        lines += [f"fault {i}: {fault}" for i, fault in enumerate(self.faults)]
        count = len(self.faults)
        return lines + [f"fault {i + count}: {f}" for i, f in enumerate(self.script_faults)]


def make_scenario(seed: int) -> Scenario:
    """Return the scenario of this seed."""
    chance = Random(f"scenario {seed}")
    calm = Scenario(
        seed=seed,
        settings=_settings(chance),
        epochs=chance.randint(1, 3),
        batch_size=chance.choice([2, 3, 5]),
        compute_s=chance.choice([0.0, 0.01, 0.1, 0.5]),
        delay_max_s=chance.choice([0.0, 0.001, 0.02, 0.3]),
        style=chance.choice(["loader", "loader", *STYLES]),
    )
    # Drawn apart from the rest, which stays the same for either.
    transport = Random(f"transport {seed}").choice(["auto", "tcp"])
    servers = Random(f"servers {seed}").choice([1, 2, 2, 3]) if transport == "tcp" else 1
    settings = msgspec.structs.replace(calm.settings, transport=transport, servers=servers)
    calm = replace(calm, settings=settings)
    turns, workers = _turns(calm), calm.settings.spec.workers
    faults = [_fault(chance, calm) for _ in range(chance.choice([0, 1, 1, 2, 2, 3, 4, 6]))]
    script_faults = [
        ScriptFault(
            chance.randrange(workers), chance.randint(1, turns), chance.choice(SCRIPT_FAULTS)
        )
        for _ in range(chance.choice([0, 0, 0, 1, 2]))
    ]
    return replace(calm, faults=tuple(sorted(faults)), script_faults=tuple(script_faults))


def _settings(chance: Random) -> Settings:
    workers = chance.randint(1, 4)
    policy = chance.choice(POLICIES)
    if policy == "backup:1" and workers == 1:
        policy = "sync"
    steps = chance.choice([None, 5, 12, 20, 30])
    return Settings(
        spec=RunSpec(
            workers=workers,
            steps=steps,
            min_workers=chance.choice([1, 1, 1, workers]),
            late=chance.choice(["cancel", "cancel", "finish"]),
            seed=chance.randint(0, 5),
        ),
        policy=policy,
        latency=chance.choice(["", *LATENCIES]),
        clip_norm=chance.choice([None, None, 1.0]),
        ema=chance.choice([None, None, 0.9]),
        requeue=chance.random() < 0.9,
        checkpoint_every=chance.choice(CHECKPOINTS),
        patience_s=chance.choice([2.0, 30.0]),
        grace_s=chance.choice([60.0, 60.0, 5.0, 0.5]),
        restart=chance.random() < 0.85,
        progress=chance.random() < 0.5,
    )


def _turns(calm: Scenario) -> int:
    """Return how many turns each worker probably has."""
    spec, turns = calm.settings.spec, calm.epochs * STEPS_PER_EPOCH
    if calm.style != "no loader":
        turns = calm.epochs * ceil(SAMPLES / calm.batch_size) // spec.workers
    goal = min(spec.steps or turns, STOPS_AT if calm.style == "stops the run" else turns)
    if calm.settings.policy.startswith(ASYNCHRONOUS):
        goal //= spec.workers
    return max(1, min(turns, goal))


def expected_s(calm: Scenario) -> float:
    """Return how long a run without faults probably takes."""
    turn_s = 0.6 * calm.compute_s + LATENCIES[calm.settings.latency] + 0.6 * calm.delay_max_s
    return 0.01 + 1.5 * calm.delay_max_s + _turns(calm) * turn_s


def _fault(chance: Random, calm: Scenario) -> Fault:
    kinds = chance.choice([WORKER_FAULTS, WORKER_FAULTS, SERVER_FAULTS, DISK_FAULTS, RUN_FAULTS])
    late_s = 12 * chance.random() ** 2  # while what was killed restarts, or the run is resumed
    at_s = late_s if chance.random() < LATE else chance.random() * expected_s(calm)
    lasts_s = round(chance.choice([0.1, 1.0, 8.0]) * chance.random(), 3)
    kind, worker = chance.choice(kinds), chance.randrange(calm.settings.spec.workers)
    point = int(POINTS ** chance.random())
    notice = Random(f"notice {calm.seed} {at_s} {kind} {point}")  # drawn apart from the rest
    if kind in WORKER_FAULTS and notice.random() < NOTICE_SHARE:
        kind = notice.choice(NOTICE_FAULTS)
    if calm.settings.servers > 1:  # drawn apart from the rest, which stays the same
        other = Random(f"other server {calm.seed} {at_s} {kind} {point}")
        if other.random() < OTHER_SERVER_SHARE:
            kind = other.choice(OTHER_SERVER_FAULTS)
    return Fault(round(at_s, 4), kind, worker, lasts_s, point)
