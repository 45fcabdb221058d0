# SPDX-License-Identifier: BSD-3-Clause
"""The exit code of a run, and the explanation of it."""

import re
from pathlib import Path

import pytest
import torch

from failures import LOOP, TRAINING, counts, troubled
from paceline import errors
from paceline.cli.exit_codes import EVERY_CODE
from paceline.run.launch.environment import Identity
from paceline.run.launch.monitor import End, RunMonitor
from paceline.run.launch.outcome import outcome
from paceline.run.launch.processes import Child
from paceline.run.launch.run_folder import finished_at
from paceline.run.launch.stop_signals import STOP_SIGNALS
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from paceline.trace.schema import FINISHED, STOPPED, Restored

STEPS = 8
QUIET = "def trouble(run): pass\n"
DOCS = Path(__file__).parents[3] / "docs"


def messages(err):
    """Return the messages of the launcher, in order."""
    return [line[12:] for line in err.splitlines() if line.startswith("paceline  | ")]


# ------------------------------------------------------------ scripts that end before the run

EARLY = """
def trouble(run):
    if run.version == 3 and run.worker in LEAVERS:
        sys.exit(0)
    if run.version == 6:
        wait_until(lambda: in_the_trace(type="left", worker=LEAVERS[0]))
        time.sleep(0.5)  # the launcher looks at the trace a few times a second
"""


EARLY_FOR_ALL = """
def trouble(run):
    if run.version == 3:
        sys.exit(0)
"""


def test_script_that_ends_early_is_reported_once(launch):
    ran = launch(troubled("LEAVERS = [1]\n" + EARLY), steps=STEPS)
    assert ran.code == 0
    assert messages(ran.err) == ["the script of worker 1 ended at update 3 of 8"]
    assert counts(ran.trace) == [2] * 3 + [1] * 5


def test_script_that_ends_right_before_the_run_is_reported(launch):
    trouble = """
def trouble(run):
    if run.version == 7 and run.worker == 1:
        sys.exit(0)
"""
    ran = launch(troubled(trouble), steps=STEPS)
    assert ran.code == 0
    assert messages(ran.err) == ["the script of worker 1 ended at update 7 of 8"]


@pytest.mark.parametrize(
    ("goal", "where"),
    [
        ({"steps": 1000}, "at update 3 of 1000, before the run reached its goal"),
        (
            {"steps": None, "samples": 500},
            "at update 3, before the run reached its goal of 500 samples",
        ),
    ],
)
def test_run_whose_scripts_end_early_says_that_the_goal_is_not_reached(launch, goal, where):
    ran = launch(troubled(EARLY_FOR_ALL), **goal)
    assert ran.code == 0  # the scripts decided so
    assert messages(ran.err)[-1] == f"the scripts ended {where}"
    assert ran.trace.records[-1].reason == STOPPED
    assert finished_at(ran.folder) is None


def test_stopped_server_is_not_reported_as_ended_scripts(launch):
    trouble = """
def trouble(run):
    if run.version == 3 and run.worker == 0:
        os.kill(server_pid(), signal.SIGTERM)
    if run.version == 3:
        wait_until(lambda: in_the_trace(type="stopped"))
"""
    ran = launch(troubled(trouble), steps=STEPS)
    assert ran.code == 1  # nobody asked for fewer updates
    assert messages(ran.err) == [
        "the server was stopped at update 3 of 8, before the run reached its goal"
    ]


def test_command_to_continue_is_printed(call, script):
    source = TRAINING + "def trouble(run):\n    if run.version == 3: sys.exit(0)\n" + LOOP
    code, _, err = call("run", "-w", 1, "--steps", 9, "--out", "a run", script(source), ".")
    assert code == 0
    assert "Continue with: paceline run --resume 'a run'" in err.splitlines()


# ------------------------------------------------------------------------------------ exit codes


def test_failure_despite_a_reached_goal_is_explained(launch):
    trouble = """
def trouble(run):
    if run.version == 3 and run.worker == 1:
        sys.exit(3)
"""
    ran = launch(troubled(trouble), steps=STEPS)
    assert ran.code == 1
    assert messages(ran.err) == [
        "worker 1 failed with exit code 3",
        "the run reached its goal, but worker 1 failed with exit code 3: exit code 1",
    ]
    assert finished_at(ran.folder) == STEPS  # nothing is left to do


def test_several_failed_workers_are_one_reason(launch):
    ran = launch(troubled(QUIET) + "raise ValueError('out of luck')\n", workers=3, steps=STEPS)
    assert ran.code == 1
    why = messages(ran.err)[-1]
    assert re.fullmatch(
        r"the run reached its goal, but worker 0 failed [a-z0-9 ]+ and 2 more failed: exit code 1",
        why,
    )
    assert finished_at(ran.folder) is None  # worker 0 did not finish


@pytest.mark.parametrize(
    ("where", "error", "code"),
    [
        ("server", "ValueError", 1),
        ("server", "paceline.SpecError", 2),
        ("server", "paceline.TraceError", 3),
        ("server", "paceline.ProtocolError", 1),
        ("server", "paceline.PeerLost", 1),
        ("server", "paceline.errors.CheckpointError", 6),
        ("server", "paceline.errors.InternalError", 70),
        ("worker", "paceline.SpecError", 2),
        ("worker", "paceline.TraceError", 1),
        ("worker", "paceline.ProtocolError", 1),
        ("worker", "paceline.errors.InternalError", 70),
    ],
)
def test_error_that_ended_a_run_gives_its_exit_code(call, script, where, error, code):
    trouble = f"""
if ROLE == "{where}":
    raise {error}("out of luck")
"""
    path = script(troubled(trouble + QUIET))
    found, _, err = call("run", "-w", 1, "--steps", 3, "--no-restart", path, ".")
    assert found == code, err
    assert "out of luck" in err


def documented_codes():
    section = (DOCS / "runtime.md").read_text().partition("## Exit codes")[2]
    return re.findall(r"^\| (\d+)(?: \+ n)? \|", section.partition("\n## ")[0], re.MULTILINE)


def test_documented_exit_codes_match_help_and_errors():
    kinds = [errors.PacelineError, *errors.PacelineError.__subclasses__()]
    table = documented_codes()
    assert table == sorted({"0", "128", *(str(kind.exit_code) for kind in kinds)}, key=int)
    help_text = EVERY_CODE.partition("Exit codes: ")[2]
    assert re.findall(r"(?:^|; )(\d+)", help_text) == table


def test_documented_exit_codes_include_stop_signals():
    row = (DOCS / "runtime.md").read_text().partition("| 128 + n |")[2].partition("\n")[0]
    assert {str(128 + number) for number in STOP_SIGNALS} == set(re.findall(r"\d+", row))


# ------------------------------------------------------------------------------------- the server


def test_segmentation_fault_of_the_server_has_no_hint_about_parameters(call, script):
    trouble = """
if ROLE == "server":
    os.kill(os.getpid(), signal.SIGSEGV)
"""
    path = script(troubled(trouble + QUIET))
    code, _, err = call("run", "-w", 1, "--steps", 3, "--no-restart", path, ".")
    assert code == 1
    assert "server was killed by SIGSEGV" in messages(err)


LOST_AT_THE_END = """
if run.worker == 0 and not was_told("killed"):
    wait_until(lambda: in_the_trace(type="update", update=8))
    wait_until(lambda: list((OUT / "checkpoints").glob("*8.ckpt")))
    (OUT / "weights.pt").unlink()
    tell("killed")
    os.kill(server_pid(), signal.SIGKILL)
"""
UNTIL_IT_IS_BACK = "    wait_until(lambda: in_the_trace(type='restored', version=8))\n"


@pytest.mark.parametrize("waits", [UNTIL_IT_IS_BACK, ""], ids=["until it is back", "not"])
@pytest.mark.parametrize("workers", [1, 2])
def test_server_killed_after_the_last_update_is_restarted_to_end_the_run(launch, workers, waits):
    """The workers know of the end, but not everything is written."""
    source = troubled(QUIET) + LOST_AT_THE_END + waits
    ran = launch(source, workers=workers, steps=STEPS, restart=True)
    check_restarted_to_end(ran)


@pytest.fixture
def slow_launcher(monkeypatch):
    """Let the launcher know only that its server has started, until it is killed and replaced."""
    connect, on_server_exit = RunMonitor.connect, RunMonitor.on_server_exit
    on_progress = RunMonitor._on_progress
    exits = []

    def connect_late(self):
        if exits or not self.was_served:
            connect(self)

    def lose_connection(self, progress):
        on_progress(self, progress)
        if not exits:
            self._disconnect()

    def on_exit(self, written):
        exits.append(True)
        on_server_exit(self, written)

    monkeypatch.setattr(RunMonitor, "connect", connect_late)
    monkeypatch.setattr(RunMonitor, "on_server_exit", on_exit)
    monkeypatch.setattr(RunMonitor, "_on_progress", lose_connection)


@pytest.mark.parametrize(
    ("trouble", "end"),
    [(QUIET, (STEPS, FINISHED)), (EARLY_FOR_ALL, (3, STOPPED))],
    ids=["goal", "scripts end"],
)
def test_end_that_the_launcher_never_heard_of_is_in_the_trace(launch, slow_launcher, trouble, end):
    """It loses its connection after the first report."""
    ran = launch(troubled(trouble), steps=STEPS)
    assert ran.code == 0, ran.err
    last = ran.trace.records[-1]
    assert (last.version, last.reason) == end
    assert finished_at(ran.folder) == (STEPS if last.reason == FINISHED else None)


def test_killed_server_whose_last_word_was_a_failure_fails_the_run(tmp_path):
    """It reports why it failed before it exits, and may be killed in between."""
    monitor = RunMonitor(lambda: None)
    monitor.was_served = True
    identity = Identity("", tmp_path, tmp_path, None)
    server, worker = Child("server", identity, 1, code=-9), Child("worker 0", identity, 1)
    settings = Settings(spec=RunSpec(workers=1, steps=8))
    monitor.end = End(3, "100 updates in a row could not be made")
    assert outcome(settings, server, [worker], monitor).code == 1
    monitor.end = End(8, FINISHED)
    assert outcome(settings, server, [worker], monitor).code == 0


def test_server_killed_before_the_launcher_heard_of_the_end_is_restarted_to_end_the_run(
    launch, slow_launcher
):
    """The launcher doesn't know that the run is over, only that the scripts have ended."""
    source = troubled(QUIET) + LOST_AT_THE_END
    check_restarted_to_end(launch(source, workers=1, steps=STEPS, restart=True))


def check_restarted_to_end(ran):
    assert ran.code == 0, ran.err
    assert messages(ran.err) == [
        "server was killed by SIGKILL; restarting in 0.01 s (attempt 1 of 5)"
    ]
    assert [r.version for r in ran.trace.records if isinstance(r, Restored)] == [STEPS]
    assert (ran.trace.records[-1].version, ran.trace.records[-1].reason) == (STEPS, FINISHED)
    assert finished_at(ran.folder) == STEPS
    weights = torch.load(ran.folder / "weights.pt", weights_only=True)
    assert all(
        torch.equal(one, other)
        for one, other in zip(weights.values(), ran.kept[0]["weights"], strict=True)
    )


def test_updates_lost_after_all_scripts_ended_are_a_failure(launch):
    check_lost_updates(launch)


def test_updates_lost_before_the_launcher_heard_of_them_are_a_failure(launch, slow_launcher):
    check_lost_updates(launch)


def check_lost_updates(launch):
    """The last complete checkpoint is older than the last update."""
    lose = """
    wait_until(lambda: list((OUT / "checkpoints").glob("*5.ckpt")))
    next((OUT / "checkpoints").glob("*8.ckpt")).unlink()
    tell("killed")
"""
    source = troubled(QUIET) + LOST_AT_THE_END.replace('    tell("killed")\n', lose)
    ran = launch(source, steps=STEPS, restart=True, checkpoint_every="5")
    assert ran.code == 1
    assert messages(ran.err)[-1] == (
        "update 6 and later ones were lost when the server died, and no worker is left to redo them"
    )
    assert finished_at(ran.folder) is None
