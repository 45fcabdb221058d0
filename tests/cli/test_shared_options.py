# SPDX-License-Identifier: BSD-3-Clause
"""The step from a dataclass of options to a command."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner, Result

from paceline.cli.shared_options import RULES, accepts
from paceline.core.policies import POLICIES


@dataclass(frozen=True, kw_only=True)
class PaintOptions:
    """The options of a command that exists only here."""

    wall: Annotated[str, typer.Argument()]
    colour: Annotated[str, typer.Option("--colour", "-c", help="Which colour.")] = "red"
    coats: int = 1


def paint(*words: str) -> tuple[list[PaintOptions], Result]:
    """Run the command, and return the options it was called with."""
    received: list[PaintOptions] = []
    app = typer.Typer(add_completion=False, rich_markup_mode=None)

    @app.command()
    @accepts(PaintOptions)
    def paint_wall(options: PaintOptions) -> None:
        """Paint a wall."""
        received.append(options)

    return received, CliRunner().invoke(app, words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("north",), PaintOptions(wall="north")),
        (("-c", "blue", "north"), PaintOptions(wall="north", colour="blue")),
        (("north", "--coats", "2"), PaintOptions(wall="north", coats=2)),
    ],
    ids=["defaults", "short name", "typed"],
)
def test_command_receives_one_object_with_all_options(
    words: tuple[str, ...], expected: PaintOptions
) -> None:
    received, result = paint(*words)
    assert result.exit_code == 0
    assert received == [expected]


def test_help_shows_the_docstring_of_the_verb_and_of_each_option() -> None:
    received, result = paint("--help")
    assert received == []
    for text in ("Paint a wall.", "-c, --colour", "Which colour.", "[default: red]", "--coats"):
        assert text in result.output


@pytest.mark.parametrize("words", [(), ("north", "--coats", "many")], ids=["missing", "wrong type"])
def test_wrong_value_is_refused_before_the_verb_is_called(words: tuple[str, ...]) -> None:
    received, result = paint(*words)
    assert (received, result.exit_code) == ([], 2)


def test_help_names_every_rule_but_free() -> None:
    named = {rule for rule in POLICIES if f"{rule} (" in RULES or f"{rule}:" in RULES}
    assert named == set(POLICIES) - {"free"}
