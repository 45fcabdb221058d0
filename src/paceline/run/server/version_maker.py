# SPDX-License-Identifier: BSD-3-Clause
"""Make a version from the gradients that the core has decided on, if they are usable.

The average of an update is measured anyway. If it isn't finite, the version is made without a step,
and the gradients are looked at one by one. A worker that reported a finite gradient and sent
another one has broken the protocol: it leaves the run, and the launcher restarts it. An overflow of
the sum is nobody's fault.
"""

from math import isfinite, sqrt

from paceline.core.events import ApplyUpdate
from paceline.run.server.progress import Progress
from paceline.run.server.roster import Roster
from paceline.run.server.run_failure import RunFailure
from paceline.run.tensors.shard import Shard

__all__ = ["VersionMaker"]

CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_

NOT_AS_REPORTED = (
    "its gradient contains NaN or infinity, but its report said that it doesn't; don't change "
    "gradients through grad.data between backward() and step()"
)


class VersionMaker:
    """Makes the versions of a run, one per update."""

    def __init__(
        self,
        shard: Shard,
        roster: Roster,
        failures: RunFailure,
        progress: Progress,
        clip_norm: float | None,
    ) -> None:
        self._shard = shard
        self._roster = roster
        self._failures = failures
        self._progress = progress
        self._clip_norm = clip_norm
        self.skipped = 0
        """How many updates of the run were made without a step."""

    def make(self, action: ApplyUpdate) -> float | None:
        """Make the update; return its squared norm, None if it isn't finite."""
        sq_norm = self._shard.reduce(action)
        if not isfinite(sq_norm):
            self._skip(action.update)
            return None
        self._shard.step(action.update, self._clipping(sq_norm))
        senders = self._shard.publish(action.update)
        if senders is not None:
            self._progress.ignored_buffers(senders)
        self._failures.count_step()
        return sq_norm

    def _skip(self, update: int) -> None:
        """Make a version without a step; workers that are to blame for it leave the run."""
        workers = self._shard.workers_to_blame(update)
        self._shard.skip(update)
        self.skipped += 1
        self._failures.count_skipped()
        self._progress.say(f"update {update} is not finite: the optimizer did not step")
        for worker in workers:
            peer = self._roster.get(worker)
            if peer is not None:  # it may have left already
                self._roster.refuse(peer, NOT_AS_REPORTED)

    def _clipping(self, sq_norm: float) -> float:
        """Return the factor that clips a gradient of this squared norm."""
        limit = self._clip_norm
        if limit is None or sq_norm <= limit**2:
            return 1.0
        return limit / (sqrt(sq_norm) + CLIP_EPSILON)

    def check_end(self, version: int) -> None:
        """Fail a run that ends at this version and has never stepped."""
        if 0 < version <= self.skipped:
            self._failures.fail(
                f"none of the {version} updates changed the parameters, because their averaged "
                "gradients contained NaN or infinity; lower the learning rate or the scale of the "
                "loss"
            )
