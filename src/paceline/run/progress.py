# SPDX-License-Identifier: BSD-3-Clause
"""What the server says while a run goes on: plain lines, few of them."""

from time import monotonic

from paceline.core.events import ApplyUpdate
from paceline.spec import RunSpec

__all__ = ["Progress"]

EVERY_S = 5.0


class Progress:
    """Says how a run gets on."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._said_at = self._began = monotonic()
        self._version = self._said_version = 0
        self._too_few = False  # workers, for what the rule wants
        self._scalars: dict[str, float] = {}

    def say(self, text: str) -> None:
        """One line."""
        print(text, flush=True)

    def begin(self) -> None:
        """The run begins, or goes on."""
        self.say("training" if self._version == 0 else "going on")
        self._said_at, self._said_version = monotonic(), self._version
        if self._version == 0:
            self._began = self._said_at

    def updated(self, action: ApplyUpdate, workers: int, scalars: dict[str, float]) -> None:
        """An update was made, with so many workers alive."""
        self._version = action.update
        self._scalars = scalars
        too_few = workers < action.wanted
        if too_few and not self._too_few:
            self.say(f"going on with {workers} workers; an update should take {action.wanted}")
        elif self._too_few and not too_few:
            self.say(f"an update takes {action.wanted} workers again")
        self._too_few = too_few

    def tick(self, workers: int, begun: bool) -> None:
        """Time has passed."""
        now = monotonic()
        if now - self._said_at < EVERY_S:
            return
        if not begun:
            self.say(f"waiting for workers: {workers} of {self._spec.workers} are here")
        else:
            rate = (self._version - self._said_version) / (now - self._said_at)
            of = "" if self._spec.steps is None else f" of {self._spec.steps}"
            logged = "".join(f", {name} {value:.4g}" for name, value in self._scalars.items())
            self.say(f"update {self._version}{of}, {rate:.3g} a second, {workers} workers{logged}")
        self._said_at, self._said_version = now, self._version

    def end(self, version: int, samples: int) -> None:
        """The run is over."""
        took_s = monotonic() - self._began
        steps = self._spec.steps
        of = "" if steps is None or version == steps else f" of {steps}"
        self.say(f"{version}{of} updates of {samples} samples in {took_s:.1f} s")
