# SPDX-License-Identifier: BSD-3-Clause
"""Format numbers for people: three digits and a unit, percentages, counts, lists."""

__all__ = [
    "human_bytes",
    "human_seconds",
    "join_words",
    "named_workers",
    "percent",
    "plural",
    "three_digits",
    "times",
]

_SMALL_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_LARGE_UNITS = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"))


def three_digits(value: float) -> str:
    """Return about three digits, never in scientific notation: 1.74, 51.2, 236, 6,100."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def human_seconds(seconds: float) -> str:
    """Return a duration with three digits and a unit: 51.2 ms, 1.74 s, 2.5 h."""
    for size, unit in _LARGE_UNITS:
        if seconds >= 2 * size:
            return f"{three_digits(seconds / size)} {unit}"
    for size, unit in _SMALL_UNITS:
        if seconds >= size:
            return f"{three_digits(seconds / size)} {unit}"
    return f"{three_digits(seconds / 1e-6)} us"


def human_bytes(size: float) -> str:
    """Return a size with three digits and a unit: 12.5 MB."""
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= scale:
            return f"{three_digits(size / scale)} {unit}"
    return f"{three_digits(size)} B"


def percent(share: float) -> str:
    """Return a share as a percentage; a small one is not rounded to zero."""
    if 0 < share < 0.0005:
        return "<0.1 %"
    return f"{100 * share:.1f} %" if 0 < share < 0.1 else f"{100 * share:.0f} %"


def plural(count: int, what: str) -> str:
    """Return a count with its noun: 1 update, 2 updates, 1,000 updates."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def times(count: int) -> str:
    """Return how often: once, twice, 3 times."""
    return {1: "once", 2: "twice"}.get(count, f"{count:,} times")


def join_words(words: list[str]) -> str:
    """Return a list in words: A, B and C."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def named_workers(workers: list[int], most: int) -> str:
    """Return "Worker 3" or "Workers 3 and 5"; for more than `most`, only "12 workers"."""
    if len(workers) > most:
        return f"{len(workers)} workers"
    if len(workers) == 1:
        return f"Worker {workers[0]}"
    return f"Workers {join_words([str(w) for w in workers])}"
