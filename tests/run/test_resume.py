# SPDX-License-Identifier: BSD-3-Clause
"""The folder of a run: who holds it, what is kept in it, and what `--resume` takes from it."""

import json
import sys

import pytest

from paceline.errors import SpecError
from paceline.run.folder import fill, hold
from paceline.run.launch import Launch
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from trouble import LOOP, TRAINING, counts, troubled

QUIET = "def trouble(run): pass\n"

PRINTS = (
    TRAINING
    + QUIET
    + LOOP
    + """
import json
spec = json.loads((OUT / "spec.json").read_text())["spec"]
print("given", sys.argv[2:], "workers", spec["workers"])
"""
)


@pytest.fixture
def stopped(call, script, tmp_path):
    """A run that has come to its end, in the folder `run`."""
    path = script(PRINTS)
    words = ("--steps", 2, "-p", "async", "--run-dir", "run", "--patience", "2m")
    code, _, err = call("run", "-w", 1, *words, path, "run", "--lr", "0.1")
    assert code == 0, err
    return tmp_path / "run"


# -------------------------------------------------------------------------------- what it is given


def test_the_folder_says_what_was_run(stopped):
    settings = Settings.read(stopped / "spec.json")
    assert settings.spec == RunSpec(workers=1, steps=2)
    assert (settings.policy, settings.patience_s) == ("async", 120.0)
    assert settings.script == str(stopped.parent / "script.py")
    assert settings.arguments == ("run", "--lr", "0.1")


def test_a_run_is_resumed_as_it_was(stopped, call):
    before = Settings.read(stopped / "spec.json")
    token = (stopped / "token").read_text()
    code, out, err = call("run", "--resume", "run")
    assert code == 0, err
    assert "worker 0  | given ['--lr', '0.1'] workers 1" in out.splitlines()
    assert Settings.read(stopped / "spec.json") == before
    assert (stopped / "token").read_text() != token
    assert "The trace is run/trace.jsonl" in err.splitlines()


def test_what_the_command_line_gives_is_changed_and_nothing_else(stopped, call):
    code, out, err = call(
        "run", "--resume", "run", "-w", 2, "--samples", 9, "--checkpoint-every", "5"
    )
    assert code == 0, err
    assert "worker 1  | given ['--lr', '0.1'] workers 2" in out.splitlines()
    settings = Settings.read(stopped / "spec.json")
    assert settings.spec == RunSpec(workers=2, steps=None)  # it has another end now
    assert (settings.samples, settings.checkpoint_every) == (9, "5")
    assert (settings.policy, settings.patience_s) == ("async", 120.0)


def test_a_script_that_is_named_takes_the_place_of_the_one_before(stopped, call, tmp_path):
    other = tmp_path / "other.py"
    other.write_text((tmp_path / "script.py").read_text().replace("given", "other"))
    code, out, err = call("run", "--resume", "run", other, "run", "x")
    assert code == 0, err
    assert "worker 0  | other ['x'] workers 1" in out.splitlines()
    assert Settings.read(stopped / "spec.json").script == str(other)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([], "which script? call it as: paceline run train.py; or go on with a run"),
        (["--resume", "nowhere"], "there is no run in nowhere, for it has no spec.json"),
        (["--resume", "empty"], "there is no run in empty, for it has no spec.json"),
        (["--resume", "broken"], "broken/spec.json: "),
        (["--resume", "nameless"], "does not tell the script; name it at the end"),
        (["--resume", "gone"], "there is no script gone.py"),
        (["--resume", "gone", "--run-dir", "new"], "give --resume or --run-dir"),
        (["--resume", "gone", "--steps", "1", "--epochs", "1"], "give one of --steps"),
        (["--resume", "gone", "-w", "0"], "workers must be >= 1, got 0"),
        (["--resume", "gone", "-p", "backup:9"], "b must be smaller than the number of workers"),
        (["--patience", "soon", "script.py"], "patience must be a duration such as"),
        (["--checkpoint-every", "often", "script.py"], "a number of updates or a duration"),
    ],
)
def test_what_cannot_be_resumed_is_one_line_and_exit_code_2(call, tmp_path, words, what):
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


def test_arguments_that_cannot_be_written_down_are_refused(tmp_path, script):
    settings = Settings(spec=RunSpec(workers=1))
    with pytest.raises(SpecError, match="must be UTF-8"):
        Launch(settings, script(""), ("\udcff",), tmp_path)


# --------------------------------------------------------------------------------- who is in it


def test_a_folder_has_one_launcher_at_a_time(tmp_path, script, nursery):
    launch = Launch(Settings(spec=RunSpec(workers=1)), script(""), (), tmp_path, nursery)
    with hold(tmp_path), pytest.raises(SpecError, match="a run is going on in"):
        launch.run()
    with hold(tmp_path):
        pass


def test_checkpoints_that_were_never_finished_are_removed(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "7.ckpt").touch()
    (folder / "8.ckpt.partial").touch()
    fill(tmp_path, Settings(spec=RunSpec(workers=1)))
    assert [file.name for file in folder.iterdir()] == ["7.ckpt"]


# ------------------------------------------------------------------------------ what is kept in it


def test_what_each_process_prints_is_kept_in_its_own_file(launch, tmp_path):
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
        b"one", b"", b"two\xff", b"100 %", b"no end",
    ]  # fmt: skip
    assert not (folder / "worker-0.log").exists()


def test_what_a_run_printed_before_it_was_resumed_is_still_there(stopped, call):
    call("run", "--resume", "run")
    kept = (stopped / "output" / "worker-0.log").read_text().splitlines()
    assert kept.count("given ['--lr', '0.1'] workers 1") == 2


def test_a_disk_that_is_full_does_not_end_the_run(script, tmp_path, capsys, nursery):
    source = "\nfor i in range(50):\n    print(i, flush=True)\n"
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "worker-0.log").symlink_to("/dev/full")
    settings = Settings(spec=RunSpec(workers=2, steps=3))
    path = script(troubled(QUIET) + source)
    code = Launch(settings, path, (str(tmp_path),), tmp_path, nursery).run()
    out, err = capsys.readouterr()
    assert code == 0
    assert err.splitlines() == [
        f"paceline  | what is printed is not kept any more, for {tmp_path}/output/worker-0.log: No "
        "space left on device"
    ]
    assert out.splitlines().count("worker 0  | 49") == 1


def test_a_failure_is_in_the_file_of_each_process_that_had_it(launch, tmp_path):
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


def test_a_screen_is_given_every_line_and_ticks_until_it_is_closed(script, tmp_path, nursery):
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
    settings = Settings(spec=RunSpec(workers=1, steps=3), progress=False)
    path = script(troubled(QUIET) + "print('last')\nprint('bad', file=sys.stderr)\n")
    code = Launch(settings, path, (str(tmp_path),), tmp_path, nursery).run(screen)
    assert code == 0
    assert ("worker 0  | last", True) in screen.lines
    assert ("worker 0  | bad", False) in screen.lines
    assert screen.ticks >= 1
    assert screen.closed == 1
    assert json.loads((tmp_path / "spec.json").read_text())["progress"] is False
