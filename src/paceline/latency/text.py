# SPDX-License-Identifier: BSD-3-Clause
"""Parse and format the elements of latency strings: numbers, durations, percentages, worker ids.

Every formatted value parses back to an equal value.
"""

import re
from collections.abc import Iterable
from decimal import Decimal

from paceline.errors import SpecError
from paceline.spec import parse_seconds

__all__ = [
    "format_ids",
    "format_number",
    "format_percent",
    "format_seconds",
    "parse_ids",
    "split_percent",
]

_PERCENT = re.compile(r"([^%+:]*)%(.*)", re.DOTALL)
_IDS = re.compile(r"(\d{1,6})(?:\s*-\s*(\d{1,6}))?", re.ASCII)


def parse_ids(text: str) -> tuple[int, ...]:
    """Parse worker ids such as "0,3-5"."""
    ids: list[int] = []
    for part in text.split(","):
        found = _IDS.fullmatch(part.strip())
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise SpecError(f"worker ids must be like 0,3-5, got {part.strip()!r}")
        ids += range(int(found[1]), int(found[2] or found[1]) + 1)
    return tuple(ids)


def format_ids(ids: Iterable[int]) -> str:
    """Format ascending ids as in "workers 0,3-5"."""
    runs: list[list[int]] = []
    for worker in ids:
        if runs and worker == runs[-1][-1] + 1:
            runs[-1][1:] = [worker]
        else:
            runs.append([worker])
    texts = ["-".join(map(str, run)) for run in runs]
    return f"worker{'' if texts == [str(runs[0][0])] else 's'} {','.join(texts)}"


def format_number(number: float) -> str:
    """Format a number so that it parses back to an equal one."""
    return repr(float(number)).removesuffix(".0")


def format_seconds(seconds: float) -> str:
    """Format a duration, as briefly as possible, so that it parses back to an equal one."""
    texts = [f"{format_number(seconds * 1000)}ms", f"{format_number(seconds)}s"]
    return min((text for text in texts if parse_seconds(text, "time") == seconds), key=len)


def format_percent(share: float) -> str:
    """Format a probability so that it parses back to an equal one."""
    return f"{Decimal(repr(float(share))).scaleb(2):f}%"


def split_percent(text: str) -> tuple[float | None, str]:
    """Return the leading percentage as a probability, or None, and the rest of the text."""
    found = _PERCENT.fullmatch(text.strip())
    if found is None:
        return None, text.strip()
    try:
        # Decimal, because not every probability is a float divided by 100.
        share = float(Decimal(found[1].strip()).scaleb(-2))
    except (ArithmeticError, ValueError):
        share = -1.0
    if not 0 <= share <= 1:
        raise SpecError(f"percentage must be from 0% to 100%, got {found[1] + '%'!r}; write 5%")
    return share, found[2].strip()
