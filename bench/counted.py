# SPDX-License-Identifier: BSD-3-Clause
"""A plain training loop under Paceline that counts the processor time of its server.

The server writes a line for each update: its processor time before and after the optimizer's step.
"""

import sys
from pathlib import Path
from time import process_time

import torch
from workloads import WORKLOADS

import paceline

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
}

name, optimizer_name, out = sys.argv[1:]
workload = WORKLOADS[name]()
optimizer = OPTIMIZERS[optimizer_name](workload.model.parameters())
with Path(out).open("a", encoding="ascii") as file:
    # Hooks run where the optimizer steps, which is on the server.
    optimizer.register_step_pre_hook(lambda *_: print(process_time(), end=" ", file=file))
    optimizer.register_step_post_hook(lambda *_: print(process_time(), file=file))
    run = paceline.join()
    torch.set_num_threads(1)  # threads that wait for each other use processor time too
    model, optimizer = run.prepare(workload.model, optimizer)
    while not run.finished:
        optimizer.zero_grad()
        workload.loss().backward()
        optimizer.step()
