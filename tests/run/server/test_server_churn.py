# SPDX-License-Identifier: BSD-3-Clause
"""The server unmaps the slot of a worker that has died, without help of the garbage collector.

Worker 0 lets the others die one after the other, each of them while it computes, and asks the OS
after the next updates which slots the server has mapped. The model has more than a megabyte, so
that gradients are added early.
"""

import pytest

from failures import HELPERS

WORKERS = 5

SOURCE = """
import gc
if ROLE == "server":
    gc.disable()
layers = [nn.Linear(512, 1024), nn.BatchNorm1d(1024)] if HAS_BUFFERS else [nn.Linear(512, 1024)]
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
x = torch.randn(4, 512)

def train_until(condition):
    while not condition():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if run.is_first:
            time.sleep(0.001)  # the server flushes its trace when it is idle

def mapped_slots(pid):
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum("memfd:paceline-slot" in line for line in lines)

if run.is_first:
    found, pid = [], server_pid()
    for worker in range(run.workers):
        train_until(lambda: in_the_trace(type="joined", worker=worker))
    for victim in range(1, run.workers):
        tell(f"die-{victim}")
        train_until(lambda: in_the_trace(type="left", worker=victim))
        version = run.version
        train_until(lambda: run.version >= version + 2)
        found.append(mapped_slots(pid))
    keep(run, found=found)
    run.stop()
else:
    train_until(lambda: was_told(f"die-{run.worker}") or run.finished)
    strike()
"""


@pytest.mark.parametrize("has_buffers", [True, False])
@pytest.mark.parametrize("policy", ["sync", "backup:1", "async", "softsync:2"])
def test_slots_of_dead_workers_are_unmapped(launch, policy, has_buffers):
    source = HELPERS + SOURCE.replace("HAS_BUFFERS", str(has_buffers))
    ran = launch(source, workers=WORKERS, steps=None, policy=policy)
    assert ran.kept[0]["found"] == list(range(WORKERS - 1, 0, -1))
