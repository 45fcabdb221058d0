# SPDX-License-Identifier: BSD-3-Clause
"""The lines that the server prints during a run."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from paceline.core.events import ApplyUpdate
from paceline.run.settings import Settings
from paceline.run.system import SYSTEM, System

__all__ = ["Progress"]

EVERY_S = 5.0
NAMED = 5  # workers that a line lists
NOBODY: Mapping[int, float] = MappingProxyType({})


class Progress:
    """Prints how a run is doing."""

    def __init__(self, settings: Settings, system: System = SYSTEM) -> None:
        self._monotonic = system.monotonic
        self._spec = settings.spec
        self._tells = settings.progress
        self._said_at = self._monotonic()
        self._version = self._said_version = 0
        self._samples = self._said_samples = 0
        self._too_few = False  # whether there are fewer workers than an update should take
        self._scalars: dict[str, float] = {}
        self._is_over = False
        self._refused: set[int] = set()  # workers
        self._ignored: set[int] = set()  # workers, for their buffers; -1: one that isn't known

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)

    def restored(self, version: int, samples: int) -> None:
        """Note that the run continues from this version, which used these many samples."""
        self._version, self._samples = version, samples

    def begin(self) -> None:
        """Say that the run begins or continues."""
        self.say("training" if self._version == 0 else f"continuing at version {self._version}")
        self._note()

    def updated(self, action: ApplyUpdate, givers: float, scalars: dict[str, float]) -> None:
        """Note an update; `givers` is how many gradients it could have; inf: any number."""
        self._version = action.update
        self._scalars = scalars
        too_few = givers < action.wanted
        if too_few and not self._too_few:
            self.say(f"continuing with {_workers(givers)}; an update should take {action.wanted}")
        elif self._too_few and not too_few:
            self.say(f"an update takes {action.wanted} workers again")
        self._too_few = too_few

    def refused(self, worker: int) -> None:
        """Say, once per worker, that a gradient was not finite."""
        if worker not in self._refused:
            self._refused.add(worker)
            self.say(
                f"refused a gradient of worker {worker} that contains NaN or infinity; "
                "the trace lists any others"
            )

    def ignored_buffers(self, workers: list[int]) -> None:
        """Say, once per worker, that some of its buffers were not finite; none: it isn't known."""
        for worker in {*workers} or {-1}:
            if worker not in self._ignored:
                self._ignored.add(worker)
                self.say(
                    f"ignored NaN or infinity in the module buffers of "
                    f"{'a worker' if worker < 0 else f'worker {worker}'}, such as the statistics "
                    "of batch norm; they keep their previous values"
                )

    def tick(
        self,
        here: Collection[int],
        begun: bool,
        samples: int,
        waiting_s: Mapping[int, float] = NOBODY,
    ) -> None:
        """Print a line if none was printed for a while.

        `here`: the workers that have joined. `samples`: in the updates so far. `waiting_s`: how
        long the run has waited for workers.
        """
        took_s = self._monotonic() - self._said_at
        self._samples = samples
        if took_s < EVERY_S or self._is_over:  # the launcher says which workers are still running
            return
        if not begun:
            missing = [worker for worker in range(self._spec.workers) if worker not in here]
            joined = f"{len(here)} of {self._spec.workers} have joined"
            waits_s = f" for {max(waiting_s.values()):.0f} s" if waiting_s else ""
            self.say(f"waiting for {_names(missing)}{waits_s}: {joined}")
        elif self._tells:
            rate = (self._version - self._said_version) / took_s
            logged = "".join(f", {name} {value:.4g}" for name, value in self._scalars.items())
            left, alive = self._left(took_s), _workers(len(here))
            waits = _waiting(waiting_s)
            self.say(f"{self._position()}, {rate:.3g} a second{left}, {alive}{logged}{waits}")
        self._note()

    def _note(self) -> None:
        """Note where the run is, because a line was printed."""
        self._said_at = self._monotonic()
        self._said_version, self._said_samples = self._version, self._samples

    def _position(self) -> str:
        """Return how far the run is, with its goal if it has one."""
        steps, samples = self._spec.steps, self._spec.samples
        of = "" if steps is None else f" of {steps}"
        used = "" if samples is None else f", {self._samples} of {samples} samples"
        return f"update {self._version}{of}{used}"

    def _left(self, took_s: float) -> str:
        """Return the time to the goal at the rate of the last `took_s` seconds."""
        left = []
        for goal, now, before in (
            (self._spec.steps, self._version, self._said_version),
            (self._spec.samples, self._samples, self._said_samples),
        ):
            if goal is not None and now > before:
                left.append(max(0, goal - now) * took_s / (now - before))
        return f", {_duration(min(left))} left" if left else ""

    def end(self, version: int, samples: int, took_s: float) -> None:
        """Say that the run has ended; `took_s`: from its beginning to its last update."""
        self._is_over = True
        steps = self._spec.steps
        of = "" if steps is None or version == steps else f" of {steps}"
        self.say(f"{version}{of} updates of {samples} samples in {took_s:.1f} s")


def _duration(seconds: float) -> str:
    """Return a duration as a clock shows it: 0:05, 12:30, 1:02:30."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _waiting(waiting_s: Mapping[int, float]) -> str:
    """Return the end of a line that says which workers the run waits for."""
    if not waiting_s:
        return ""
    return f"; waiting for {_names(sorted(waiting_s))} for {max(waiting_s.values()):.0f} s"


def _workers(number: float) -> str:
    return "1 worker" if number == 1 else f"{number:g} workers"


def _names(workers: Sequence[int]) -> str:
    """Return the numbers of workers in words; of many, only the first ones."""
    shown = ", ".join(map(str, workers[:NAMED]))
    more = f" and {len(workers) - NAMED} more" if len(workers) > NAMED else ""
    return f"worker {shown}" if len(workers) == 1 else f"workers {shown}{more}"
