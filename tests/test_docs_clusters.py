# SPDX-License-Identifier: BSD-3-Clause
"""The commands of docs/clusters.md, run where the page says: on hosts that are namespaces."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from cli_fixtures import SCRIPT
from hosts import Hosts, needs_hosts
from paceline.trace.reader import read_trace
from paceline.watch.audit import audit

PAGE = Path(__file__).parent.parent / "docs" / "clusters.md"
ADDRESSES = ("10.0.0.5", "10.0.0.6")  # of the hosts on the page

TRAIN = """
import torch
from torch import nn

import paceline

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
model = nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run = paceline.join()
share = run.workers  # a script may ask before it prepares
model, optimizer, loader = run.prepare(model, optimizer, loader)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
print(f"worker {run.worker} of {share} has finished")
"""


def commands(section):
    """Return the commands of a section: where each runs, and its words."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^```sh on ([^\n]*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(where, line) for where, block in found for line in block.splitlines()]


class Machines:
    """Two hosts, each with a folder that has the script."""

    def __init__(self, hosts, folder):
        self._hosts = hosts
        self.folders = [folder / f"host{host}" for host in range(2)]
        for path in self.folders:
            path.mkdir()
            (path / "train.py").write_text(TRAIN)

    def start(self, host, line):
        """Start a command of the page in its host."""
        for number, address in enumerate(ADDRESSES):
            line = line.replace(address, self._hosts.address(number))
        words = shlex.split(line)
        assert words[0] == "paceline"
        pipe = subprocess.PIPE
        command = [str(SCRIPT), *words[1:]]
        return self._hosts.popen(
            host, command, cwd=self.folders[host], stdout=pipe, stderr=pipe, text=True
        )

    def copy(self, line):
        """Do what `scp` does to the other machine."""
        program, *words, target = shlex.split(line)
        assert (program, target) == ("scp", f"{ADDRESSES[1]}:")
        subprocess.run(["cp", *words, self.folders[1]], cwd=self.folders[0], check=True)


@pytest.fixture
def machines(tmp_path):
    with Hosts(2) as hosts:
        yield Machines(hosts, tmp_path)


@needs_hosts
def test_recipe_by_hand_trains_on_two_hosts(machines):
    (at_server, serve), (at_copy, copy), (at_workers, work) = commands("By hand")
    assert (at_server, at_copy, at_workers) == ("host 0", "host 0", "both hosts")
    server = machines.start(0, serve)
    for line in server.stderr:
        if "listening at" in line:
            break
    machines.copy(copy)
    workers = [machines.start(host, work) for host in range(2)]
    finished = []
    for host in workers:
        out, err = host.communicate()
        assert host.returncode == 0, err
        assert err.count("starting worker") == 2
        finished += [line for line in out.splitlines() if "of 4 has finished" in line]
    out, err = server.communicate()
    assert server.returncode == 0, err
    assert len(finished) == 2, "each host shows the output of its first worker"
    assert "sync with 4 workers:" in out
    trace = read_trace(machines.folders[0] / "runs" / "train-1" / "trace.jsonl")
    audit(trace)
    moved = [record for record in trace.gradients() if record.pushed_bytes]
    assert len(moved) == len(list(trace.updates())), "the other host sends one sum for each update"
