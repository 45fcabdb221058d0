# SPDX-License-Identifier: BSD-3-Clause
"""The command line as a whole: help, usage errors and exit codes."""

import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import pytest

from cli_fixtures import Call, call_script, one_line
from paceline.cli.exit_codes import VERB_CODES
from paceline.errors import InternalError, PacelineError, PeerLost, ProtocolError
from paceline.lab.experiments import EXPERIMENTS
from paceline.run.launch.forkserver import ForkServer

# ---- help ----

OPTIONS = {
    "simulate": "--policy --workers --latency --steps --until --trace --network --faults --late "
    "--batch --min-workers --seed --out --plot --json",
    "plan": "--workers --latency --trace --noise-scale --updates-table --updates --policy "
    "--network --faults --late --batch --seed --plot --json",
    "trace show": "--json",
    "trace check": "--json",
}


@pytest.mark.parametrize("verb", OPTIONS)
def test_help_lists_the_options_of_a_verb(verb: str, call: Call) -> None:
    answer = call(*verb.split(), "--help")
    assert answer.code == 0
    mentioned = set(re.findall(r"--[a-z-]+", answer.out))
    assert mentioned >= {*OPTIONS[verb].split(), "--help"}


KINDS = PacelineError.__subclasses__()


def test_help_lists_all_exit_codes(call: Call) -> None:
    _, _, codes = call("--help").words.partition("Exit codes: ")
    found = re.findall(r"\b\d+\b", codes)
    assert found == ["0", "1", "2", "3", "4", "5", "6", "70", "128", "130"]
    assert {str(kind.exit_code) for kind in KINDS} <= set(re.findall(r"\d+", codes))


def examples(verb: str, call: Call) -> list[list[str]]:
    """Return the commands that the help of a verb shows, as a shell would split them."""
    _, _, text = call(*verb.split(), "--help").out.partition("Example")
    block = text.partition("\n\n")[0].replace("\\\n", " ")
    return [shlex.split(line) for line in block.splitlines() if line.strip().startswith("paceline")]


@pytest.mark.parametrize("verb", VERB_CODES)
def test_help_of_a_verb_has_examples_of_that_verb(verb: str, call: Call) -> None:
    shown = examples(verb, call)
    assert shown
    for command in shown:
        assert command[: 1 + len(verb.split())] == ["paceline", *verb.split()]


@pytest.mark.parametrize("verb", ["simulate", "plan", "lab list"])
def test_example_in_the_help_works(verb: str, call: Call) -> None:
    for command in examples(verb, call):
        answer = call(*command[1:])
        assert (answer.code, answer.err) == (0, "")


@pytest.mark.usefixtures("shared_forkserver")
def test_examples_of_training_in_the_help_work_one_after_the_other(
    call: Call, tmp_path: Path, forkserver: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read what those before them wrote, as for a reader who pastes them all."""
    compare = import_module("paceline.cli.compare")
    monkeypatch.setattr(compare, "ForkServer", lambda _: nullcontext(forkserver))
    (tmp_path / "examples").symlink_to(Path(__file__).parents[1] / "examples")
    for verb in ("run", "trace show", "trace check", "compare"):
        for command in examples(verb, call):
            answer = call(*command[1:])
            assert answer.code == 0, answer.err
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"digits-1", "compare-digits-1"}


@pytest.mark.parametrize("verb", ["lab run", "lab figures"])
def test_example_of_the_lab_names_an_experiment(verb: str, call: Call) -> None:
    for _, _, _, name, option in examples(verb, call):
        assert name in EXPERIMENTS
        assert option == "--quick"


def test_help_lists_the_verbs(call: Call) -> None:
    answer = call("--help")
    assert (answer.code, answer.err) == (0, "")
    assert "paceline run -w 4 -p backup:1 train.py" in answer.out
    for verb in ("simulate", "plan", "trace"):
        assert re.search(rf"^ +{verb} +[A-Z]", answer.out, re.MULTILINE)
    assert re.search(r"^ +check +[A-Z]", call("trace", "--help").out, re.MULTILINE)


@pytest.mark.parametrize("words", [(), ("trace",)], ids=str)
def test_call_without_a_verb_prints_help_and_fails(words: tuple[str, ...], call: Call) -> None:
    answer = call(*words)
    assert answer.code == 2
    assert "Usage: paceline" in answer.out + answer.err


# ---- wrong words ----


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["simulate", "--late", "never"], "--late"),
        (["simulate", "--steps", "many"], "--steps"),
        (["simulate", "--colour", "red"], "--colour"),
        (["plan", "--workers", "2.5"], "--workers"),
        (["plan", "surplus"], "surplus"),
        (["trace", "check"], "trace"),
        (["trace", "eat"], "eat"),
        (["dance"], "dance"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_unknown_word_gives_a_usage_line(words: list[str], named: str, call: Call) -> None:
    answer = call(*words)
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.startswith("Usage: paceline")
    assert named in answer.err.lower().splitlines()[-1]


# ---- how it ends ----


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ProtocolError("it broke a rule"), 4),
        (PeerLost("it went away"), 5),
        (InternalError("our fault"), 70),
    ],
    ids=["protocol", "peer", "internal"],
)
def test_error_exits_with_its_code(
    error: Exception, code: int, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(options: object) -> None:
        raise error

    monkeypatch.setattr(import_module("paceline.cli.simulate"), "run", fail)
    assert str(error) in one_line(call("simulate"), code)


def test_interrupt_exits_with_130(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("paceline.cli.simulate"), "run", interrupt)
    answer = call("simulate")
    assert answer.code == 130
    assert answer.out == ""
    assert "Traceback" not in answer.err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["simulate", "--steps", "0"], 2),
        (["trace", "check", "/nowhere/run.jsonl"], 3),
    ],
    ids=["help", "wrong input", "missing trace"],
)
def test_installed_script_exits_with_the_code(words: list[str], code: int) -> None:
    answer = call_script(*words)
    assert answer.code == code
    assert len(answer.err.splitlines()) == (code > 0)


# ---- Ctrl-C ----

SLOW_IMPORT = """
import os, signal
print("importing", flush=True)
signal.pause()
"""

INTERRUPTIBLE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # the process of the tests may ignore it
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_interrupt_during_the_imports_exits_quietly(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(SLOW_IMPORT)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, "-m", "paceline", "run", "train.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate() == ("", "")
    assert process.returncode == 128 + signal.SIGINT
