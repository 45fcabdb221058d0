# SPDX-License-Identifier: BSD-3-Clause
"""Which records of a run are missing from its trace.

A run records a gap itself if it couldn't write its trace for a while. If it was killed, or its file
was truncated, the trace simply ends too early. The run's folder shows that: it says whether the run
finished, and its checkpoints say how long the trace was.
"""

import msgspec

from paceline.errors import TraceError
from paceline.trace.schema import Ended, Gap, Restored, Trace, Update
from paceline.watch.words import plural

__all__ = ["MissingPart", "check_complete", "missing_parts", "name_updates"]


NAMED = 5  # gaps that an error lists one by one


class MissingPart(msgspec.Struct, frozen=True):
    """A part of a run that is missing from its trace."""

    t: float  # of the last record before it
    until: float  # when recording continued
    after: int  # the version before it
    version: int  # when recording continued
    records: int | None  # None: not known

    @property
    def updates(self) -> int:
        """How many updates are missing."""
        return max(0, self.version - self.after)


def missing_parts(trace: Trace) -> list[MissingPart]:
    """Return the gaps of a trace, in order."""
    found: list[MissingPart] = []
    version, now = 0, 0.0
    for record in trace.records:
        if isinstance(record, Gap):
            found.append(MissingPart(now, record.t, version, record.version, record.records))
        if isinstance(record, Gap | Restored):
            version = record.version
        elif isinstance(record, Update):
            version = record.update
        now = max(now, record.t)
    return found


def check_complete(trace: Trace, name: str, finished_at: int | None) -> None:
    """Raise `TraceError` if records are missing.

    `finished_at`: the last version of the run if its folder says that it finished.
    """
    if parts := missing_parts(trace):
        updates = {record.update for record in trace.updates()}
        last = max([parts[-1].version, *updates])
        which = ", ".join(name_updates(part) for part in parts[:NAMED])
        which += f", and {len(parts) - NAMED:,} more" if len(parts) > NAMED else ""
        raise TraceError(
            f"{name} has {'a gap' if len(parts) == 1 else 'gaps'}: {which}; it has "
            f"{len(updates):,} of {last:,} updates, and the rest is consistent"
        )
    ends = [record.version for record in trace.records if isinstance(record, Ended)]
    if finished_at is not None and finished_at not in ends[-1:]:
        last = max((update.update for update in trace.updates()), default=0)
        raise TraceError(
            f"{name} has no end, although the run finished: it has {last:,} of {finished_at:,} "
            "updates"
        )


def name_updates(part: MissingPart) -> str:
    """Say in words what is missing: "updates 64 to 480 are missing (2,503 records)"."""
    records = "" if part.records is None else f" ({plural(part.records, 'record')})"
    if part.updates > 1:
        return f"updates {part.after + 1:,} to {part.version:,} are missing{records}"
    if part.updates == 1:
        return f"update {part.version:,} is missing{records}"
    if part.records is None:
        return f"records after update {part.after:,} are missing"
    be = "is" if part.records == 1 else "are"
    return f"{plural(part.records, 'record')} after update {part.after:,} {be} missing"
