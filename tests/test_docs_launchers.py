# SPDX-License-Identifier: BSD-3-Clause
"""The recipes in docs/clusters.md work as they are written.

Other tests run the parts of a recipe; these run its commands.
"""

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from failures import LOOP, TRAINING
from hosts import Hosts, needs_hosts
from paceline.trace.reader import read_trace
from paceline.watch.audit import audit
from plain import IMPORTS
from slurm import SlurmCluster, needs_slurm
from torchrun_runs import PATIENCE_S, QUIET

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "clusters.md").read_text()

WAIT = """
    if run.version >= 20 and not Path("go").exists():
        Path("reached").touch()
        while not Path("go").exists():
            time.sleep(0.01)
"""
"""Workers wait at version 20 until the test tells them to go on."""

SCRIPT = "import paceline\n" + IMPORTS + TRAINING + QUIET + LOOP.rpartition("keep(")[0]

WAITING_SCRIPT = "import time\nfrom pathlib import Path\n" + SCRIPT.replace("pass", WAIT).replace(
    "while not run.finished", "while run.version < 40"
)


def recipe(section: str) -> list[str]:
    """Return the blocks of a section."""
    [text] = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def shell(tmp_path):
    """Return a function that starts a shell command, in a folder of its own with a train.py."""
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "OMP_NUM_THREADS": "1"}

    def start(command, name, popen=subprocess.Popen, script=SCRIPT):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(script)
        with (folder / "out").open("w") as out:
            words = ["bash", "-c", command]
            return popen(words, cwd=folder, env=environment, stdout=out, stderr=out)

    return start


def updates_of(folder):
    return len(list(read_trace(folder / "runs" / "train-1" / "trace.jsonl").updates()))


def test_torchrun_on_one_host(shell, tmp_path):
    command, _ = recipe("torchrun")
    assert shell(command, "host").wait(PATIENCE_S) == 0, (tmp_path / "host" / "out").read_text()
    assert updates_of(tmp_path / "host") == 100


@needs_hosts
def test_torchrun_on_two_hosts(shell, tmp_path):
    """The command that sets the options is run on both."""
    options, *commands = recipe("torchrun")[1].splitlines()
    with Hosts(2) as hosts:
        started = [
            shell(
                "\n".join([options, command.replace("10.0.0.5", hosts.address(0))]),
                f"host-{host}",
                lambda *words, host=host, **others: hosts.popen(host, *words, **others),
            )
            for host, command in enumerate(commands)
        ]
        codes = [each.wait(PATIENCE_S) for each in started]
    printed = [(tmp_path / f"host-{host}" / "out").read_text() for host in range(2)]
    assert codes == [0, 0], "\n".join(printed)
    assert updates_of(tmp_path / "host-0") == 100
    assert not (tmp_path / "host-1" / "runs").exists()


@needs_slurm
def test_slurm_job_is_stopped_and_submitted_again(tmp_path):
    """One node has all workers of the two that the script asks for."""
    folder = tmp_path / "shared"
    folder.mkdir()
    [batch] = [block for block in recipe("Slurm") if block.startswith("#!/bin/bash")]
    (folder / "train.sbatch").write_text(batch)
    (folder / "train.py").write_text(WAITING_SCRIPT)
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    (tmp_path / "slurm").mkdir()
    with SlurmCluster(tmp_path / "slurm") as slurm:

        def call(*words):
            return slurm.call(*words, cwd=folder, env={"PATH": programs, "OMP_NUM_THREADS": "1"})

        job = call("sbatch", "--parsable", "--nodes=1", "train.sbatch").strip()
        log = folder / f"slurm-{job}.out"
        slurm.wait_until(f"[ -e {folder}/reached ]", log)
        call("scancel", job)
        slurm.wait_until(f"grep -q 'Continue with' {log}", log)
        slurm.wait_until(f'[ -z "$(squeue --noheader --jobs={job})" ]', log)
        (folder / "go").touch()
        submit = ("sbatch", "--parsable", "--wait", "--nodes=1", "train.sbatch")
        again, finished = [folder / f"slurm-{call(*submit).strip()}.out" for _ in range(2)]
    assert "backup:1 with 4 workers: 40 updates" in again.read_text()
    assert finished.read_text() == "runs/train.sbatch is finished\n"
    trace = read_trace(folder / "runs" / "train.sbatch" / "trace.jsonl")
    audit(trace)
    assert [update.update for update in trace.updates()][-1] == 40
    assert trace.header.workers == 4
    assert (folder / "runs" / "train.sbatch" / "finished").exists()


MANIFESTS = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))


def documents(path):
    return list(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("release", ["1.28", "1.33", "1.37"])
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_manifest_is_valid(path, release):
    """Strictly: a field that Kubernetes doesn't know is an error."""
    for document in documents(path):
        kubernetes_validate.validate(document, release, strict=True)


def test_kubernetes_rejects_a_manifest_with_an_unknown_field():
    """The validation above is real."""
    [wrong] = documents(MANIFESTS[1])
    wrong["spec"]["template"]["spec"]["terminationGracePeriod"] = 30
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        kubernetes_validate.validate(wrong, "1.33", strict=True)


def pod(path):
    [job] = [document for document in documents(path) if document["kind"] == "Job"]
    return job["spec"]["template"]["spec"]


def test_kubernetes_manifests_fit_together():
    server, workers = [documents(path) for path in reversed(MANIFESTS)]
    service = next(document for document in workers + server if document["kind"] == "Service")
    names = [pod(path)["containers"][0] for path in MANIFESTS]
    assert service["metadata"]["name"] == "paceline-server"
    [container, worker] = names
    assert f"--connect paceline-server:{service['spec']['ports'][0]['port']}" in worker["args"][0]
    assert f"--listen 0.0.0.0:{service['spec']['ports'][0]['port']}" in container["args"][0]
    for path in MANIFESTS:
        mounted = {mount["name"] for mount in pod(path)["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod(path)["volumes"]}


@needs_hosts
def test_kubernetes_containers_train(tmp_path, shell):
    """One worker of four is missing: `backup:1` begins with three."""
    script = SCRIPT.replace("while not run.finished", "while run.version < 40")
    token = tmp_path / "token"
    token.write_text("a" * 64)
    token.chmod(0o400)
    (tmp_path / "runs").mkdir()
    with Hosts(1) as hosts:
        places = {
            "/etc/paceline/token": str(token),
            "/runs/": f"{tmp_path}/runs/",
            "paceline-server:": f"{hosts.address(0)}:",
        }

        def start(path, name):
            [command] = pod(path)["containers"][0]["args"]
            for there, here in places.items():
                command = command.replace(there, here)
            return shell(command, name, partial(hosts.popen, 0), script)

        server, workers = MANIFESTS
        started = [start(workers, f"worker-{number}") for number in range(3)]
        started.append(start(server, "server"))
        codes = [each.wait(PATIENCE_S) for each in started]
    assert codes == [0] * 4, (tmp_path / "server" / "out").read_text()
    trace = read_trace(tmp_path / "runs" / "train" / "trace.jsonl")
    assert str(trace.header.policy) == "backup:1"


BIG = """
import subprocess
import paceline, torch
model = torch.nn.Linear(4200, 4200)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
while run.version < 3:
    optimizer.zero_grad()
    model(torch.randn(2, 4200)).square().mean().backward()
    optimizer.step()
print(subprocess.run(["df", "--output=size,used", "/dev/shm"], capture_output=True, text=True))
"""

BATCHES = """
import torch
class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 128
    def __getitem__(self, number):
        return torch.zeros(3, 512, 512)
for batch in torch.utils.data.DataLoader(Images(), batch_size=32, num_workers=1):
    pass
"""


@pytest.fixture
def container(shell, tmp_path):
    """Return a function that runs a script with a /dev/shm of 64 MB; return its code and output."""
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("a /dev/shm of its own needs root and the program unshare")

    def execute(command, script):
        mounted = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
        inside = f"unshare -m sh -c '{mounted} && {command}'"
        code = shell(inside, "box", script=script).wait(PATIENCE_S)
        return code, (tmp_path / "box" / "out").read_text()

    return execute


def test_shm_of_a_container_is_not_used_by_a_run(container):
    """Its model is larger."""
    code, printed = container("paceline run -w 2 train.py", BIG)
    assert code == 0, printed
    assert re.search(r"65536 +0\\n", printed), printed


def test_shm_of_a_container_is_too_small_for_large_batches(container):
    code, printed = container("python train.py", BATCHES)
    assert code != 0
    assert "unable to allocate shared memory" in printed or "bus error" in printed.lower()
