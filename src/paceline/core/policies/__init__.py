# SPDX-License-Identifier: BSD-3-Clause
"""The rules, one per file, and the parser of their strings.

To add a rule, write a file with a frozen dataclass that derives from `Policy`, add the class to
`POLICIES`, and add a row to the contract table of the tests. A rule of a user's own needs none of
this: its string names its module and class.
"""

from dataclasses import MISSING, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from paceline.core.policies.asynchronous import Async
from paceline.core.policies.backup import Backup
from paceline.core.policies.batchsync import BatchSync
from paceline.core.policies.deadline import Deadline
from paceline.core.policies.delayed import Delayed
from paceline.core.policies.softsync import SoftSync
from paceline.core.policies.ssp import Ssp
from paceline.core.policies.sync import Sync
from paceline.core.policy import Policy
from paceline.core.policy_import import Folders, import_policy, split_own
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


def parse_policy(policy: str | Policy, folders: Folders = ("",)) -> Policy:
    """Return the policy that a string describes; a policy is returned unchanged.

    A user's own class is written as "module:Class" or "module:Class:values", and its module is
    searched in these folders first.

    >>> parse_policy("softsync:c=4,lr=constant")
    SoftSync(lr='constant', bound=None, c=4)
    """
    if isinstance(policy, Policy):
        return policy
    kind, values = _kind(policy, folders)
    try:
        _, plain, named = split_call(f"{kind.first_words().rpartition(':')[2]}:{values}")
        return kind(**_settings(kind, plain, named))
    except (TypeError, ValueError) as error:  # ours is a SpecError; a user's class may raise others
        raise SpecError(f"policy {policy!r}: {error}; write {kind.written_form()}") from None


def _kind(text: str, folders: Folders) -> tuple[type[Policy], str]:
    """Return the class of a policy and the text of its values."""
    name, _, values = text.partition(":")
    known = POLICIES.get(name.strip())
    if known is not None:
        return known, values
    own = split_own(text)
    if own is None:
        raise SpecError(
            f"there is no policy {name.strip()!r}; the policies are {', '.join(POLICIES)}, and "
            "MODULE:CLASS for your own"
        )
    module, name, values = own
    try:
        return import_policy(module, name, folders), values
    except SpecError as error:
        raise SpecError(f"policy {text!r}: {error}") from error.__cause__


def _settings(kind: type[Policy], values: list[str], named: dict[str, str]) -> dict[str, Any]:
    known = {f.name: f for f in fields(kind) if f.init}
    positional = [f.name for f in known.values() if not f.kw_only]
    if len(values) > len(positional):
        raise SpecError(f"{values[len(positional)]!r} is one value too many")
    given = dict(zip(positional, values, strict=False))
    if twice := given.keys() & named.keys():
        raise SpecError(f"{min(twice)} is given twice")
    given |= named
    if unknown := given.keys() - known.keys():
        raise SpecError(f"{min(unknown)!r} is not one of its settings")
    needed = [f.name for f in known.values() if f.default is f.default_factory is MISSING]
    if missing := [name for name in needed if name not in given]:
        raise SpecError(f"{missing[0]} is missing")
    try:
        types = get_type_hints(kind)
    except NameError as error:
        raise SpecError(f"the types of its settings can't be found: {error}") from None
    return {name: _read(name, types[name], text) for name, text in given.items()}


def _read(name: str, declared: Any, text: str) -> Any:
    """Parse the value of a policy's setting according to its declared type."""
    kinds = () if get_origin(declared) is Literal else get_args(declared) or (declared,)
    if bool in kinds:
        if text not in ("true", "false"):
            raise SpecError(f"{name} must be true or false, got {text!r}")
        return text == "true"
    if int in kinds:
        try:
            return int(text)
        except ValueError:
            raise SpecError(f"{name} must be a whole number, got {text!r}") from None
    if float in kinds:
        return parse_number(text, name)
    if Seconds in kinds:
        return parse_seconds(text, name)
    return text
