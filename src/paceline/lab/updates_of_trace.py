# SPDX-License-Identifier: BSD-3-Clause
"""Turn a trace into a training schedule: which mini-batches, at which versions, make each update.

Which gradients count depends only on timing, not on their values. So a run is first simulated, or
recorded with real processes, and its trace then holds everything that training needs. Dropped
gradients aren't part of the schedule, and the weights are those that the policy decided.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.events import Fate
from paceline.errors import TraceError
from paceline.lab.problem import Draw
from paceline.trace.schema import Gap, Gradient, Restored, Trace, Update

__all__ = ["Step", "StepPart", "schedule"]


class StepPart(NamedTuple):
    """A gradient that goes into an update."""

    draw: Draw
    version: int  # of the parameters to compute it with
    samples: int
    weight: float  # proportional to its samples; the weights of an update sum to 1
    scale: float  # multiplies the weight


@dataclass(frozen=True, slots=True)
class Step:
    """An update."""

    update: int
    time: float
    parts: tuple[StepPart, ...]

    @property
    def samples(self) -> int:
        """The number of samples in all its gradients."""
        return sum(part.samples for part in self.parts)


def schedule(trace: Trace, *, requeue: bool = True) -> list[Step]:
    """Return the updates of a run; `requeue`: mini-batches of dropped gradients are used again."""
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
                pass  # its mini-batch is already counted
            case Gradient(worker=worker, version=version, fate=fate, staleness=staleness):
                if fate is Fate.ACCEPTED:
                    draw = Draw(worker, _number_of(record, drawn[worker]))
                    part = (draw, version, record.samples)
                    given[version + staleness + 1].append(part)
                # A non-finite gradient would be non-finite again, so its mini-batch is skipped.
                drawn[worker] += fate in (Fate.ACCEPTED, Fate.NON_FINITE) or not requeue
            case Update(t=time, update=update):
                both = zip(given.pop(update), record.weighted(), strict=True)
                parts = tuple(StepPart(*part, *weighted) for part, weighted in both)
                steps.append(Step(update, time, parts))
            case Restored():
                raise TraceError(
                    f"the run was restored at update {record.version}, and the trace doesn't hold "
                    "what was lost; use the trace of a run without interruptions"
                )
            case Gap():
                raise TraceError(
                    f"the trace has a gap before update {record.version}; use the trace of a run "
                    "without gaps"
                )
            case _:
                pass
    return steps


def _number_of(gradient: Gradient, drawn: int) -> int:
    """Return the number of a gradient's mini-batch; `drawn`: if the worker drew it by itself."""
    numbers = [number for use in gradient.uses for number in use.numbers]
    if len(numbers) > 1:
        raise TraceError(
            f"worker {gradient.worker} computed a gradient on {len(numbers)} mini-batches; use the "
            "trace of a run that computes each gradient on one"
        )
    return numbers[0] if numbers else drawn
