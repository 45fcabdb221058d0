# SPDX-License-Identifier: BSD-3-Clause
"""The rules, one per file, and the parser of their strings.

To add a rule, write a file with a frozen dataclass that derives from `Policy`, add the class to
`POLICIES`, and add a row to the contract table of the tests.
"""

from dataclasses import MISSING, Field, fields
from typing import Any, Literal, get_args, get_origin

from paceline.core.policies.asynchronous import Async
from paceline.core.policies.backup import Backup
from paceline.core.policies.batchsync import BatchSync
from paceline.core.policies.deadline import Deadline
from paceline.core.policies.delayed import Delayed
from paceline.core.policies.softsync import SoftSync
from paceline.core.policies.ssp import Ssp
from paceline.core.policies.sync import Sync
from paceline.core.policy import Policy
from paceline.errors import SpecError
from paceline.spec import Seconds, parse_number, parse_seconds, split_call

__all__ = [
    "POLICIES",
    "Async",
    "Backup",
    "BatchSync",
    "Deadline",
    "Delayed",
    "SoftSync",
    "Ssp",
    "Sync",
    "parse_policy",
]

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (Sync, Backup, BatchSync, Deadline, Async, SoftSync, Ssp, Delayed)
}


def parse_policy(policy: str | Policy) -> Policy:
    """Return the policy that a string describes; a policy is returned unchanged.

    >>> parse_policy("softsync:c=4,lr=constant")
    SoftSync(lr='constant', bound=None, c=4)
    """
    if isinstance(policy, Policy):
        return policy
    name = policy.partition(":")[0].strip()
    kind = POLICIES.get(name)
    if kind is None:
        raise SpecError(f"there is no policy {name!r}; the policies are {', '.join(POLICIES)}")
    try:
        _, values, named = split_call(policy)
        return kind(**_settings(kind, values, named))
    except SpecError as error:
        raise SpecError(f"policy {policy!r}: {error}; write {kind.form}") from None


def _settings(kind: type[Policy], values: list[str], named: dict[str, str]) -> dict[str, Any]:
    known = {f.name: f for f in fields(kind)}
    positional = [f.name for f in known.values() if not f.kw_only]
    if len(values) > len(positional):
        raise SpecError(f"{values[len(positional)]!r} is one value too many")
    given = dict(zip(positional, values, strict=False))
    if twice := given.keys() & named.keys():
        raise SpecError(f"{min(twice)} is given twice")
    given |= named
    if unknown := given.keys() - known.keys():
        raise SpecError(f"{min(unknown)!r} is not one of its settings")
    if missing := [f.name for f in known.values() if f.default is MISSING and f.name not in given]:
        raise SpecError(f"{missing[0]} is missing")
    return {key: _read(known[key], value) for key, value in given.items()}


def _read(setting: "Field[Any]", text: str) -> Any:
    """Parse the value of a policy's setting according to its declared type."""
    kinds = get_args(setting.type) if get_origin(setting.type) is not Literal else ()
    if setting.type is int or int in kinds:
        try:
            return int(text)
        except ValueError:
            raise SpecError(f"{setting.name} must be a whole number, got {text!r}") from None
    if setting.type is float:
        return parse_number(text, setting.name)
    if Seconds in kinds:
        return parse_seconds(text, setting.name)
    return text
