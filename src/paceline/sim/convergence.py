# SPDX-License-Identifier: BSD-3-Clause
"""How many updates a target needs if each update takes N gradients.

With fewer gradients an update is noisier, so more updates are needed. The models are:

    every_gradient_counts   updates ∝ 1/N: only noise matters. This is the most pessimistic model
                            about dropping work, and the default
    noise_scale             updates ∝ 1 + B_noise/(N·B), where B is the batch of a worker and
                            B_noise the gradient noise scale (McCandlish et al. 2018)
    measured                interpolates a table of N and the updates that were needed
    at_least                a noise scale that is only known to be at least this large: the noise
                            scale grows while a model trains, so a short pilot run measures far too
                            small a value

Each model describes its assumption in words. All but the table are calibrated so that N = W, full
synchronous training, needs the given number of updates. A model that isn't sure has several
`scenarios`; the planner then chooses the N that does well in all of them.
"""

import csv
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.core.events import Fate
from paceline.errors import SpecError, TraceError
from paceline.trace.schema import Gradient, Trace

__all__ = [
    "Convergence",
    "at_least",
    "estimate_noise_scale",
    "every_gradient_counts",
    "measured",
    "noise_scale",
    "read_table",
]

Floats = NDArray[np.float64]
Updates = Callable[[Floats], Floats]

NOISE_LEVELS = 25  # scenarios between the smallest noise scale and infinity
NOISE_MOST = 100.0  # the largest finite one, in batches of all workers; above, it's like infinity


@dataclass(frozen=True, slots=True)
class Convergence:
    """The number of updates that a target needs, as a function of the contributions N."""

    updates: Updates
    assumption: str
    others: tuple[Updates, ...] = ()  # that are possible, too

    @property
    def scenarios(self) -> tuple[Updates, ...]:
        """All functions that are possible, the most likely one first."""
        return self.updates, *self.others


def every_gradient_counts(workers: int, updates: float) -> Convergence:
    """Assume that half the contributions need twice the updates."""
    return Convergence(
        lambda n: updates * workers / n,
        "every gradient counts the same (half the contributions need twice the updates), the worst "
        "case for dropping work; give a noise scale or a table of measured updates to do better",
    )


def noise_scale(samples: float, batch: int, workers: int, updates: float) -> Convergence:
    """Assume that updates go with 1 + B_noise/(N·B), with B_noise = `samples`."""
    if not samples >= 0:
        raise SpecError(f"the noise scale must be >= 0 samples, got {samples}")
    if np.isinf(samples):
        return every_gradient_counts(workers, updates)

    def needed(n: Floats) -> Floats:
        return updates * (1 + samples / (n * batch)) / (1 + samples / (workers * batch))

    return Convergence(
        needed,
        f"the number of updates is proportional to 1 + {samples:.4g}/(N x {batch}): a gradient "
        f"noise scale of {samples:.4g} samples, constant over the run",
    )


def at_least(samples: float, batch: int, workers: int, updates: float) -> Convergence:
    """Assume a noise scale between `samples` and infinity."""
    estimate = noise_scale(samples, batch, workers, updates)
    if np.isinf(samples):
        return estimate
    most = NOISE_MOST * workers * batch
    levels = np.geomspace(max(samples, batch / 100), max(samples, most), NOISE_LEVELS)
    scales = [*levels[1:].tolist(), np.inf]
    return Convergence(
        estimate.updates,
        "the gradient noise scale, which tells how many more updates a smaller N needs, is at "
        f"least the {samples:.4g} samples of the recording, and perhaps much larger, because it "
        "grows during training; the recommended b loses the least in the worst case",
        tuple([noise_scale(scale, batch, workers, updates).updates for scale in scales]),
    )


def measured(table: dict[int, float]) -> Convergence:
    """Interpolate a table of N and updates, linearly in the logarithms.

    Outside the table: ∝ 1/N below the smallest N, constant above the largest.
    """
    if not table:
        raise SpecError("the table of updates is empty; give lines of N,updates")
    if bad := [n for n, u in table.items() if n < 1 or not 0 < u < np.inf]:
        raise SpecError(f"N must be >= 1 and updates > 0, got {bad[0]},{table[bad[0]]:g}")
    ns = np.array(sorted(table), dtype=float)
    us = np.array([table[int(n)] for n in ns])

    def needed(n: Floats) -> Floats:
        inside = np.exp(np.interp(np.log(n), np.log(ns), np.log(us)))
        return np.asarray(np.where(n < ns[0], us[0] * ns[0] / n, inside))

    return Convergence(
        needed,
        f"the number of updates is interpolated between the measurements at N = "
        f"{', '.join(f'{n:g}' for n in ns)}, proportional to 1/N below them and constant above",
    )


def read_table(path: str | os.PathLike[str]) -> dict[int, float]:
    """Read lines of N,updates; the first line may be a heading."""
    name = os.fspath(path)
    try:
        rows = list(csv.reader(Path(path).read_text().splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SpecError(f"cannot read {name}: {reason}") from None
    table: dict[int, float] = {}
    for number, row in enumerate(rows, start=1):
        try:
            n, updates = row
            table[int(n)] = float(updates)
        except ValueError:
            is_heading = number == 1 and any(c.isalpha() for c in "".join(row))
            if row and not is_heading:
                raise SpecError(
                    f"{name}:{number} must be N,updates, got {','.join(row)!r}"
                ) from None
    return table


def estimate_noise_scale(trace: Trace) -> float:
    """Estimate B_noise, in samples, from the squared norms of gradients and of their averages.

    With gᵢ on Bᵢ samples and ḡ on all B samples, E|gᵢ|² = |G|² + S/Bᵢ and E|ḡ|² = |G|² + S/B. These
    two equations give S and |G|²; both are summed over the run before B_noise = S/|G|² is formed.
    The result is infinite if the noise hides the gradient. Only updates whose contributions all
    have the same version count. Raises `TraceError` if there is none with norms.
    """
    by_update: dict[int, list[Gradient]] = defaultdict(list)
    for gradient in trace.gradients():
        if gradient.fate is Fate.ACCEPTED:
            by_update[gradient.version + gradient.staleness + 1].append(gradient)
    noise, signal, rounds = 0.0, 0.0, 0
    for update in trace.updates():
        given = by_update.pop(update.update, [])
        norms = [g.sq_norm for g in given if g.sq_norm is not None]
        one_version = len({g.version for g in given}) == 1
        if update.sq_norm is None or not one_version or not len(norms) == len(given) > 1:
            continue
        total = sum(g.samples for g in given)
        inverse = sum(1 / g.samples for g in given) / len(given)
        s = (sum(norms) / len(norms) - update.sq_norm) / (inverse - 1 / total)
        noise += s
        signal += update.sq_norm - s / total
        rounds += 1
    if not rounds:
        raise TraceError("the trace has no update with gradient norms; give the noise scale")
    return max(0.0, noise) / signal if signal > 0 else float("inf")
