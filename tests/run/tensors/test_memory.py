# SPDX-License-Identifier: BSD-3-Clause
"""Large gradients: their memory is kept from step to step, and they are added up as they come."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.run.launch.environment import large_pages

LARGE = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600), nn.Linear(600, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
generator = torch.Generator().manual_seed(run.worker)
while not run.finished:
    optimizer.zero_grad()
    model(torch.randn(2, 600, generator=generator)).square().mean().backward()
    optimizer.step()
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
keep(run, weights=weights)
"""

AGAIN = """
import resource
from paceline.run.tensors.memory import keep_freed_memory
KEEP
faults = []
for _ in range(6):
    block = bytearray(64 << 20)
    del block
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[1])
"""

PAGES = (64 << 20) // 4096


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps as it likes")
@pytest.mark.skipif(
    "[always]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(),
    reason="pages are large here, so few of them tell nothing",
)
@pytest.mark.parametrize(("keep", "times"), [("", 4), ("keep_freed_memory()", 0)])
def test_memory_that_is_kept_is_not_paid_for_again(keep, times):
    source = AGAIN.replace("KEEP", keep)
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    )
    assert round(int(done.stdout) / PAGES) == times


def test_a_run_repeats_bit_for_bit_in_whatever_order_large_gradients_come(launch):
    """The last worker comes first, so that others are added up before it, or not at all."""
    slow = ["1ms; worker 0 x20", "1ms; worker 1 x20; worker 2 x40"]
    runs = [launch(LARGE, workers=3, steps=4, slow=one) for one in slow]
    assert [ran.code for ran in runs] == [0, 0]
    first, second = (ran.kept[0]["weights"] for ran in runs)
    assert torch.equal(first, second)


@pytest.mark.parametrize("told", [None, "0", "1"])
def test_large_pages_are_asked_for_unless_somebody_has_said_otherwise(monkeypatch, told):
    name = "THP_MEM_ALLOC_ENABLE"
    monkeypatch.delenv(name, raising=False)
    if told is not None:
        monkeypatch.setenv(name, told)
    with large_pages():
        assert os.environ[name] == (told or "1")
    assert os.environ.get(name) == told
