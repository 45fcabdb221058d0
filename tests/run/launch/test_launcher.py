# SPDX-License-Identifier: BSD-3-Clause
"""`paceline run`: its output, how it ends, and that it leaves nothing behind."""

import json
import os
import select
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from failures import LOOP, TRAINING, counts, troubled
from paceline.run.launch import hangs, stop_signals
from paceline.trace.reader import read_trace
from paceline.trace.schema import Ended
from paceline.watch.audit import audit

PACELINE = Path(sys.executable).parent / "paceline"
PATIENCE_S = 60  # for what takes at most a second

QUIET = "def trouble(run): pass\n"


def begun(script, folder):
    """Return the first line that is printed for a run of two workers."""
    return f"training {script} with 2 workers under sync; folder {folder}"


def where(folder):
    """Return the lines that are printed when a run has ended."""
    return [f"Trace: {folder}/trace.jsonl", f"Weights: {folder}/weights.pt"]


# ------------------------------------------------------------------------------------ output


def test_each_line_has_the_name_of_its_process(launch):
    source = """
if ROLE == "server":
    print("I serve")
elif WORKER == 1:
    print("one\\ntwo")
    print("three", file=sys.stderr)
    os.write(1, b"caf\\xe9\\n")

def trouble(run):
    if run.worker == 0 and run.version == 2:
        print("four", end="", flush=True)
"""
    ran = launch(troubled(source), steps=3)
    assert ran.code == 0
    for line in (
        "server    | I serve",
        "worker 1  | one",
        "worker 1  | two",
        "worker 1  | caf\N{REPLACEMENT CHARACTER}",
        "worker 0  | four",
    ):
        assert line in ran.out.splitlines()
    assert ran.err.splitlines() == ["worker 1  | three"]


PRINTING = """
print("start of", ROLE, WORKER)
print("warning of", ROLE, WORKER, file=sys.stderr)
"""


def test_only_worker_0_and_the_server_print_to_the_terminal_but_all_errors_are_shown(launch):
    source = PRINTING + QUIET
    ran = launch(troubled(source) + "print('end of', WORKER)\n", workers=3, steps=3, output="first")
    assert ran.code == 0
    assert "server    | start of server -1" in ran.out.splitlines()
    assert [line for line in ran.out.splitlines() if line.startswith("worker")] == [
        "worker 0  | start of worker 0",
        "worker 0  | end of 0",
    ]
    assert sorted(ran.err.splitlines()) == [
        "server    | warning of server -1",
        *(f"worker {worker}  | warning of worker {worker}" for worker in range(3)),
    ]
    for worker in range(3):
        saved = (ran.folder / "output" / f"worker-{worker}.log").read_text().splitlines()
        assert {f"start of worker {worker}", f"end of {worker}"} <= set(saved)


def test_failure_of_a_quiet_worker_is_shown(launch):
    source = """
def trouble(run):
    if run.worker == 2 and run.version == 2:
        raise ValueError("out of luck")
"""
    ran = launch(troubled(source), workers=3, steps=4, output="first")
    assert ran.err.count("worker 2  | ValueError: out of luck") == 1


@pytest.mark.parametrize(("options", "shown"), [([], {0}), (["--output", "all"], {0, 1})])
def test_option_output_chooses_whose_output_is_shown(call, script, options, shown):
    path = script(TRAINING + QUIET + LOOP + "print('done')")
    code, out, _ = call("run", "-w", 2, "--steps", 3, *options, path, path.parent)
    assert code == 0
    assert {int(line[7]) for line in out.splitlines() if line.endswith("  | done")} == shown


def test_last_output_is_shown_however_long_it_is(launch):
    ran = launch(troubled(QUIET) + "print(WORKER * 'x' * 300_000, end='')", steps=3)
    assert ran.code == 0
    assert "worker 1  | " + "x" * 300_000 in ran.out.splitlines()


def test_arguments_after_the_script_reach_it(call, script):
    path = script(TRAINING + QUIET + LOOP + "print(sys.argv[2:])")
    words = ("--lr", "0.1", "-w", "9", "--help", "", "two words")
    out_dir = path.parent / "out"
    out_dir.mkdir()
    options = ("-w", 2, "--steps", 3, "--output", "all")
    code, out, err = call("run", *options, path, out_dir, *words)
    assert code == 0
    assert out.splitlines().count(f"worker 0  | {list(words)}") == 1
    assert out.splitlines().count(f"worker 1  | {list(words)}") == 1
    assert err.splitlines() == [begun(path, "runs/script-1"), *where("runs/script-1")]


def test_each_run_gets_its_own_folder(call, script):
    path = script(TRAINING + QUIET + LOOP)
    for number in (1, 2):
        code, _, _ = call("run", "-w", 1, "--steps", 3, path, path.parent)
        assert code == 0
        trace = read_trace(f"runs/script-{number}/trace.jsonl")
        audit(trace)
        assert len(counts(trace)) == 3


def test_help_has_usage_and_exit_codes(call):
    code, out, _ = call("run", "--help")
    assert code == 0
    for word in ("--policy", "--workers", "--steps", "examples/digits.py", "Exit codes"):
        assert word in out


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["missing.py"], "script missing.py does not exist"),
        (["-p", "magic", "script.py"], "magic"),
        (["-p", "backup:4", "script.py"], "b must be smaller than the number of workers"),
        (["-w", "0", "script.py"], "workers must be >= 1, got 0"),
        (["--steps", "0", "script.py"], "steps must be >= 1, got 0"),
        (["--steps", "5", "--epochs", "1", "script.py"], "give only one of --steps"),
        (["--latency", "soon", "script.py"], "soon"),
        (["--ema", "1", "script.py"], "ema must be"),
        (["--clip-norm", "0", "script.py"], "clip_norm must be > 0"),
        (["--min-workers", "9", "script.py"], "min_workers must be between"),
        (["--seed", "-1", "script.py"], "seed must be >= 0, got -1"),
        (["--out", ".", "script.py"], "is not empty"),
        (["--out", "script.py", "script.py"], "cannot create the run folder"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(call, script, words, what):
    path = script("raise AssertionError('this is never executed')")
    code, out, err = call("run", *words)
    assert code == 2
    assert out == ""
    assert err.startswith("paceline: ")
    assert what in err
    assert err.count("\n") == 1
    assert [entry.name for entry in path.parent.iterdir()] == ["script.py"]


def test_token_is_readable_only_by_its_owner(launch, tmp_path):
    source = """
def trouble(run):
    if run.worker == 0 and run.version == 2:
        token = (OUT / "token").read_text()
        shown = [
            file
            for process in Path("/proc").glob("[0-9]*")
            for file in (process / "cmdline", process / "environ")
            if token.encode() in content(file)
        ]
        tell("shown", json.dumps([len(token), *map(str, shown)]))

def content(file):
    try:
        return file.read_bytes()
    except OSError:  # it has just exited
        return b""
"""
    ran = launch(troubled(source), steps=3)
    assert ran.code == 0, ran.err
    assert json.loads((tmp_path / "run-1" / "shown.word").read_text()) == [64]
    assert stat.S_IMODE((tmp_path / "run-1" / "token").stat().st_mode) == 0o600


# ------------------------------------------------------------------------------ how it ends


def test_failure_before_prepare_has_exit_code_1(call, script):
    path = script("raise SystemExit(7)")
    code, _, err = call("run", "-w", 1, "--steps", 3, "--out", "run", path, "run")
    assert code == 1
    assert "paceline  | server failed with exit code 7" in err.splitlines()


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_interrupt_stops_the_run_cleanly(launch, number, code):
    source = f"""
def trouble(run):
    if run.worker == 1 and run.version == 5:
        os.kill({os.getpid()}, signal.{number})
"""
    ran = launch(troubled(source), steps=None, samples=10**9)
    assert ran.code == code
    assert ran.err == "paceline  | stopping; interrupt again to stop immediately\n"
    end = ran.trace.records[-1]
    assert isinstance(end, Ended)
    assert end.version == len(counts(ran.trace)) >= 5
    assert {kept["version"] for kept in ran.kept.values()} == {end.version}


def test_run_under_nohup_outlives_its_terminal(launch):
    source = f"""
def trouble(run):
    if run.worker == 1 and run.version == 5:
        os.kill({os.getpid()}, signal.SIGHUP)
"""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    try:
        ran = launch(troubled(source), steps=10)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ran.code == 0, ran.err
    assert ran.err == ""


def test_second_interrupt_kills_the_run(call, script, monkeypatch):
    monkeypatch.setattr(stop_signals, "SAME_S", 0.0)  # the second one isn't taken for the first
    monkeypatch.setattr(hangs, "STOP_WORKERS_S", PATIENCE_S)  # it isn't killed for being late
    source = f"""
def trouble(run):
    if run.worker == 1 and run.version == 5:
        os.kill({os.getpid()}, signal.SIGINT)
        wait_until(lambda: in_the_trace(type="stopped"))
        os.kill({os.getpid()}, signal.SIGINT)
        time.sleep(1000)
"""
    path = script(troubled(source))
    code, _, err = call("run", "-w", 2, "--steps", 10**6, "--out", "run", path, "run")
    assert code == 130
    assert err.splitlines().count("paceline  | worker 1 was still running and was killed") == 1


def test_interrupt_before_the_server_is_ready_stops_the_run(call, script):
    source = f"""
if ROLE == "server":
    os.kill({os.getpid()}, signal.SIGINT)
    time.sleep(1000)
"""
    code, _, err = call("run", "-w", 2, "--steps", 9, script(troubled(source + QUIET)), ".")
    assert code == 130
    assert "paceline  | server was killed by SIGTERM" in err.splitlines()
    assert "Trace:" not in err  # there is none yet


# ------------------------------------------------------------------------------ how it starts


def test_workers_start_when_the_server_has_reached_prepare(launch):
    """So a download before `prepare` happens once, and is complete when the others look for it."""
    source = """
if not (OUT / "data").exists():
    (OUT / f"download-by-{ROLE}-{WORKER}").touch()
    time.sleep(0.2)  # others would begin to download meanwhile
    (OUT / "data").touch()
"""
    ran = launch(troubled(source + QUIET), workers=3, steps=3)
    assert ran.code == 0
    assert [file.name for file in ran.folder.glob("download-by-*")] == ["download-by-server--1"]


def test_script_that_never_calls_prepare_is_executed_once_and_explained(call, script):
    path = script("print('nothing to train')")
    code, out, err = call("run", "-w", 3, "--output", "all", "--out", "run", path, "run")
    assert code == 1
    assert out.splitlines() == ["server    | nothing to train"]
    why = "nothing was trained: the script never called run.prepare()"
    assert err.splitlines()[-1] == f"paceline  | {why}"


def test_failure_before_prepare_is_shown_once(call, script):
    path = script("raise ValueError('out of luck')")
    code, out, err = call("run", "-w", 3, "--output", "all", "--out", "run", path, "run")
    assert (code, out) == (1, "")
    assert err.count("ValueError: out of luck\n") == 1
    assert err.splitlines()[-1] == "paceline  | server failed with exit code 1"


def test_server_killed_before_prepare_is_restarted_and_the_workers_start(launch):
    source = """
if ROLE == "server" and not was_told("struck--1"):
    strike()
"""
    ran = launch(troubled(source + QUIET), steps=3, restart=True)
    assert ran.code == 0
    assert [update.update for update in ran.trace.updates()] == [1, 2, 3]
    assert "server was killed by SIGKILL; restarting in 0.01 s (attempt 1 of 5)" in ran.err


# ------------------------------------------------------- the command itself, as a user starts it

ENDLESS = """
def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

def family_of(pid):
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_child = parent_of(process.name) == pid
        except OSError:  # it has just exited
            continue
        if is_child:
            yield int(process.name)
            yield from family_of(int(process.name))

def trouble(run):
    if run.worker == 0 and run.version == 3:
        launcher = parent_of(os.getppid())
        print("family", *family_of(launcher))
    if run.worker == 0 and run.version == 5 and run.last.version == 4:
        wait_for("go-on")
"""


class Started:
    """A launcher in its own session, as in a terminal, with all its processes."""

    def __init__(self, path, folder, steps):
        (folder / "tmp").mkdir(parents=True)
        self.folder, self.script = folder, path
        words = ("run", "-w", "2", "--steps", str(steps), "--out", folder / "run")
        with (folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [PACELINE, *words, path, folder],
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                start_new_session=True,
                env={**os.environ, "TMPDIR": str(folder / "tmp")},
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def wait_until_it_trains(self):
        """Wait until it trains; afterwards it waits for the file `go-on`."""
        line = next((line for line in self.process.stdout if "family" in line), None)
        assert line is not None, (self.folder / "err").read_text()
        # Server, two workers, and the process that they are forked from.
        pids = list(map(int, line.partition("family")[2].split()))
        assert len(pids) == 4
        self._family = [os.pidfd_open(pid) for pid in pids]

    def assert_all_exit(self):
        """Check that all processes exit soon."""
        for fd in self._family:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            assert poll.poll(PATIENCE_S * 1000)
            os.close(fd)

    def wait(self):
        """Wait for its end; return the exit code and its standard error."""
        self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, (self.folder / "err").read_text()

    def trace(self):
        """Return its trace, which is sound."""
        trace = read_trace(self.folder / "run" / "trace.jsonl")
        audit(trace)
        return trace


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_to_the_process_group_stops_the_run_cleanly(script, tmp_path, number):
    """As `timeout` and a closed terminal send it."""
    with Started(script(troubled(ENDLESS)), tmp_path / "one", 10**6) as one:
        one.wait_until_it_trains()
        os.killpg(one.process.pid, number)
        (one.folder / "go-on.word").touch()
        code, err = one.wait()
        assert code == 128 + number
        assert err.splitlines() == [
            begun(one.script, one.folder / "run"),
            "paceline  | stopping; interrupt again to stop immediately",
            *where(one.folder / "run"),
            f"Continue with: paceline run --resume {one.folder}/run",
        ]
        one.assert_all_exit()
        assert isinstance(one.trace().records[-1], Ended)
        assert {file.name for file in one.folder.glob("worker-*.pt")} == {
            "worker-0.pt",
            "worker-1.pt",
        }


def test_interrupting_one_run_does_not_affect_another(script, tmp_path):
    path = script(troubled(ENDLESS))
    with Started(path, tmp_path / "one", 10**6) as one, Started(path, tmp_path / "two", 9) as two:
        one.wait_until_it_trains()
        two.wait_until_it_trains()
        os.killpg(one.process.pid, signal.SIGINT)  # as the terminal does at Ctrl-C
        (one.folder / "go-on.word").touch()
        code, err = one.wait()
        assert code == 130
        assert err.splitlines() == [
            begun(one.script, one.folder / "run"),
            "paceline  | stopping; interrupt again to stop immediately",
            *where(one.folder / "run"),
            f"Continue with: paceline run --resume {one.folder}/run",
        ]
        one.assert_all_exit()
        assert isinstance(one.trace().records[-1], Ended)
        (two.folder / "go-on.word").touch()
        code, err = two.wait()
        assert code == 0
        run_dir = two.folder / "run"
        assert err.splitlines() == [begun(path, run_dir), *where(run_dir)]
        two.assert_all_exit()
        assert counts(two.trace()) == [2] * 9


def test_killed_launcher_leaves_no_processes_or_files(script, tmp_path):
    with Started(script(troubled(ENDLESS)), tmp_path / "one", 10**6) as one:
        one.wait_until_it_trains()
        one.process.kill()
        one.assert_all_exit()
        assert list((one.folder / "tmp").iterdir()) == []


def test_progress_bars_and_invalid_characters_are_shown(call, tmp_path):
    script = tmp_path / "bar.py"
    script.write_text(
        "import os, time\n"
        "import paceline\n"
        "from torch import nn, optim\n"
        "run = paceline.join()\n"
        "model = nn.Linear(1, 1)\n"
        "model, optimizer = run.prepare(model, optim.SGD(model.parameters(), lr=0.1))\n"
        "optimizer.step()\n"
        "for part in (b'\\r 10 %', b'\\r 50 %', b'\\r100 %\\n'):\n"
        "    os.write(1, part)\n"
        "os.write(1, b'caf\\xc3\\xa9\\r\\n\\xff\\n')\n",
        encoding="utf-8",
    )
    code, out, err = call("run", "--workers", 1, "--steps", 1, script)
    lines = [line.split("| ", 1)[1] for line in out.splitlines() if line.startswith("worker 0")]
    assert code == 0, err
    assert lines[-3:] == ["100 %", "café", "\ufffd"]
