# SPDX-License-Identifier: BSD-3-Clause
"""Find the rule of a trace if a user wrote it: its module is where the run found it."""

from contextlib import suppress
from pathlib import Path

from paceline.core.policies import parse_policy
from paceline.core.policy_import import Folders
from paceline.errors import SpecError
from paceline.run.launch.run_folder import script_folders
from paceline.trace.schema import Restored, Trace

__all__ = ["import_rules", "rule_folders"]


def rule_folders(path: Path) -> Folders:
    """Return where to look for a user's own rule, given the path of the trace."""
    return (*script_folders(path.parent), "")


def import_rules(trace: Trace, path: Path) -> None:
    """Import the modules of the rules in a trace, so that they are found from now on.

    A module that can't be imported is ignored; the first use of its rule says why.
    """
    headers = [trace.header, *(r.header for r in trace.records if isinstance(r, Restored))]
    for rule in dict.fromkeys(header.policy for header in headers):
        with suppress(SpecError):
            parse_policy(rule, rule_folders(path))
