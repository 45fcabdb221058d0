# SPDX-License-Identifier: BSD-3-Clause
"""Shell completion: the scripts for each shell, and what they offer."""

import os
import subprocess

import pytest

from cli_fixtures import SCRIPT, call_script
from paceline.cli.completion import EXAMPLE_RULES, complete_policy
from paceline.core.policies import POLICIES, parse_policy


@pytest.mark.parametrize(
    ("shell", "word"), [("bash", "complete -o"), ("zsh", "#compdef paceline"), ("fish", "complete")]
)
def test_script_for_the_shell_is_printed(shell: str, word: str) -> None:
    env = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    answer = call_script("--show-completion", shell, env=env)
    assert (answer.code, answer.err) == (0, "")
    assert word in answer.out
    assert "_PACELINE_COMPLETE" in answer.out


def offered(*words: str) -> list[str]:
    """Return what bash offers for the last of these words."""
    asked = {
        "_PACELINE_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(("paceline", *words)),
        "COMP_CWORD": str(len(words)),
    }
    answer = call_script(env={**os.environ, **asked})
    assert (answer.code, answer.err) == (0, "")
    return answer.out.split()


def test_bash_completes_with_the_printed_script() -> None:
    """The script is the one that `--install-completion` writes."""
    env = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    source = call_script("--show-completion", "bash", env=env).out
    words = "COMP_WORDS=(paceline run --policy so) COMP_CWORD=3"
    call = f'_paceline_completion "{SCRIPT}"; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        ["bash", "-c", f"{source}\n{words}\n{call}"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "softsync:4\n"


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_rules_are_offered_to_other_shells_with_their_meaning(shell: str) -> None:
    asked = {
        "_PACELINE_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": "paceline run --policy sy",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    answer = call_script(env={**os.environ, **asked})
    assert (answer.code, answer.err) == (0, "")
    assert "sync" in answer.out
    assert "wait for all workers" in answer.out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("si",), ["simulate"]),
        (("trace", ""), ["show", "check"]),
        (("lab", "f"), ["figures"]),
        (("run", "--lat"), ["--late", "--latency"]),
        (("run", "--policy", "s"), ["sync", "softsync:4", "ssp:3"]),
        (("compare", "-p", "sync", "-p", "ba"), ["backup:1", "batchsync:4"]),
        (("simulate", "-p", "nothing"), []),
        (("simulate", "--late", ""), ["cancel", "finish"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_verbs_options_and_rules_are_completed(words: tuple[str, ...], expected: list[str]) -> None:
    assert offered(*words) == expected


def test_every_rule_is_offered_with_an_example() -> None:
    assert {str(parse_policy(text)).partition(":")[0] for text in EXAMPLE_RULES} == set(POLICIES)
    assert complete_policy("") == list(EXAMPLE_RULES.items())
    assert complete_policy("async") == [("async", "don't wait")]
