# SPDX-License-Identifier: BSD-3-Clause
"""How many bytes a run moved between its server and its workers, from the records of its gradients.

Nothing is moved where memory is shared. What a worker moved in a turn that it never finished,
because it left, isn't in the trace.
"""

from collections.abc import Iterable, Sequence

import msgspec

from paceline.trace.schema import Gradient
from paceline.watch.words import human_bytes, percent

__all__ = ["Traffic", "traffic_cells", "traffic_line"]


class Traffic(msgspec.Struct, frozen=True):
    """Bytes that were moved."""

    pulled_bytes: float = 0.0  # sent to workers, mostly parameters
    pushed_bytes: float = 0.0  # received from workers, mostly gradients
    vain_bytes: float = 0.0  # of those received: for gradients that went into no update

    def __bool__(self) -> bool:
        """Return whether anything was moved."""
        return bool(self.pulled_bytes or self.pushed_bytes)

    @classmethod
    def of(cls, gradients: Sequence[Gradient], wasted: Sequence[Gradient]) -> "Traffic":
        """Add up the bytes of these gradients; `wasted`: those of them that were in vain."""
        return cls(
            sum(g.pulled_bytes for g in gradients),
            sum(g.pushed_bytes for g in gradients),
            sum(g.pushed_bytes for g in wasted),
        )

    @classmethod
    def total(cls, several: Iterable["Traffic"]) -> "Traffic":
        """Return the sum of these."""
        amounts = [msgspec.structs.astuple(one) for one in several]
        return cls(*(sum(column) for column in zip(*amounts, strict=True)))

    def per(self, count: int) -> "Traffic":
        """Return the mean over this many updates."""
        return Traffic(
            self.pulled_bytes / count, self.pushed_bytes / count, self.vain_bytes / count
        )


def traffic_line(total: Traffic, per_update: Traffic) -> str:
    """Return a sentence on what was moved."""
    unused = ""
    if total.vain_bytes:
        share = percent(total.vain_bytes / total.pushed_bytes)
        unused = f"; {human_bytes(total.vain_bytes)} of that ({share}) was never used"
    return (
        f"Workers pulled {human_bytes(total.pulled_bytes)} "
        f"({human_bytes(per_update.pulled_bytes)} per update) and pushed "
        f"{human_bytes(total.pushed_bytes)} ({human_bytes(per_update.pushed_bytes)} per update)"
        f"{unused}."
    )


def traffic_cells(traffic: Traffic) -> list[str]:
    """Return the cells of a table: pulled, pushed, unused."""
    amounts = (traffic.pulled_bytes, traffic.pushed_bytes, traffic.vain_bytes)
    return [human_bytes(amount) if amount else "-" for amount in amounts]
