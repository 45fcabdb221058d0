# SPDX-License-Identifier: BSD-3-Clause
"""Every way in which a run can end, and the rule about exit code 0.

Exit code 0 means that the version that was asked for is in `weights.pt`, and that the trace has its
end. The weights of these runs tell their version: the only parameter grows by 1 with each update.
"""

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from disk import small_disk
from failures import HELPERS
from paceline.run.launch import stop_signals
from paceline.run.launch.launcher import Launcher
from paceline.run.launch.run_folder import finished_at
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.trace.schema import Ended

STEPS = 8

COUNTER = """
class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.updates = nn.Parameter(torch.zeros(1))

model = Counter()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
"""

LOOP = """
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
while not run.finished:
    trouble(run)
    optimizer.zero_grad()
    (-model.updates.sum() * scale(run)).backward()
    optimizer.step()
"""

QUIET = "def trouble(run): pass\n"
USUAL = "def scale(run): return 1.0\n"


def at(version: int, action: str, workers: str = "True") -> str:
    """Return a `trouble` that does this at a version, in these workers."""
    return f"""
def trouble(run):
    if run.version == {version} and {workers}:
        {action}
"""


@dataclass
class Case:
    """A run, how it ends, and which version was asked for if its exit code is 0."""

    code: int
    source: str = QUIET
    after: str = ""  # the loop
    version: int = STEPS
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int | None = STEPS
    restart: bool = False


ONE = "run.worker == 1"
ZERO = "run.worker == 0"
UNTIL_STOPPED = "wait_until(lambda: in_the_trace(type='stopped'))"
TO_LAUNCHER = f"os.kill({os.getpid()}, signal.%s)"
KILL_SERVER_AT_THE_END = """
if run.worker == 0 and not was_told("killed"):
    wait_until(lambda: list((OUT / "checkpoints").glob("*8.ckpt")))
    tell("killed")
    os.kill(server_pid(), signal.SIGKILL)
"""
EXIT_IN_SERVER = """
def exit_in_server(optimizer, args, kwargs):
    if model.updates.item() == 5:
        os._exit(0)

optimizer.register_step_post_hook(exit_in_server)
"""

CASES = {
    "the goal is reached": Case(0),
    "the goal is reached without checkpoints": Case(0, settings={"checkpoint_every": "0"}),
    "the goal is reached under async": Case(0, settings={"policy": "async"}),
    "all scripts end, and there is no goal": Case(0, at(5, "sys.exit(0)"), steps=None, version=5),
    "all scripts end before the goal": Case(0, at(5, "sys.exit(0)"), version=5),
    "the script of worker 0 ends before the goal": Case(0, at(5, "sys.exit(0)", ZERO), version=5),
    "the script of worker 1 ends before the goal": Case(0, at(5, "sys.exit(0)", ONE)),
    "run.stop()": Case(0, at(5, "run.stop()", ONE), version=5),
    "the server gets SIGTERM": Case(
        1, at(5, f"run.is_first and os.kill(server_pid(), signal.SIGTERM); {UNTIL_STOPPED}")
    ),
    "Ctrl-C": Case(130, at(5, f"{TO_LAUNCHER % 'SIGINT'}; {UNTIL_STOPPED}", ZERO)),
    "SIGTERM": Case(143, at(5, f"{TO_LAUNCHER % 'SIGTERM'}; {UNTIL_STOPPED}", ZERO)),
    "Ctrl-C twice": Case(
        130,
        at(
            5,
            f"{TO_LAUNCHER % 'SIGINT'}; {UNTIL_STOPPED}; {TO_LAUNCHER % 'SIGINT'}; signal.pause()",
            ZERO,
        ),
    ),
    "worker 0 is killed": Case(1, at(5, "strike()", ZERO)),
    "worker 1 is killed": Case(0, at(5, "strike()", ONE)),
    "worker 1 is killed and restarted": Case(
        0, at(5, "was_told('struck-1') or strike()", ONE), restart=True
    ),
    "worker 1 raises": Case(1, at(5, "raise ValueError('bad luck')", ONE)),
    "worker 1 exits with the code of a CheckpointError": Case(1, at(5, "sys.exit(6)", ONE)),
    "worker 1 crashes": Case(1, at(5, "strike(signal.SIGSEGV)", ONE)),
    "worker 1 crashes once, before it joins": Case(
        0,
        "if WORKER == 1 and not was_told('struck-1'):\n    strike(signal.SIGSEGV)\n" + QUIET,
        restart=True,
    ),
    "worker 1 crashes whenever it starts": Case(
        1,
        "if WORKER == 1:\n"
        "    wait_until(lambda: in_the_trace(type='update', update=8))\n"
        "    strike(signal.SIGSEGV)\n" + QUIET,
        settings={"policy": "backup:1"},
        restart=True,
    ),
    "all workers raise": Case(1, at(5, "raise ValueError('bad luck')")),
    "all workers are killed": Case(1, at(5, "strike()")),
    "worker 0 raises after the end": Case(1, after="raise ValueError('bad luck')"),
    "worker 1 exits with code 3 after the end": Case(1, after="sys.exit(3 * run.worker)"),
    "the server is killed after the end": Case(1, after=KILL_SERVER_AT_THE_END),
    "the server is killed after the end and restarted": Case(
        0, after=KILL_SERVER_AT_THE_END, restart=True
    ),
    "the server raises": Case(1, EXIT_IN_SERVER.replace("os._exit(0)", "raise ValueError") + QUIET),
    "the server exits with code 0": Case(1, EXIT_IN_SERVER + QUIET),
    "no update is made": Case(1, at(0, "sys.exit(0)")),
    "every gradient is NaN": Case(
        1, QUIET.replace("pass", "pass\ndef scale(run): return float('nan')")
    ),
    "the script never calls prepare": Case(1, "sys.exit(0)"),
    "the server exits with the code of a SpecError": Case(1, "sys.exit(2)"),
}


def check_rule(folder, code, asked):
    """Check what exit code 0 promises."""
    if code == 0:
        assert torch.load(folder / "weights.pt", weights_only=True)["updates"].item() == asked
        last = read_trace(folder / "trace.jsonl").records[-1]
        assert isinstance(last, Ended)
        assert last.version == asked
    if (finished := finished_at(folder)) is not None:
        saved = torch.load(folder / "weights.pt", weights_only=True)["updates"].item()
        assert saved == finished


@pytest.mark.parametrize("name", CASES)
def test_exit_code_0_means_that_the_version_is_saved(
    name, tmp_path, script, forkserver, capsys, monkeypatch
):
    monkeypatch.setattr(stop_signals, "SAME_S", 0.0)  # a second one isn't taken for the first
    case = CASES[name]
    folder = tmp_path / "run"
    folder.mkdir()
    settings = Settings(
        spec=RunSpec(workers=2, steps=case.steps),
        script=str(script(HELPERS + COUNTER + USUAL + case.source + LOOP + case.after)),
        arguments=(str(folder),),
        restart=case.restart,
        **case.settings,
    )
    code = Launcher(settings, folder, forkserver).run()
    assert code == case.code, capsys.readouterr().err
    check_rule(folder, code, case.version)


FILL_THE_DISK = """
def fill_the_disk():
    with (OUT / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass

"""


FREE_IT_AGAIN = "if run.version == 6 and run.is_first: (OUT / 'filler').unlink()"


@pytest.mark.parametrize(("then", "code"), [("pass", 1), (FREE_IT_AGAIN, 0)])
def test_rule_holds_on_a_full_disk(tmp_path, script, forkserver, capsys, then, code):
    source = HELPERS + COUNTER + USUAL + FILL_THE_DISK
    source += (
        "def trouble(run):\n    if run.is_first:\n        run.version == 3 and fill_the_disk()\n"
    )
    source += f"        {then}\n"
    with small_disk(tmp_path / "disk", "1m") as disk:
        settings = Settings(
            spec=RunSpec(workers=2, steps=STEPS),
            script=str(script(source + LOOP)),
            arguments=(str(disk.path),),
            checkpoint_every="1",
        )
        found = Launcher(settings, disk.path, forkserver).run()
        assert found == code, capsys.readouterr().err
        check_rule(disk.path, code, STEPS)


def test_rule_holds_for_resumed_runs(tmp_path, script, call, shared_forkserver):
    """Of a run that was stopped, of a finished one, and of a finished one without its weights."""
    folder = tmp_path / "run"
    source = "import os\n" + COUNTER + USUAL
    source += at(5, "sys.exit(0)", "not os.path.exists(OUT / 'go-on')")
    path = script(source + LOOP)
    code, *_ = call("run", "-w", 2, "--steps", STEPS, "--out", folder, path, tmp_path)
    assert code == 0
    check_rule(folder, code, 5)
    (tmp_path / "go-on").touch()
    for damage in (lambda: None, lambda: None, (folder / "weights.pt").unlink):
        damage()
        code, _, err = call("run", "--resume", folder)
        assert code == 0, err
        check_rule(folder, code, STEPS)
    assert finished_at(folder) == STEPS
