# SPDX-License-Identifier: BSD-3-Clause
"""Options that had another name in an earlier release, and the error that names the new one.

The old names don't work any more: one name for one thing keeps help, docs and scripts readable.
"""

from typing import Any

from typer.core import TyperCommand

from paceline.errors import SpecError

__all__ = ["RENAMED", "VerbCommand"]

RENAMED = {
    "--output": "--show",
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
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # of click, which is part of Typer or not, depending on its age
            old = getattr(error, "option_name", "")
            if RENAMED.get(old) not in known:
                raise
            raise SpecError(f"{old} is now {RENAMED[old]}; see {ctx.command_path} --help") from None
