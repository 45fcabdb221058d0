# SPDX-License-Identifier: BSD-3-Clause
"""How fast a step is, beside DDP on Gloo: the same models, one after the other, medians of rounds.

make bench-runtime
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
from torch.nn.parallel import DistributedDataParallel
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
from paceline.trace.records import Made, Measured, record_event
from paceline.trace.schema import read_trace

HERE = Path(__file__).parent
WARM_UP = 3  # steps that are not counted
CASES = [("25m", 4), ("1m", 4), ("1m", 8), ("cnn", 2), ("cnn", 4)]


def ddp_rank(rank: int, workers: int, name: str, folder: str) -> None:
    """One process of DDP; rank 0 writes the seconds of each step into a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=workers
    )
    workload = WORKLOADS[name]()
    workload.model = DistributedDataParallel(workload.model)
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=1e-4, momentum=0.9)
    times = []
    for _ in range(workload.steps + WARM_UP):
        began = perf_counter()
        optimizer.zero_grad()
        workload.loss().backward()
        optimizer.step()
        times.append(perf_counter() - began)
    if rank == 0:
        Path(folder, "times").write_text("\n".join(map(str, times)), encoding="ascii")
    dist.barrier()
    os._exit(0)  # an orderly end was seen to wait for ever in the threads of Gloo


def alone_rank(rank: int, workers: int, name: str, folder: str) -> None:
    """Only computing: what as many processes take that do not talk to each other."""
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


def of_processes(target, name: str, workers: int) -> float:
    """Mean seconds of a step in processes that run this."""
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


def of_paceline(name: str, workers: int, forkserver: ForkServer) -> float:
    """Mean seconds of a step under `sync`."""
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


def overhead_of_many(workers: int, waits_s: float, steps: int, forkserver: ForkServer) -> float:
    """Mean seconds of a step beyond the time that every worker just waits."""
    with tempfile.TemporaryDirectory() as folder:
        spec = RunSpec(workers=workers, steps=steps)
        settings = Settings(
            spec=spec,
            slow=f"{waits_s}s",
            script=str(HERE / "paced.py"),
            arguments=("tiny", str(Path(folder, "times"))),
        )
        launch = Launcher(settings, Path(folder), forkserver)
        with contextlib.redirect_stdout(io.StringIO()):
            code = launch.run()
        assert code == 0
        times = [update.t for update in read_trace(Path(folder, "trace.jsonl")).updates()]
        return (times[-1] - times[WARM_UP]) / (len(times) - 1 - WARM_UP) - waits_s


def tracing(workers: int, updates: int) -> float:
    """Mean seconds that it takes to record an update and its gradients, `workers` of them."""
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
    times = [float(line) for line in path.read_text(encoding="ascii").splitlines()][WARM_UP:]
    return sum(times) / len(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(HERE)  # the processes find the workloads there
    sys.path.insert(0, str(HERE))
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    with ForkServer() as forkserver:
        measure(options, forkserver)


def measure(options: argparse.Namespace, forkserver: ForkServer) -> None:
    """Measure and print."""
    print(f"{'model':6} {'workers':>7} {'computing':>10} {'DDP':>10} {'Paceline':>10} {'ratio':>6}")
    for name, workers in CASES:
        if options.only and f"{name}:{workers}" not in options.only.split(","):
            continue
        rounds = [
            (
                of_processes(alone_rank, name, workers),
                of_processes(ddp_rank, name, workers),
                of_paceline(name, workers, forkserver),
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
        many = median(overhead_of_many(64, 0.1, 50, forkserver) for _ in range(options.rounds))
        print(f"64 workers that only wait: {1e3 * many:.1f} ms a step beyond their waiting")
        records = median(tracing(8, 2000) for _ in range(options.rounds))
        share = 100 * records / 5e-3
        print(f"tracing, 8 workers: {1e6 * records:.0f} us an update, {share:.1f} % of 5 ms")


if __name__ == "__main__":
    main()
