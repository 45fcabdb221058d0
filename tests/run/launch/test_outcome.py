# SPDX-License-Identifier: BSD-3-Clause
"""How a run ends: with which exit code, what is said of it, and that nobody is forgotten."""

import re
from pathlib import Path

import pytest
import torch

from failures import LOOP, TRAINING, counts, troubled
from paceline import cli, errors
from paceline.run.launch.forkserver import modules_of
from paceline.run.launch.run_folder import finished_at
from paceline.run.launch.stop_signals import STOP_SIGNALS
from paceline.trace.schema import FINISHED, STOPPED, Restored

STEPS = 8
QUIET = "def trouble(run): pass\n"
DOCS = Path(__file__).parents[3] / "docs"


def words(err):
    """What the launcher said, in order."""
    return [line[12:] for line in err.splitlines() if line.startswith("paceline  | ")]


# ----------------------------------------------------------------- scripts that end before the run

EARLY = """
def trouble(run):
    if run.version == 3 and run.worker in LEAVERS:
        sys.exit(0)
    if run.version == 6:
        wait_until(lambda: in_the_trace(type="left", worker=LEAVERS[0]))
        time.sleep(0.5)  # the launcher looks at the trace a few times a second
"""


def test_a_worker_whose_script_ends_in_the_middle_of_the_run_is_told_of_once(launch):
    ran = launch(troubled("LEAVERS = [1]\n" + EARLY), steps=STEPS)
    assert ran.code == 0
    assert words(ran.err) == ["the script of worker 1 ended at update 3 of 8"]
    assert counts(ran.trace) == [2] * 3 + [1] * 5


def test_it_is_told_of_too_if_the_run_ends_just_then(launch):
    trouble = """
def trouble(run):
    if run.version == 7 and run.worker == 1:
        sys.exit(0)
"""
    ran = launch(troubled(trouble), steps=STEPS)
    assert ran.code == 0
    assert words(ran.err) == ["the script of worker 1 ended at update 7 of 8"]


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
def test_a_run_whose_scripts_all_end_early_says_that_it_has_not_come_to_its_goal(
    launch, goal, where
):
    trouble = """
def trouble(run):
    if run.version == 3:
        sys.exit(0)
"""
    ran = launch(troubled(trouble), **goal)
    assert ran.code == 0  # it was their wish
    assert words(ran.err)[-1] == f"the scripts ended {where}"
    assert ran.trace.records[-1].reason == STOPPED
    assert finished_at(ran.folder) is None


def test_a_server_that_somebody_has_stopped_is_not_called_the_wish_of_the_scripts(launch):
    trouble = """
def trouble(run):
    if run.version == 3 and run.worker == 0:
        os.kill(server_pid(), signal.SIGTERM)
    if run.version == 3:
        wait_until(lambda: in_the_trace(type="stopped"))
"""
    ran = launch(troubled(trouble), steps=STEPS)
    assert ran.code == 0
    assert words(ran.err) == [
        "the run was stopped at update 3 of 8, before the run reached its goal"
    ]


def test_what_is_left_to_do_is_told_of_and_how_to_go_on(call, script):
    source = TRAINING + "def trouble(run):\n    if run.version == 3: sys.exit(0)\n" + LOOP
    code, _, err = call("run", "-w", 1, "--steps", 9, "--run-dir", "a run", script(source), ".")
    assert code == 0
    assert "Continue with: paceline run --resume 'a run'" in err.splitlines()


# ------------------------------------------------------------------------------------ exit codes


def test_an_exit_code_that_is_not_0_though_the_goal_was_reached_has_its_reason(launch):
    trouble = """
def trouble(run):
    if run.version == 3 and run.worker == 1:
        sys.exit(3)
"""
    ran = launch(troubled(trouble), steps=STEPS)
    assert ran.code == 1
    assert words(ran.err) == [
        "worker 1 failed with exit code 3",
        "the run reached its goal, but worker 1 failed with exit code 3: exit code 1",
    ]
    assert finished_at(ran.folder) == STEPS  # nothing is left to do


def test_several_workers_that_failed_are_one_reason(launch):
    ran = launch(troubled(QUIET) + "raise ValueError('out of luck')\n", workers=3, steps=STEPS)
    assert ran.code == 1
    why = words(ran.err)[-1]
    assert re.fullmatch(
        r"the run reached its goal, but worker 0 failed [a-z0-9 ]+ and 2 more failed: exit code 1",
        why,
    )
    assert finished_at(ran.folder) is None  # what is done once was not


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
def test_the_error_that_ended_a_run_gives_its_exit_code(call, script, where, error, code):
    trouble = f"""
if ROLE == "{where}":
    raise {error}("out of luck")
"""
    path = script(troubled(trouble + QUIET))
    found, _, err = call("run", "-w", 1, "--steps", 3, "--no-restart", path, ".")
    assert found == code, err
    assert "out of luck" in err


def codes_of_the_docs():
    section = (DOCS / "runtime.md").read_text().partition("## Exit codes")[2]
    return re.findall(r"^\| (\d+)(?: \+ n)? \|", section.partition("\n## ")[0], re.MULTILINE)


def test_the_table_of_exit_codes_has_those_of_the_help_and_of_every_error():
    kinds = [errors.PacelineError, *errors.PacelineError.__subclasses__()]
    table = codes_of_the_docs()
    assert table == sorted({"0", "128", *(str(kind.exit_code) for kind in kinds)}, key=int)
    help_text = cli.EPILOG.partition("Exit codes: ")[2]
    assert re.findall(r"(?:^|; )(\d+)", help_text) == table


def test_the_table_of_exit_codes_has_what_a_stopped_run_ends_with():
    row = (DOCS / "runtime.md").read_text().partition("| 128 + n |")[2].partition("\n")[0]
    assert {str(128 + number) for number in STOP_SIGNALS} == set(re.findall(r"\d+", row))


# ------------------------------------------------------------------------------------- the server


def test_a_segmentation_fault_of_the_server_is_not_blamed_on_writing_to_parameters(call, script):
    trouble = """
if ROLE == "server":
    os.kill(os.getpid(), signal.SIGSEGV)
"""
    path = script(troubled(trouble + QUIET))
    code, _, err = call("run", "-w", 1, "--steps", 3, "--no-restart", path, ".")
    assert code == 1
    assert "server was killed by SIGSEGV" in words(err)


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
def test_a_server_that_is_killed_after_the_last_update_comes_back_and_ends_the_run(
    launch, workers, waits
):
    """Everybody was told of the end, but not all was written."""
    source = troubled(QUIET) + LOST_AT_THE_END + waits
    ran = launch(source, workers=workers, steps=STEPS, restart=True)
    assert ran.code == 0, ran.err
    assert words(ran.err) == ["server was killed by SIGKILL; restarting in 0.5 s (attempt 1 of 5)"]
    assert [r.version for r in ran.trace.records if isinstance(r, Restored)] == [STEPS]
    assert (ran.trace.records[-1].version, ran.trace.records[-1].reason) == (STEPS, FINISHED)
    assert finished_at(ran.folder) == STEPS
    weights = torch.load(ran.folder / "weights.pt", weights_only=True)
    assert all(
        torch.equal(one, other)
        for one, other in zip(weights.values(), ran.kept[0]["weights"], strict=True)
    )


def test_updates_that_are_lost_when_all_scripts_have_ended_are_told_of_and_no_success(launch):
    """The last checkpoint that is whole is of an update before the last."""
    lose = """
    wait_until(lambda: list((OUT / "checkpoints").glob("*5.ckpt")))
    next((OUT / "checkpoints").glob("*8.ckpt")).unlink()
    tell("killed")
"""
    source = troubled(QUIET) + LOST_AT_THE_END.replace('    tell("killed")\n', lose)
    ran = launch(source, steps=STEPS, restart=True, checkpoint_every="5")
    assert ran.code == 1
    assert words(ran.err)[-1] == (
        "update 6 and later ones were lost when the server died, and no worker is left to redo them"
    )
    assert finished_at(ran.folder) is None


# -------------------------------------------------------------------------------- the first words


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("-w", 1), "training script.py with 1 worker under sync; folder run"),
        (
            ("-w", 2, "-p", "backup:1"),
            "training script.py with 2 workers under backup:1; folder run",
        ),
        (
            ("-w", 1, "--slow", "0.002"),
            "training script.py with 1 worker under sync, at least 2ms per gradient; folder run",
        ),
    ],
)
def test_the_first_line_says_what_is_run(call, script, options, line):
    script(TRAINING + QUIET + LOOP)
    words = ("--steps", 2, "--run-dir", "run", "script.py", ".")
    code, _, err = call("run", *options, *words)
    assert code == 0, err
    assert err.splitlines()[0] == line


@pytest.mark.parametrize(
    ("given", "to_script", "hint"),
    [
        (["-w", 1], ["--lr", "0.1"], ""),
        (["-w", 1], ["--seed=4", "--slow", "1s", "--seed", "3"], "--seed and --slow"),
        (["-w", 1], ["--workers", "8"], ""),  # who has given it before the script knows
        (["-w", 1], ["-p", "--no-restart"], "-p and --no-restart"),
    ],
)
def test_options_of_ours_after_the_script_get_a_hint(call, script, given, to_script, hint):
    path = script(TRAINING + QUIET + LOOP + "print(sys.argv[2:])")
    code, out, err = call("run", *given, "--steps", 2, path, ".", *to_script)
    assert code == 0, err
    assert f"worker 0  | {to_script}" in out.splitlines()
    expected = (
        f"note: everything after the script is passed to it, including {hint}; put options for "
        "paceline before the script"
    )
    assert err.splitlines().count(expected) == bool(hint)


class Unlisted(type(Path())):
    """A path whose folder may be entered, but not listed."""

    def iterdir(self):
        raise PermissionError


def test_a_folder_that_cannot_be_listed_is_no_reason_not_to_start(tmp_path):
    (tmp_path / "script.py").write_text("import json\nimport beside\n")
    (tmp_path / "beside.py").touch()
    assert modules_of(tmp_path / "script.py") == ["json"]
    assert modules_of(Unlisted(tmp_path / "script.py")) == []
