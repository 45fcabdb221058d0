# SPDX-License-Identifier: BSD-3-Clause
"""A plain training loop under DDP on Gloo. Rank 0 writes the seconds of each step to a file.

    torchrun ddp_loop.py WORKLOAD STEPS FILE

As for any script of torchrun, environment variables say where the ranks meet.
"""

import os
import sys
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from workloads import WORKLOADS, Workload

__all__ = ["train_with_ddp"]


def train_with_ddp(workload: Workload, steps: int, out: Path) -> None:
    """Train in the default process group, then end this process."""
    workload.model = DistributedDataParallel(workload.model)
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=1e-4, momentum=0.9)
    times = []
    for _ in range(steps):
        began = perf_counter()
        optimizer.zero_grad()
        workload.loss().backward()
        optimizer.step()
        times.append(perf_counter() - began)
    if dist.get_rank() == 0:
        out.write_text("\n".join(map(str, times)), encoding="ascii")
    dist.barrier()
    os._exit(0)  # a normal exit was seen to hang in the threads of Gloo


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train_with_ddp(WORKLOADS[sys.argv[1]](), int(sys.argv[2]), Path(sys.argv[3]))
