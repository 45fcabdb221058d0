# SPDX-License-Identifier: BSD-3-Clause
"""Errors in options: an old name gives the new one, and a wrong value is shown."""

import pytest

from cli_fixtures import Call, one_line
from paceline.cli.verb_command import RENAMED

OLD = [
    ("run --slow 5ms train.py", "--latency"),
    ("compare --slow=5ms train.py", "--latency"),
    ("run --run-dir here train.py", "--out"),
    ("simulate --replay runs/train-1", "--trace"),
    ("simulate -p sync --save run.jsonl", "--out"),
    ("plan --policies sync,async", "--policy"),
]


@pytest.mark.parametrize(("words", "new"), OLD, ids=lambda value: value)
def test_old_name_gives_the_new_one(words: str, new: str, call: Call) -> None:
    verb, *rest = words.split()
    [old] = [name for name in RENAMED if any(word.partition("=")[0] == name for word in rest)]
    line = f"paceline: {old} is now {new}; see paceline {verb} --help\n"
    assert one_line(call(verb, *rest), 2) == line


def test_every_old_name_is_tested() -> None:
    typed = {word.partition("=")[0] for words, _ in OLD for word in words.split()}
    assert set(RENAMED) <= typed


@pytest.mark.parametrize("verb", ["trace check run.jsonl", "lab list"])
def test_old_name_is_unknown_to_a_verb_that_never_had_it(verb: str, call: Call) -> None:
    answer = call(*verb.split(), "--slow", "5ms")
    assert answer.code == 2
    assert answer.err.splitlines()[-1].startswith("Error: No such option: --slow")


def test_script_may_have_an_option_with_an_old_name(call: Call) -> None:
    """What follows the script is the script's, so the error is about the missing script."""
    assert "train.py does not exist" in one_line(call("run", "train.py", "--slow", "5ms"), 2)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("run --steps many train.py", "'--steps': it should be a valid integer, got 'many'"),
        ("run --steps=many train.py", "'--steps': it should be a valid integer, got 'many'"),
        ("run -w 1 --workers 2.5 train.py", "it should be a valid integer, got '2.5'"),
        ("plan --noise-scale x", "'--noise-scale': it should be a valid number, got 'x'"),
        ("lab run --seeds 0", "'--seeds': it should be greater than or equal to 1, got '0'"),
        ("simulate --late never", "'--late': 'never' is not one of 'cancel', 'finish'."),
    ],
    ids=lambda value: value,
)
def test_wrong_value_is_shown(words: str, complaint: str, call: Call) -> None:
    answer = call(*words.split())
    assert answer.code == 2
    assert complaint in answer.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "named"),
    [("plan --noise-scale", "--noise-scale"), ("compare", "script"), ("compare -w 2", "script")],
)
def test_missing_value_is_named(words: str, named: str, call: Call) -> None:
    answer = call(*words.split())
    assert (answer.code, answer.out) == (2, "")
    assert named in answer.err.splitlines()[-1]
