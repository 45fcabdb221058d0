# SPDX-License-Identifier: BSD-3-Clause
"""The options of the verbs: their help, and which of them are on the command line."""

from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli import verb_options as options
from paceline.cli.shared_options import accepts
from paceline.cli.verb_options import RunOptions

CLASSES = [getattr(options, name) for name in options.__all__]

every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


@every_class
def test_every_option_has_help(cls: type) -> None:
    hints = get_type_hints(cls, include_extras=True)
    without = [
        field.name
        for field in fields(cls)
        if field.name != "context" and not hints[field.name].__metadata__[0].help
    ]
    assert without == []


@every_class
def test_help_is_made_of_sentences(cls: type) -> None:
    hints = get_type_hints(cls, include_extras=True)
    texts = [h.__metadata__[0].help for name, h in hints.items() if name != "context"]
    assert [text for text in texts if not (text[0].isupper() and text.endswith((".", "]")))] == []


def parse(*words: str) -> RunOptions:
    """Parse the words as the options of `paceline run`."""
    received: list[RunOptions] = []
    app = typer.Typer(add_completion=False, rich_markup_mode=None)

    @app.command(context_settings={"allow_interspersed_args": False})
    @accepts(RunOptions)
    def run(options: RunOptions) -> None:
        received.append(options)

    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return received[0]


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ((), set()),
        (("-w", "4"), {"workers"}),  # given, although it is the default
        (("--steps", "9", "--no-requeue", "train.py"), {"steps", "requeue", "script"}),
        (("train.py", "--steps", "9"), {"script", "arguments"}),
    ],
    ids=["nothing", "a default", "options and a script", "arguments of the script"],
)
def test_given_options_are_those_on_the_command_line(words: tuple[str, ...], given: set) -> None:
    assert parse(*words).given == given


def test_words_after_the_script_are_its_arguments() -> None:
    found = parse("-p", "backup:1", "train.py", "--lr", "0.1", "-w", "8")
    assert (found.script, found.arguments) == (Path("train.py"), ["--lr", "0.1", "-w", "8"])
    assert (found.policy, found.workers) == ("backup:1", 4)
