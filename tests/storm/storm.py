# SPDX-License-Identifier: BSD-3-Clause
"""One storm: launch a run on a simulated host, let faults happen, resume it until it is done."""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
import torch._dynamo
from torch import nn

from paceline.run.launch.run_folder import finished_at
from paceline.run.net import payload_stream
from paceline.run.tensors import partition, sums
from storm.faults import Faults
from storm.host import Host
from storm.laws import check_end, check_launch, check_laws
from storm.scenario import Scenario, make_scenario
from storm.script import StormScript
from storm.streams import CHUNK_BYTES
from storm.world import BEGIN_S, Killed, World

__all__ = ["Outcome", "run_seed", "run_storm"]

BLOCK = 4  # elements of the model's 16 that stay on one server
LAUNCHES_MAX = 5  # a run that was stopped or killed is resumed up to this often


@dataclass
class Outcome:
    """How a storm ended."""

    scenario: Scenario
    violation: str = ""  # "": none
    story: list[str] = field(default_factory=list)
    codes: list[int | None] = field(default_factory=list)  # of the launches; None: killed
    version: int = 0
    steps: int = 0
    virtual_s: float = 0.0
    faults: int = 0  # that had an effect
    torn_writes: int = 0
    parked: int = 0  # connections that waited for the next server


def run_storm(scenario: Scenario) -> Outcome:
    """Let a storm happen, and check all laws."""
    with tempfile.TemporaryDirectory(prefix="storm-", dir=_memory()) as folder:
        world = World(scenario.seed)
        world.folder = folder
        outcome = Outcome(scenario, story=world.story)
        storm = _Storm(world, Path(folder), scenario, outcome)
        with own_process_state(), storm.host.captured():
            try:
                storm.run()
            except Exception as error:
                outcome.violation = f"{type(error).__name__}: {error}"
            finally:
                world.end()
                storm.host.script.forget_models()
        outcome.steps, outcome.virtual_s = world.steps, world.now - BEGIN_S
        outcome.faults, outcome.torn_writes = storm.happened, storm.host.disk.torn_writes
        outcome.parked = storm.host.kernel.parked
        return outcome


def run_seed(seed: int) -> Outcome:
    """Run the storm of this seed; keep its story only if it broke a law."""
    outcome = run_storm(make_scenario(seed))
    if not outcome.violation:
        outcome.story = []
    return outcome


def _memory() -> str | None:
    """Return a folder in memory, where files are fast, if there is one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


@contextmanager
def own_process_state() -> Iterator[None]:
    """Undo what the processes of a run change in their own process.

    Tensors use one thread, and garbage isn't collected at random times. A killed process leaves
    generators behind, such as that of a loader. Python closes them when their last frame is gone,
    and they touch the outside when nothing can catch what stops that any more.
    """
    report = sys.unraisablehook
    threads, load = torch.get_num_threads(), nn.Module.load_state_dict
    chunk_bytes = payload_stream.CHUNK_BYTES
    payload_stream.CHUNK_BYTES = CHUNK_BYTES
    aligned, block = partition.ALIGNED, sums.BLOCK
    partition.ALIGNED = sums.BLOCK = BLOCK  # or the head had everything
    torch.set_num_threads(1)
    gc.disable()
    sys.unraisablehook = lambda one: None if one.exc_type is Killed else report(one)
    try:
        yield
    finally:
        sys.unraisablehook = report
        gc.enable()
        torch.set_num_threads(threads)
        payload_stream.CHUNK_BYTES = chunk_bytes
        partition.ALIGNED, sums.BLOCK = aligned, block
        nn.Module.load_state_dict = load  # type: ignore[method-assign] # each worker guards it


class _Storm:
    def __init__(self, world: World, folder: Path, scenario: Scenario, outcome: Outcome) -> None:
        self._world = world
        self._scenario = scenario
        self._outcome = outcome
        script = StormScript(
            world,
            scenario.epochs,
            scenario.batch_size,
            scenario.compute_s,
            scenario.style,
            list(scenario.script_faults),
        )
        self.host = Host(world, folder, script, scenario.delay_max_s)
        self._settings = msgspec.structs.replace(scenario.settings, script="train.py")
        self._faults = Faults(self.host, self._settings)
        script.on_hang = self._faults.wait_and_stop

    def run(self) -> None:
        """Launch the run, resume it until it is done, and check it."""
        self._faults.plan(self._scenario.faults)
        for _ in range(LAUNCHES_MAX):
            self._faults.begin_launch()
            begin = len(self._world.story)
            self.host.launch(self._settings)
            self._world.note("launch")
            launcher = self.host.launcher
            assert launcher is not None
            self._world.run(lambda launcher=launcher: not launcher.is_alive and not self._is_busy())
            self._outcome.codes.append(self.host.code)
            self._faults.check_exit_code()
            check_launch(self.host, self._settings)
            if (
                self.host.code is not None
                and self.host.code < 128
                and not self._lost_updates(begin)
            ):
                break
        check_end(self.host, self._scenario)
        check_laws(self.host, self._scenario)
        self._outcome.version = finished_at(self.host.run_dir) or 0

    def _lost_updates(self, begin: int) -> bool:
        """Return whether the scripts ended with updates that a killed server had not saved.

        The run has failed then, and says so. A user resumes it.
        """
        return any("no worker is left to redo them" in line for line in self._world.story[begin:])

    @property
    def happened(self) -> int:
        """How many faults had an effect."""
        return self._faults.happened + len(self.host.script.fired)

    def _is_busy(self) -> bool:
        """Return whether threads of processes that are gone still have to unwind."""
        return any(not task.is_done for task in self._world.tasks)
