# SPDX-License-Identifier: BSD-3-Clause
"""Updates of a shard without a core: a test says which gradients an update is made of."""

from collections.abc import Sequence
from math import isfinite

from paceline.core.events import ApplyUpdate, Contribution
from paceline.run.tensors.shard import Shard
from paceline.run.tensors.sums import SlotGradient

__all__ = ["decide", "make_update"]


def decide(update: int, gradients: Sequence[SlotGradient]) -> ApplyUpdate:
    """Return what the core decides for an update of these gradients, all of the newest version."""
    total = sum(gradient.samples for gradient in gradients)
    return ApplyUpdate(
        update,
        tuple(Contribution(g.worker, update - 1, g.samples, g.scale) for g in gradients),
        tuple(g.samples / total for g in gradients),
        tuple(g.scale for g in gradients),
        len(gradients),
    )


def make_update(shard: Shard, gradients: Sequence[SlotGradient], scale: float = 1.0) -> float:
    """Make the next version of a shard from these gradients; return their squared norm.

    If the norm isn't finite, the update is skipped.
    """
    update = shard.version + 1
    for gradient in gradients:
        shard.add(update, gradient)
    sq_norm = shard.reduce(decide(update, gradients))
    if isfinite(sq_norm):
        shard.step(update, scale)
        shard.publish(update)
    else:
        shard.skip(update)
    return sq_norm
