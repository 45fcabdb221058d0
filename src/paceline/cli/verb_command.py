# SPDX-License-Identifier: BSD-3-Clause
"""The command class of the verbs, for errors in options that say what to do.

Options that had another name in an earlier release don't work any more: one name for one thing
keeps help, docs and scripts readable. The error has the new name.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from typer.core import TyperCommand

from paceline.errors import SpecError

__all__ = ["RENAMED", "VerbCommand"]

RENAMED = {
    "--policies": "--policy",
    "--replay": "--trace",
    "--run-dir": "--out",
    "--save": "--out",
    "--slow": "--latency",
}


class VerbCommand(TyperCommand):
    """A command that names the new option when it is called with an old one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; raise SpecError for an option that was renamed."""
        known = {name for parameter in self.params for name in parameter.opts}
        given = tuple(args)  # parsing takes words away
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # of click, which is part of Typer or not, depending on its age
            old = getattr(error, "option_name", "")
            if RENAMED.get(old) in known:
                raise SpecError(
                    f"{old} is now {RENAMED[old]}; see {ctx.command_path} --help"
                ) from None
            _add_value(error, given)
            raise


def _add_value(error: Any, words: Sequence[str]) -> None:
    """Add the wrong value to the message of an error about it."""
    option, message = getattr(error, "param", None), getattr(error, "message", "")
    if option is None or not message:  # not about a value
        return
    error.message = message = message.removeprefix("Value error, ")
    values = _values(option.opts, words)
    if values and repr(values[-1]) not in message:
        what, _, _ = message.partition(", unable to parse")
        what = what.replace("Input should", "it should").rstrip(".")
        error.message = f"{what}, got {values[-1]!r}"


def _values(names: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return the values that these words give to an option."""
    found = []
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if name in names:
            found.append(value if equals else following)
    return found
