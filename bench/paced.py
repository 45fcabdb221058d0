# SPDX-License-Identifier: BSD-3-Clause
"""A plain training loop under Paceline. Worker 0 writes the seconds of each step to a file."""

import sys
from pathlib import Path
from time import perf_counter

import torch
from workloads import WORKLOADS

import paceline

name, out = sys.argv[1:]
workload = WORKLOADS[name]()
optimizer = torch.optim.SGD(workload.model.parameters(), lr=1e-4, momentum=0.9)
run = paceline.join()
model, optimizer = run.prepare(workload.model, optimizer)
times = []
while not run.finished:
    began = perf_counter()
    optimizer.zero_grad()
    workload.loss().backward()
    optimizer.step()
    times.append(perf_counter() - began)
if run.is_first:
    Path(out).write_text("\n".join(map(str, times)), encoding="ascii")
