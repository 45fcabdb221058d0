# SPDX-License-Identifier: BSD-3-Clause
"""A full disk ends the trace, but the launcher still learns how the run goes and ends."""

import pytest

from disk import small_disk
from failures import HELPERS, TRAINING
from paceline.run.launch.launcher import Launcher
from paceline.run.launch.run_folder import finished_at
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.trace.schema import Ended

STEPS = 60  # more than fit into the last page of the trace

SOURCE = (
    HELPERS
    + TRAINING
    + """
def fill_the_disk():
    with (OUT / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass

run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
while not run.finished:
    if run.version == 3 and run.worker == 0:
        wait_until(lambda: in_the_trace(type="update", update=3))
        fill_the_disk()
    END_EARLY
    optimizer.zero_grad()
    loss_of(run.worker, run.version).backward()
    optimizer.step()
if run.worker == 0:
    time.sleep(1.0)  # the server writes its trace at least twice a second
    (OUT / "filler").unlink()
"""
)


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        yield disk.path


@pytest.fixture
def launch_on(disk, script, capsys, forkserver):
    """Run a script on the small disk; return the exit code and the launcher's messages."""

    def run(source):
        told = {"script": str(script(source)), "arguments": (str(disk),)}
        settings = Settings(spec=RunSpec(workers=2, steps=STEPS), checkpoint_every="0", **told)
        code = Launcher(settings, disk, forkserver).run()
        lines = capsys.readouterr().err.splitlines()
        assert not any(isinstance(r, Ended) for r in read_trace(disk / "trace.jsonl").records)
        return code, [line[12:] for line in lines if line.startswith("paceline  | ")]

    return run


def test_end_is_known_without_a_trace(launch_on, disk):
    code, _ = launch_on(SOURCE.replace("END_EARLY", ""))
    assert code == 0
    assert finished_at(disk) == STEPS


def test_early_end_is_known_without_a_trace(launch_on, disk):
    code, messages = launch_on(SOURCE.replace("END_EARLY", "if run.version == 50: break"))
    assert code == 0
    assert messages[-1] == "the scripts ended at update 50 of 60, before the run reached its goal"
    assert finished_at(disk) is None
