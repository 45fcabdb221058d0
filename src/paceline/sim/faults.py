# SPDX-License-Identifier: BSD-3-Clause
"""Faults of a simulated cluster: workers die, come back, or freeze for a while; links stall.

    kill 3 at 10s              worker 3 dies for good
    kill 3 at 10s for 5s       worker 3 dies and comes back five seconds later
    kill any every 10m for 1m  a random worker, at random times ten minutes apart on average
    freeze 3 at 10s for 5s     worker 3 stops computing for five seconds, but stays connected
    freeze any every 1m for 5s
    stall 3 at 10s for 5s      no parameters or gradients of worker 3 move for five seconds
    stall 3 at 10s             they never move again

Separate several faults with semicolons. A freeze doesn't delay bytes that are in transit. A stall
delays neither small messages nor a server on the same host.
"""

import re
from dataclasses import dataclass
from typing import Literal

from paceline.errors import SpecError
from paceline.spec import parse_seconds

__all__ = ["FAULT_FORM", "Fault", "parse_faults"]

FAULT_FORM = (
    "kill 3 at 10s for 5s; kill any every 10m for 1m; freeze 3 at 10s for 5s; stall 3 at 10s"
)

Kind = Literal["kill", "freeze", "stall"]

_KINDS: dict[str, Kind] = {"kill": "kill", "freeze": "freeze", "stall": "stall"}

_PATTERN = re.compile(
    r"(?P<kind>kill|freeze|stall)\s+(?P<worker>\d+|any)\s+(?P<when>at|every)\s+(?P<time>\S+)"
    r"(\s+for\s+(?P<lasting>\S+))?"
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, which happens once or repeatedly."""

    kind: Kind
    worker: int | None  # None: any
    time: float  # when it happens, or the mean interval if `repeats`
    repeats: bool
    lasting: float | None  # None: forever

    def __str__(self) -> str:
        who = "any" if self.worker is None else self.worker
        when = "every" if self.repeats else "at"
        lasting = "" if self.lasting is None else f" for {self.lasting:g}s"
        return f"{self.kind} {who} {when} {self.time:g}s{lasting}"


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Parse faults separated by semicolons; an empty string means none."""
    return tuple(_parse_fault(part.strip()) for part in text.split(";") if part.strip())


def _parse_fault(text: str) -> Fault:
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise SpecError(f"cannot parse fault {text!r}; write {FAULT_FORM}")
    kind = _KINDS[match["kind"]]
    worker = None if match["worker"] == "any" else int(match["worker"])
    lasting = None if match["lasting"] is None else parse_seconds(match["lasting"], "for")
    time = parse_seconds(match["time"], match["when"])
    repeats = match["when"] == "every"
    if repeats and time == 0:
        raise SpecError(f"fault {text!r}: every must be > 0 seconds")
    if kind == "freeze" and lasting is None:
        raise SpecError(f"fault {text!r}: a freeze needs a duration, e.g. {text} for 5s")
    return Fault(kind, worker, time, repeats, lasting)
