# SPDX-License-Identifier: BSD-3-Clause
"""The command line as a whole: help, usage errors and exit codes."""

import re
from importlib import import_module

import pytest

from cli_fixtures import Call, call_script, one_line
from paceline.errors import InternalError, PacelineError, PeerLost, ProtocolError

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


def test_help_lists_the_verbs(call: Call) -> None:
    answer = call("--help")
    assert (answer.code, answer.err) == (0, "")
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
