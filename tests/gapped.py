# SPDX-License-Identifier: BSD-3-Clause
"""Traces with a gap, as a server writes them after a full disk."""

from random import Random

import msgspec

from paceline.core.decider import Decider
from paceline.core.policies import parse_policy
from paceline.trace.event_records import record_gap
from paceline.trace.schema import Gap, Record, Trace, Update, event_of

__all__ = ["with_gap", "with_random_gaps"]


def with_gap(trace: Trace, after: int, until: int) -> Trace:
    """Replace everything from update `after` to update `until` of a trace by a gap."""
    decider = Decider(parse_policy(trace.header.policy), trace.header.spec())
    begin = end = 0
    for end, record in enumerate(trace.records):
        event = event_of(record)
        if event is not None:
            decider.handle(event)
        version = record.update if isinstance(record, Update) else None
        if version == after:
            begin = end + 1
        if version == until:
            break
    gap = _gap(decider, end + 1 - begin)
    return Trace(trace.header, [*trace.records[:begin], gap, *trace.records[end + 1 :]])


def with_random_gaps(trace: Trace, seed: int) -> Trace:
    """Replace random records of a trace by gaps, and perhaps cut off its end."""
    rng, count = Random(seed), len(trace.records)
    hidden: set[int] = set()
    for _ in range(rng.choice([1, 1, 2, 3, 8])):
        first = rng.randrange(count)
        hidden |= set(range(first, first + rng.choice([1, 2, 5, 20, count])))
    decider = Decider(parse_policy(trace.header.policy), trace.header.spec())
    records: list[Record] = []
    missing = 0
    for index, record in enumerate(trace.records):
        if index in hidden:
            missing += 1
        else:
            records += [_gap(decider, missing)] if missing else []
            records.append(record)
            missing = 0
        event = event_of(record)
        if event is not None:
            decider.handle(event)
    records += [_gap(decider, missing)] if missing else []
    return Trace(trace.header, records[: rng.choice([len(records), rng.randint(1, len(records))])])


def _gap(decider: Decider, records: int) -> Gap:
    """Return a gap that ends now, as it is read from a file."""
    gap = record_gap(decider.ledger.now, decider.policy, decider.ledger, [])
    gap = msgspec.structs.replace(gap, records=records)
    return msgspec.json.decode(msgspec.json.encode(gap), type=Gap)
