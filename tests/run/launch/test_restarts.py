# SPDX-License-Identifier: BSD-3-Clause
"""Processes that die are restarted, but only a limited number of times without progress."""

import os

import pytest

from failures import counts, joins_and_leaves, troubled
from paceline.run.launch import restarts
from paceline.run.launch.launcher import Launcher
from paceline.run.launch.restarts import FIRST_PAUSE_S, RestartBackoff
from paceline.run.settings import Settings
from paceline.spec import RunSpec

STEPS = 8
QUIET = "def trouble(run): pass\n"

COUNT_STARTS = """
def count_starts():
    start = 1
    while was_told(f"start-{WORKER}-{start}"):
        start += 1
    tell(f"start-{WORKER}-{start}", os.getpid())
    return start

START = count_starts()
"""


@pytest.fixture
def launch_failing(script, tmp_path, capsys, forkserver):
    """Run a script that may leave no trace; return the exit code and standard error."""
    (tmp_path / "run").mkdir()

    def run(source, workers=2, restart=True):
        run_dir = tmp_path / "run"
        told = {"script": str(script(source)), "arguments": (str(run_dir),), "restart": restart}
        settings = Settings(spec=RunSpec(workers=workers, steps=STEPS), **told)
        code = Launcher(settings, run_dir, forkserver).run()
        return code, capsys.readouterr().err.splitlines()

    return run


def messages_about(name, err):
    """Return what the launcher said about a process, in order."""
    prefix = f"paceline  | {name} "
    return [line.removeprefix(prefix) for line in err.splitlines() if line.startswith(prefix)]


# ----------------------------------------------------------------------------------------- workers


def test_killed_worker_is_restarted_and_catches_up(launch):
    trouble = """
def trouble(run):
    if run.worker == 1 and run.version == 3 and START == 1:
        strike()
    elif run.worker == 1 and START == 2:
        tell("is-back", run.version)
    elif run.worker == 0 and run.version == 6:
        wait_for("is-back")
"""
    ran = launch(troubled(COUNT_STARTS + trouble), steps=STEPS, restart=True)
    assert ran.code == 0, ran.err
    assert ran.err.splitlines() == [
        "paceline  | worker 1 was killed by SIGKILL; restarting in 0.01 s (attempt 1 of 5)"
    ]
    assert joins_and_leaves(ran.trace, 1)[0::2][:2] == ["joined", "joined"]
    assert counts(ran.trace)[0] == counts(ran.trace)[-1] == 2
    assert ran.kept[1]["version"] == STEPS


def test_worker_that_fails_once_does_not_fail_the_run(launch):
    trouble = """
def trouble(run):
    if run.worker == 1 and run.version == 3 and START == 1:
        raise ValueError("out of luck")
    elif run.worker == 1 and START == 2:
        tell("is-back")
    elif run.worker == 0 and run.version == 6:
        wait_for("is-back")
"""
    ran = launch(troubled(COUNT_STARTS + trouble), steps=STEPS, restart=True)
    assert ran.code == 0, ran.err
    assert messages_about("worker 1", ran.err) == [
        "failed with exit code 1; restarting in 0.01 s (attempt 1 of 5)"
    ]
    assert ran.err.count("worker 1  | ValueError: out of luck") == 1
    assert ran.kept.keys() == {0, 1}


def test_launcher_gives_up_on_a_worker_after_five_failed_restarts(launch):
    trouble = """
if WORKER == 1:
    raise ValueError("out of luck")

def trouble(run):
    if run.version == 3:
        pid = int(wait_for("start-1-6"))
        wait_until(lambda: not Path(f"/proc/{pid}").exists())
        time.sleep(0.2)  # the launcher learns of it
"""
    ran = launch(troubled(COUNT_STARTS + trouble), steps=STEPS, restart=True, policy="backup:1")
    assert ran.code == 1
    assert ran.err.count("ValueError: out of luck") == 1  # its traceback is shown once
    same = "failed in the same way as before"
    assert messages_about("worker 1", ran.err) == [
        "failed with exit code 1; restarting in 0.01 s (attempt 1 of 5)",
        f"{same}; restarting in 0.02 s (attempt 2 of 5)",
        f"{same}; restarting in 0.04 s (attempt 3 of 5)",
        f"{same}; restarting in 0.08 s (attempt 4 of 5)",
        f"{same}; restarting in 0.16 s (attempt 5 of 5)",
        f"{same}; gave up after 5 failed restarts",
    ]
    assert counts(ran.trace) == [1] * STEPS


def test_worker_that_makes_progress_is_restarted_indefinitely(launch):
    trouble = """
def trouble(run):
    if run.worker == 1 and START <= 3 and run.last is not None:
        wait_until(lambda: in_the_trace(type="gradient", worker=1, version=run.last.version))
        strike()
    elif run.worker == 1 and START == 4:
        tell("is-back")
    elif run.worker == 0:
        wait_for("is-back")
"""
    ran = launch(troubled(COUNT_STARTS + trouble), steps=40, restart=True, policy="async")
    assert ran.code == 0, ran.err
    first = "was killed by SIGKILL; restarting in 0.01 s (attempt 1 of 5)"
    assert messages_about("worker 1", ran.err) == [first] * 3


def test_run_does_not_wait_for_a_worker_that_is_not_restarted(launch):
    """The run has not begun, and under sync it would wait for all workers."""
    trouble = "if WORKER == 1:\n    os._exit(3)\n"
    ran = launch(troubled(trouble + QUIET), steps=STEPS)
    assert ran.code == 1
    assert messages_about("worker 1", ran.err) == ["failed with exit code 3"]
    assert counts(ran.trace) == [1] * STEPS
    assert ran.kept.keys() == {0}


def test_worker_that_fails_after_the_end_is_not_restarted(launch):
    source = """
if run.worker == 1:
    wait_until(lambda: in_the_trace(type="update", update=8))
    wait_for("seen")
    raise ValueError("out of luck")
"""
    # The launcher looks at the trace a few times a second; so does this, and later.
    rest = """
if run.worker == 0:
    wait_until(lambda: in_the_trace(type="update", update=8))
    time.sleep(0.5)
    tell("seen")
    wait_until(lambda: in_the_trace(type="left", worker=1))
"""
    ran = launch(troubled(QUIET) + source + rest, steps=STEPS, restart=True)
    assert ran.code == 1
    assert messages_about("worker 1", ran.err) == ["failed with exit code 1"]
    assert ran.kept.keys() == {0, 1}


# ------------------------------------------------------------------ failures of all processes


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(("error", "code"), [("ValueError", 1), ("paceline.SpecError", 2)])
def test_same_failure_in_all_workers_ends_the_run(launch, workers, error, code, monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 30.0)  # nothing waits for this
    trouble = f"""
def trouble(run):
    raise {error}("out of luck")
"""
    ran = launch(troubled(trouble), workers=workers, steps=STEPS, restart=True)
    assert ran.code == code
    assert ran.err.count(": out of luck") == 1
    why = (
        "the only worker is gone; ending the run"
        if workers == 1
        else "all workers failed in the same way; ending the run"
    )
    assert ran.err.splitlines().count(f"paceline  | {why}") == 1
    first = next(line for line in ran.err.splitlines() if "out of luck" in line)[:8]
    alike = [line for line in ran.err.splitlines() if f"in the same way as {first}" in line]
    assert len(alike) == workers - 1
    assert counts(ran.trace) == []


def test_failure_of_the_script_in_the_server_ends_the_run(launch_failing):
    trouble = """
if ROLE == "server":
    raise ValueError("out of luck")
"""
    code, err = launch_failing(troubled(trouble + QUIET))
    assert code == 1
    assert sum("ValueError: out of luck" in line for line in err) == 1
    assert "paceline  | server failed with exit code 1" in err
    assert not any("restarting" in line for line in err)


# ------------------------------------------------------------------------------------- the server


def test_killed_server_is_restarted_and_the_run_finishes(launch):
    trouble = """
def trouble(run):
    if run.worker == 0 and run.version == 3 and not was_told("server-struck"):
        tell("server-struck")
        os.kill(server_pid(), signal.SIGKILL)
"""
    ran = launch(troubled(trouble), steps=STEPS, restart=True)
    assert ran.code == 0, ran.err
    assert messages_about("server", ran.err) == [
        "was killed by SIGKILL; restarting in 0.01 s (attempt 1 of 5)"
    ]
    assert {kept["version"] for kept in ran.kept.values()} == {STEPS}
    assert list(ran.trace.updates())[-1].update == STEPS


def test_launcher_gives_up_on_a_server_after_five_failed_restarts(launch_failing):
    trouble = """
if ROLE == "server":
    os.kill(os.getpid(), signal.SIGKILL)
"""
    code, err = launch_failing(troubled(trouble + QUIET))
    assert code == 1
    words = messages_about("server", "\n".join(err))
    assert len(words) == 6
    assert words[-1] == "was killed by SIGKILL; gave up after 5 failed restarts"


# ---------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize("who", ["worker", "server"])
def test_interrupt_during_a_restart_pause_ends_the_run(launch_failing, monkeypatch, who):
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 30.0)  # nothing waits for this
    victim = "int(wait_for('pid-1'))" if who == "worker" else "server_pid()"
    trouble = f"""
tell(f"pid-{{WORKER}}", os.getpid())

def trouble(run):
    if run.worker == 0 and run.version == 3:
        pid = {victim}
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{{pid}}").exists())
        time.sleep(0.2)  # the launcher learns of it
        os.kill({os.getpid()}, signal.SIGINT)
"""
    code, err = launch_failing(troubled(trouble))
    assert code == 130
    assert err.count("paceline  | stopping; interrupt again to stop immediately") == 1
    assert sum("restarting in 30 s (attempt 1 of 5)" in line for line in err) >= 1


# -------------------------------------------------------------------------------------- the pauses


def test_first_pause_is_half_a_second(monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", FIRST_PAUSE_S)
    assert RestartBackoff().next_pause_s(0) == 0.5


def test_pauses_double_up_to_a_limit_and_progress_resets_them(monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 4.0)
    backoff = RestartBackoff()
    assert [backoff.next_pause_s(0) for _ in range(3)] == [4.0, 8.0, 16.0]
    assert [backoff.next_pause_s(7) for _ in range(6)] == [4.0, 8.0, 16.0, 30.0, 30.0, None]
    assert backoff.next_pause_s(7) is None
    assert backoff.next_pause_s(8) == 4.0


# ------------------------------------------------------------------------------------ the address

STRANGER = """
def try_to_take_the_address():
    name = os.environ["PACELINE_ADDRESS"].replace("unix:@", chr(0))
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.bind(name)
        except OSError:
            return
        tell("taken")

def trouble(run):
    if run.version == 3 and run.worker == 0 and not was_told("killed"):
        tell("killed")
        pid = server_pid()
        os.kill(pid, signal.SIGKILL)
        while not in_the_trace(type="restored"):
            try_to_take_the_address()
"""


def test_address_cannot_be_taken_while_the_server_restarts(launch):
    ran = launch(troubled(STRANGER), steps=STEPS, restart=True, checkpoint_every="1")
    assert ran.code == 0, ran.err
    assert not (ran.folder / "taken.word").exists()
    assert len(messages_about("server", ran.err)) == 1
