# SPDX-License-Identifier: BSD-3-Clause
"""The folder of a run: its lock, its files, and what `--resume` reads from it."""

import json
import shutil
import sys

import pytest

from failures import TRAINING, counts, troubled
from paceline.errors import SpecError
from paceline.run.launch.launcher import Launcher
from paceline.run.launch.run_folder import lock, write_run_files
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.trace.schema import Restored

QUIET = "def trouble(run): pass\n"

PRINTS = (
    TRAINING
    + """
import json
import os

before_it_is_prepared = None
run = paceline.join()
is_resumed = (OUT / "weights.pt").exists()
model, optimizer = run.prepare(model, optimizer)
while not run.finished and (is_resumed or run.version < 2):
    optimizer.zero_grad()
    loss_of(run.worker, run.version).backward()
    optimizer.step()
spec = json.loads((OUT / "spec.json").read_text())["spec"]
print("given", sys.argv[2:], "workers", spec["workers"])
print("at", run.version, "in", os.getcwd())
"""
)


@pytest.fixture
def stopped(call, script, tmp_path):
    """Return the folder of a run that made two of four updates."""
    path = script(PRINTS)
    words = ("--steps", 4, "-p", "async", "--out", "run", "--patience", "2m", "--no-restart")
    code, _, err = call("run", "-w", 1, *words, path, tmp_path / "run", "--lr", "0.1")
    assert code == 0, err
    return tmp_path / "run"


@pytest.fixture
def finished(stopped, call):
    """Return the folder of the same run after its last update."""
    code, _, err = call("run", "--resume", "run")
    assert code == 0, err
    return stopped


def restored(folder):
    """Return the versions that the run continued from."""
    trace = read_trace(folder / "trace.jsonl")
    return [record.version for record in trace.records if isinstance(record, Restored)]


# -------------------------------------------------------------------------------- what it is given


def test_folder_has_the_settings_of_the_run(stopped):
    settings = Settings.read(stopped / "spec.json")
    assert settings.spec == RunSpec(workers=1, steps=4)
    assert (settings.policy, settings.patience_s) == ("async", 120.0)
    assert settings.script == str(stopped.parent / "script.py")
    assert settings.arguments == (str(stopped), "--lr", "0.1")
    assert settings.folder == str(stopped.parent)
    assert not settings.restart


def test_resumed_run_keeps_its_settings(stopped, call):
    before = Settings.read(stopped / "spec.json")
    token = (stopped / "token").read_text()
    code, out, err = call("run", "--resume", "run")
    assert code == 0, err
    assert "worker 0  | given ['--lr', '0.1'] workers 1" in out.splitlines()
    assert f"worker 0  | at 4 in {stopped.parent}" in out.splitlines()
    assert restored(stopped) == [2]
    assert Settings.read(stopped / "spec.json") == before
    assert (stopped / "token").read_text() != token
    assert "Trace: run/trace.jsonl" in err.splitlines()


def test_command_line_changes_only_given_settings(stopped, call):
    options = ("-w", 2, "--samples", 9, "--checkpoint-every", "5", "--output", "all")
    code, out, err = call("run", "--resume", "run", *options)
    assert code == 0, err
    assert "worker 1  | given ['--lr', '0.1'] workers 2" in out.splitlines()
    settings = Settings.read(stopped / "spec.json")
    assert settings.spec == RunSpec(workers=2, steps=None, samples=9)  # it has another end now
    assert settings.checkpoint_every == "5"
    assert (settings.policy, settings.patience_s) == ("async", 120.0)


def test_named_script_replaces_the_previous_one(stopped, call, tmp_path):
    other = tmp_path / "other.py"
    other.write_text((tmp_path / "script.py").read_text().replace("given", "other"))
    code, out, err = call("run", "--resume", "run", other, stopped, "x")
    assert code == 0, err
    assert "worker 0  | other ['x'] workers 1" in out.splitlines()
    assert Settings.read(stopped / "spec.json").script == str(other)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([], "no script given; start a run with: paceline run train.py"),
        (["--resume", "nowhere"], "there is no run in nowhere: it has no spec.json"),
        (["--resume", "empty"], "there is no run in empty: it has no spec.json"),
        (["--resume", "broken"], "broken/spec.json: "),
        (["--resume", "nameless"], "does not name the script; add it to the end"),
        (["--resume", "gone"], "there is no script gone.py"),
        (["--resume", "gone", "--out", "new"], "give --resume or --out"),
        (["--resume", "gone", "--steps", "1", "--epochs", "1"], "give only one of --steps"),
        (["--resume", "gone", "-w", "0"], "workers must be >= 1, got 0"),
        (["--resume", "gone", "-p", "backup:9"], "b must be smaller than the number of workers"),
        (["--patience", "soon", "script.py"], "patience must be a duration such as"),
        (["--checkpoint-every", "often", "script.py"], "a number of updates or a duration"),
    ],
)
def test_impossible_resume_is_one_line_and_exit_code_2(call, tmp_path, words, what):
    for name in ("empty", "broken", "nameless", "gone"):
        (tmp_path / name).mkdir()
    (tmp_path / "script.py").touch()
    (tmp_path / "broken" / "spec.json").write_text("{")
    settings = Settings(spec=RunSpec(workers=2))
    settings.write(tmp_path / "nameless" / "spec.json")
    Settings(spec=RunSpec(workers=2), script="gone.py").write(tmp_path / "gone" / "spec.json")
    code, out, err = call("run", *words)
    assert code == 2
    assert out == ""
    assert err.startswith("paceline: ")
    assert what in err
    assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_given_option_overrides_the_stored_one(stopped, call):
    call("run", "--resume", "run", "--restart", "--steps", 3)
    assert Settings.read(stopped / "spec.json").restart
    call("run", "--resume", "run", "--steps", 4)
    assert Settings.read(stopped / "spec.json").restart


def test_resumed_run_keeps_its_working_directory(stopped, call, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, out, err = call("run", "--resume", stopped)
    assert code == 0, err
    assert f"worker 0  | at 4 in {tmp_path}" in out.splitlines()


def test_missing_working_directory_is_reported(stopped, call):
    here, before = stopped.parent, Settings.read(stopped / "spec.json")
    gone = here / "gone"
    told = json.loads((stopped / "spec.json").read_text()) | {"folder": str(gone)}
    (stopped / "spec.json").write_text(json.dumps(told))
    code, _, err = call("run", "--resume", "run")
    assert code == 2
    assert err == (
        f"paceline: the script's working directory {gone} no longer exists; create it, or name the "
        "script and its arguments to run it in the current directory\n"
    )
    code, out, err = call("run", "--resume", "run", "script.py", stopped)
    assert code == 0, err
    assert f"worker 0  | at 4 in {here}" in out.splitlines()
    assert Settings.read(stopped / "spec.json").folder == before.folder


def test_resume_without_a_checkpoint_starts_over_and_says_so(stopped, call):
    shutil.rmtree(stopped / "checkpoints")
    code, out, err = call("run", "--resume", "run")
    assert code == 0, err
    assert "server    | there is no checkpoint: starting from the beginning" in out.splitlines()
    assert restored(stopped) == [0]
    assert [u.update for u in read_trace(stopped / "trace.jsonl").updates()] == [1, 2, 1, 2, 3, 4]


# ---------------------------------------------------------------------------- what changes nothing


def damage_the_checkpoints(folder):
    for file in (folder / "checkpoints").glob("*.ckpt"):
        file.write_bytes(file.read_bytes()[:-10])


def have_another_model(folder):
    path = folder.parent / "script.py"
    path.write_text(
        path.read_text().replace("run = paceline.join()", "MORE\nrun = paceline.join()")
    )
    more = "optimizer.add_param_group({'params': [nn.Parameter(torch.ones(3))]})"
    path.write_text(path.read_text().replace("MORE", more))


def fail_before_it_is_prepared(folder):
    path = folder.parent / "script.py"
    path.write_text(path.read_text().replace("before_it_is_prepared = None", "raise SystemExit(9)"))


def damage_the_trace(folder):
    path = folder / "trace.jsonl"
    path.write_bytes(b"nonsense\n" + path.read_bytes())


def do_nothing(folder):
    pass


@pytest.mark.parametrize(
    ("damage", "words", "code"),
    [
        (damage_the_checkpoints, [], 6),
        (have_another_model, [], 6),
        (fail_before_it_is_prepared, [], 1),
        (damage_the_trace, [], 3),
        (do_nothing, ["-p", "backup:5"], 2),
        (do_nothing, ["nowhere.py"], 2),
    ],
)
def test_refused_resume_leaves_the_settings_unchanged(stopped, call, damage, words, code):
    before = (stopped / "spec.json").read_bytes()
    damage(stopped)
    found, _, err = call("run", "--resume", "run", "-w", 2, "--steps", 9, *words)
    assert found == code, err
    assert (stopped / "spec.json").read_bytes() == before
    assert not (stopped / "spec.next.json").exists()


# ----------------------------------------------------------------------- when nothing is left to do


def test_resuming_a_finished_run_starts_nothing(finished, call):
    token, trace = (finished / "token").read_text(), (finished / "trace.jsonl").read_bytes()
    for words in ([], ["-w", 2], ["--steps", 3]):
        code, out, err = call("run", "--resume", "run", *words)
        assert (code, out) == (0, "")
        assert err == (
            "The run in run has already finished after 4 updates. To train longer: paceline run "
            "--resume run --steps 8\n"
        )
    assert (finished / "token").read_text() == token
    assert (finished / "trace.jsonl").read_bytes() == trace


def test_finished_run_can_be_extended(finished, call):
    code, out, err = call("run", "--resume", "run", "--steps", 6)
    assert code == 0, err
    assert f"worker 0  | at 6 in {finished.parent}" in out.splitlines()
    assert "after 6 updates" in call("run", "--resume", "run")[2]


def test_extended_run_that_fails_is_not_finished(finished, call, tmp_path):
    path = tmp_path / "script.py"
    source = path.read_text()
    path.write_text(source.replace("    optimizer.step()", "    raise ValueError('out of luck')"))
    code, _, err = call("run", "--resume", "run", "--steps", 6)
    assert code == 1
    assert "Continue with: paceline run --resume run" in err.splitlines()
    path.write_text(source)
    code, out, err = call("run", "--resume", "run")
    assert code == 0, err
    assert f"worker 0  | at 6 in {finished.parent}" in out.splitlines()


def test_refused_resume_leaves_a_run_finished(finished, call):
    fail_before_it_is_prepared(finished)
    assert call("run", "--resume", "run", "--steps", 6)[0] == 1
    assert "after 4 updates" in call("run", "--resume", "run")[2]


def test_script_that_failed_after_the_last_update_can_be_resumed(stopped, call, tmp_path):
    path = tmp_path / "script.py"
    source = path.read_text()
    path.write_text(source + "\nraise ValueError('out of luck')\n")
    code, _, err = call("run", "--resume", "run")
    assert code == 1
    assert "Continue with: paceline run --resume run" in err.splitlines()
    path.write_text(source)
    code, out, err = call("run", "--resume", "run")
    assert code == 0, err
    assert f"worker 0  | at 4 in {tmp_path}" in out.splitlines()
    assert "ended at update" not in err
    assert "Continue with" not in err


def test_earlier_end_than_the_current_update_is_reached_immediately(stopped, call):
    code, out, err = call("run", "--resume", "run", "--steps", 1)
    assert code == 0, err
    assert f"worker 0  | at 2 in {stopped.parent}" in out.splitlines()
    assert "ended at update" not in err
    assert "after 2 updates" in call("run", "--resume", "run")[2]


# ------------------------------------------------------------------------------- what is said of it


def test_only_newly_written_weights_are_named(stopped, call, tmp_path):
    weights = "Weights: run/weights.pt"
    path = tmp_path / "script.py"
    source = path.read_text()
    path.write_text("raise ValueError('out of luck')\n" + source)
    code, _, err = call("run", "--resume", "run")
    assert code == 1
    assert (stopped / "weights.pt").exists()
    assert weights not in err.splitlines()
    assert "Continue with: paceline run --resume run" in err.splitlines()
    path.write_text(source)
    code, _, err = call("run", "--resume", "run")
    assert code == 0
    assert weights in err.splitlines()
    assert "Continue with" not in err


def test_first_line_says_that_a_run_is_resumed(stopped, call):
    _, _, err = call("run", "--resume", "run")
    script = stopped.parent / "script.py"
    assert err.splitlines()[0] == f"continuing {script} with 1 worker under async; folder run"


def test_arguments_that_are_not_utf8_are_refused(tmp_path, script):
    told = {"script": str(script("")), "arguments": ("\udcff",)}
    with pytest.raises(SpecError, match="must be UTF-8"):
        Launcher(Settings(spec=RunSpec(workers=1), **told), tmp_path)


# --------------------------------------------------------------------------------- who is in it


def test_folder_has_one_launcher_at_a_time(tmp_path, script, forkserver):
    settings = Settings(spec=RunSpec(workers=1), script=str(script("")))
    launch = Launcher(settings, tmp_path, forkserver)
    with lock(tmp_path), pytest.raises(SpecError, match="another run is active in"):
        launch.run()
    with lock(tmp_path):
        pass


def test_unfinished_checkpoints_are_removed(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "7.ckpt").touch()
    (folder / "8.ckpt.partial").touch()
    write_run_files(tmp_path, Settings(spec=RunSpec(workers=1)), "unix:@name")
    assert [file.name for file in folder.iterdir()] == ["7.ckpt"]


def test_token_is_secret_even_if_an_older_one_was_not(tmp_path):
    (tmp_path / "token").write_text("old")
    (tmp_path / "token").chmod(0o644)
    write_run_files(tmp_path, Settings(spec=RunSpec(workers=1)), "unix:@name")
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "token").read_text() != "old"


# ------------------------------------------------------------------------------ what is kept in it


def test_output_of_each_process_is_saved_in_its_own_file(launch, tmp_path):
    source = """
if ROLE == "server":
    print("I serve")
elif WORKER == 1:
    print("one\\n", flush=True)
    os.write(2, b"two\\xff\\n")
    time.sleep(0.05)  # these are two pipes
    os.write(1, b"10 %\\r50 %\\r100 %\\nno end")
"""
    ran = launch(troubled(source + QUIET), steps=3)
    assert ran.code == 0
    folder = tmp_path / "run-1" / "output"
    assert (folder / "server.log").read_text().startswith("I serve\n")
    assert (folder / "worker-1.log").read_bytes().splitlines() == [
        b"one", b"", b"two\xff", b"10 %", b"50 %", b"100 %", b"no end",
    ]  # fmt: skip
    assert not (folder / "worker-0.log").exists()


def test_output_before_a_resume_is_kept(stopped, call):
    call("run", "--resume", "run")
    kept = (stopped / "output" / "worker-0.log").read_text().splitlines()
    assert kept.count("given ['--lr', '0.1'] workers 1") == 2


def test_full_disk_does_not_stop_the_run(script, tmp_path, capsys, forkserver):
    source = "\nfor i in range(50):\n    print(i, flush=True)\n"
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "worker-0.log").symlink_to("/dev/full")
    told = {"script": str(script(troubled(QUIET) + source)), "arguments": (str(tmp_path),)}
    settings = Settings(spec=RunSpec(workers=2, steps=3), **told)
    code = Launcher(settings, tmp_path, forkserver).run()
    out, err = capsys.readouterr()
    assert code == 0
    assert err.splitlines() == [
        f"paceline  | no longer saving the output: cannot write {tmp_path}/output/worker-0.log: "
        "No space left on device"
    ]
    assert out.splitlines().count("worker 0  | 49") == 1


def test_failure_is_in_the_file_of_each_process_that_had_it(launch, tmp_path):
    trouble = """
def trouble(run):
    raise ValueError("out of luck")
"""
    ran = launch(troubled(trouble))
    assert ran.code == 1
    assert counts(ran.trace) == []
    assert ran.err.count("ValueError: out of luck") == 1
    for worker in (0, 1):
        kept = (tmp_path / "run-1" / "output" / f"worker-{worker}.log").read_text().splitlines()
        assert kept[0] == "Traceback (most recent call last):"
        assert kept[-1] == "ValueError: out of luck"


def test_screen_gets_every_line_and_ticks_until_it_is_closed(script, tmp_path, forkserver):
    class Screen:
        def __init__(self):
            self.lines, self.ticks, self.closed = [], 0, 0

        def line(self, text, to):
            self.lines.append((text, to is sys.stdout))

        def tick(self):
            assert not self.closed
            self.ticks += 1

        def close(self):
            self.closed += 1

    screen = Screen()
    path = script(troubled(QUIET) + "print('last')\nprint('bad', file=sys.stderr)\n")
    told = {"script": str(path), "arguments": (str(tmp_path),)}
    settings = Settings(spec=RunSpec(workers=1, steps=3), progress=False, **told)
    code = Launcher(settings, tmp_path, forkserver).run(screen)
    assert code == 0
    assert ("worker 0  | last", True) in screen.lines
    assert ("worker 0  | bad", False) in screen.lines
    assert screen.ticks >= 1
    assert screen.closed == 1
    assert json.loads((tmp_path / "spec.json").read_text())["progress"] is False
