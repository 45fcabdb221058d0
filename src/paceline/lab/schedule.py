# SPDX-License-Identifier: BSD-3-Clause
"""What a trace says of training: which mini-batches, computed at which versions, make each update.

Which gradients count is a matter of time alone, and their numbers do not change it. So a run is
simulated first, or recorded on real processes; its trace then says everything that training needs
to know, and what was dropped is not in it.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.events import Fate
from paceline.errors import TraceError
from paceline.lab.problem import Draw
from paceline.trace.schema import Gradient, Restored, Trace, Update

__all__ = ["Part", "Step", "schedule"]


class Part(NamedTuple):
    """A gradient that counts."""

    draw: Draw
    version: int  # of the parameters that it is computed at
    samples: int
    weight: float  # by its samples; the weights of an update sum to 1
    scale: float  # how much it counts besides, by its staleness


@dataclass(frozen=True, slots=True)
class Step:
    """An update."""

    update: int
    time: float
    parts: tuple[Part, ...]

    @property
    def samples(self) -> int:
        """How many it is made of."""
        return sum(part.samples for part in self.parts)


def schedule(trace: Trace, *, requeue: bool = True) -> list[Step]:
    """The updates of a run; `requeue`: a mini-batch whose gradient was dropped comes again."""
    if not trace.header.has_weights:
        raise TraceError(
            f"the trace has format {trace.header.format}, which doesn't hold the weights of "
            "updates; record the run again"
        )
    drawn: Counter[int] = Counter()  # mini-batches, by worker
    given: defaultdict[int, list[tuple[Draw, int, int]]] = defaultdict(list)  # by update
    steps = []
    for record in trace.records:
        match record:
            case Gradient(fate=Fate.DUPLICATE):
                pass  # of a mini-batch that is counted already
            case Gradient(worker=worker, version=version, fate=fate, staleness=staleness):
                if fate is Fate.ACCEPTED:
                    part = (Draw(worker, drawn[worker]), version, record.samples)
                    given[version + staleness + 1].append(part)
                # One that was not finite would not be so again.
                drawn[worker] += fate in (Fate.ACCEPTED, Fate.NON_FINITE) or not requeue
            case Update(t=time, update=update):
                both = zip(given.pop(update), record.weighted(), strict=True)
                parts = tuple(Part(*part, *weighted) for part, weighted in both)
                steps.append(Step(update, time, parts))
            case Restored():
                raise TraceError(
                    f"the run went back to update {record.version}, and what was lost with its "
                    "server is not known; give a trace of a run without interruptions"
                )
            case _:
                pass
    return steps
