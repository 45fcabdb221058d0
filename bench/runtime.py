# SPDX-License-Identifier: BSD-3-Clause
"""Measure the time of a step and compare it with DDP on Gloo; part of `make bench`.

The same models run without communication, under DDP and under Paceline, in turn. The table has
the medians over several rounds. A ratio above 1 means that Paceline is faster than DDP.
"""

import argparse
import contextlib
import io
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from ddp_loop import train_with_ddp
from one_server import Case, train
from workloads import WORKLOADS

from paceline.core.decider import Decider
from paceline.core.policies import parse_policy
from paceline.run.launch.forkserver import PRELOAD, ForkServer
from paceline.run.launch.launcher import Launcher
from paceline.run.server.recorder import Recorder
from paceline.run.settings import Settings
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.event_records import Made, Measured, record_event

HERE = Path(__file__).parent
WARM_UP = 3  # steps that are not measured
CASES = [("25m", 4), ("1m", 4), ("1m", 8), ("cnn", 2), ("cnn", 4)]


def ddp_rank(rank: int, workers: int, name: str, folder: str) -> None:
    """Run one process of DDP. Rank 0 writes the seconds of each step to a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=workers
    )
    workload = WORKLOADS[name]()
    train_with_ddp(workload, workload.steps + WARM_UP, Path(folder, "times"))


def alone_rank(rank: int, workers: int, name: str, folder: str) -> None:
    """Only compute: the time that as many processes need without any communication."""
    del workers
    torch.set_num_threads(1)
    workload = WORKLOADS[name]()
    times = []
    for _ in range(workload.steps + WARM_UP):
        began = perf_counter()
        workload.model.zero_grad()
        workload.loss().backward()
        times.append(perf_counter() - began)
    if rank == 0:
        Path(folder, "times").write_text("\n".join(map(str, times)), encoding="ascii")


def step_s_of_processes(target, name: str, workers: int) -> float:
    """Run `target` in each process and return the mean seconds of a step."""
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=target, args=(rank, workers, name, folder))
            for rank in range(workers)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return mean_step(Path(folder, "times"))


def step_s_of_paceline(name: str, workers: int, forkserver: ForkServer) -> float:
    """Train under `sync` and return the mean seconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        steps = WORKLOADS[name]().steps + WARM_UP
        times = Path(folder, "times")
        settings = Settings(
            spec=RunSpec(workers=workers, steps=steps),
            script=str(HERE / "paced.py"),
            arguments=(name, str(times)),
        )
        launch = Launcher(settings, Path(folder), forkserver)
        with contextlib.redirect_stdout(io.StringIO()):
            code = launch.run()
        assert code == 0
        return mean_step(times)


def tracing(workers: int, updates: int) -> float:
    """Return the mean seconds to record an update and the gradients of all workers."""
    spec = RunSpec(workers=workers, steps=updates)
    trace = simulate("sync", Cluster.parse("50ms"), spec)
    decider = Decider(parse_policy("sync"), spec)
    events = [(event, decider.ledger.version, decider.handle(event)) for event in trace.events()]
    measured = Measured(0.0, 0.05, sq_norm=1.0)
    made = Made(1.0, 0.001, {"loss": 0.5})
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder, "trace"), trace.header)
        began = perf_counter()
        for event, version, actions in events:
            recorder.write(record_event(event, actions, version, measured, {version + 1: made}))
        recorder.close()
        return (perf_counter() - began) / updates


def mean_step(path: Path) -> float:
    """Return the mean of the times in a file, without the warm-up and the last step.

    The last step of a run ends when its result is on disk.
    """
    times = [float(line) for line in path.read_text(encoding="ascii").splitlines()][WARM_UP:-1]
    return sum(times) / len(times)


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(HERE)  # where the processes find the workloads
    sys.path.insert(0, str(HERE))
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    with ForkServer() as forkserver:
        measure(options, forkserver)


def measure(options: argparse.Namespace, forkserver: ForkServer) -> None:
    """Measure every case and print the table."""
    print(f"{'model':6} {'workers':>7} {'computing':>10} {'DDP':>10} {'Paceline':>10} {'ratio':>6}")
    for name, workers in CASES:
        if options.only and f"{name}:{workers}" not in options.only.split(","):
            continue
        rounds = [
            (
                step_s_of_processes(alone_rank, name, workers),
                step_s_of_processes(ddp_rank, name, workers),
                step_s_of_paceline(name, workers, forkserver),
            )
            for _ in range(options.rounds)
        ]
        alone, ddp, ours = (median(times) for times in zip(*rounds, strict=True))
        ratio = median(d / p for _, d, p in rounds)
        print(
            f"{name:6} {workers:7} {1e3 * alone:7.2f} ms {1e3 * ddp:7.2f} ms {1e3 * ours:7.2f} ms "
            f"{ratio:6.2f}",
            flush=True,
        )
    if not options.only:
        many = Case("tiny", 64)
        overhead_ms = median(train(many, forkserver).overhead_ms for _ in range(options.rounds))
        print(f"overhead of a step with 64 tiny workers: {overhead_ms:.1f} ms")
        records = median(tracing(8, 2000) for _ in range(options.rounds))
        share = 100 * records / 5e-3
        print(f"tracing, 8 workers: {1e6 * records:.0f} us per update, {share:.1f} % of 5 ms")


if __name__ == "__main__":
    main()
