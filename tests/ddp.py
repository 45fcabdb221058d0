# SPDX-License-Identifier: BSD-3-Clause
"""The same training with PyTorch's `DistributedDataParallel` on Gloo, in real processes.

It is in a separate module because its processes must be able to import what they execute.
"""

import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.run.launch.forkserver import PRELOAD
from plain import execute

Weights = list[torch.Tensor]

JOIN_S = 60.0  # normally it takes a second


def train_with_ddp(sources: Sequence[str], workers: int, steps: int, folder: Path) -> list[Weights]:
    """Train each source's model, one after the other, in one job; return their weights."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)  # import torch only once
    processes = [
        context.Process(target=_run_rank, args=(rank, workers, list(sources), steps, folder))
        for rank in range(workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(JOIN_S)
    assert [process.exitcode for process in processes] == [0] * workers
    return list(torch.load(folder / "weights.pt"))


def _run_rank(rank: int, workers: int, sources: list[str], steps: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # whatever this host's name resolves to
    rendezvous = f"file://{folder / 'rendezvous'}"
    distributed.init_process_group("gloo", rendezvous, rank=rank, world_size=workers)
    weights = [_train(source, rank, steps) for source in sources]
    if rank == 0:
        torch.save(weights, folder / "weights.pt")
    distributed.destroy_process_group()


class _Loss(nn.Module):
    """The loss as a module, because DDP averages the gradients of what `forward` returns."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._names = execute(source)
        self.model = self._names["model"]
        self.optimizer = self._names["optimizer"]

    def forward(self, worker: int, version: int) -> torch.Tensor:
        loss: torch.Tensor = self._names["loss_of"](worker, version)
        return loss


def _train(source: str, rank: int, steps: int) -> Weights:
    loss_of = _Loss(source)
    parallel = DistributedDataParallel(loss_of)
    for version in range(steps):
        loss_of.optimizer.zero_grad()
        parallel(rank, version).backward()
        loss_of.optimizer.step()
    return [parameter.detach().clone() for parameter in loss_of.model.parameters()]
