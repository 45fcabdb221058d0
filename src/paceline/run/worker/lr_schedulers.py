# SPDX-License-Identifier: BSD-3-Clause
"""The schedulers in a worker's script, which follow those on the server.

Like `pace` for optimizers, `Follower` replaces a scheduler's class with a subclass of it. The
scheduler's attributes don't change, so its `state_dict()` is that of a plain one. A call of `step`
in the script is noted and reported to the server with the next gradient; from where the script
calls it, the follower finds out what the scheduler counts (see `paceline.run.tensors.schedules`).
The scheduler of the script then shows what the server's does.

Other workers' calls may have moved the server's scheduler on when a training pass ends here. The
script still shows the old rate then, as a plain script does, until it calls `step` itself or begins
its next batch.
"""

import inspect
import warnings
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import SpecError
from paceline.run.tensors.group_options import KnownOptions, all_options
from paceline.run.tensors.state_spec import SchedulerCalls, SchedulerMode
from paceline.run.worker.scheduler_snapshot import SchedulerSnapshot, copied

__all__ = ["Follower", "TrainingPasses"]


class TrainingPasses(Protocol):
    """The script's training passes over its prepared loaders."""

    @property
    def has_loader(self) -> bool:
        """Whether the script has prepared a loader, perhaps for evaluation only."""

    @property
    def is_in_pass(self) -> bool:
        """Whether a training pass has begun and not ended."""

    @property
    def has_begun(self) -> bool:
        """Whether a training pass was ever begun, even one without batches."""


class _Followed(LRScheduler):
    """A scheduler whose calls a `Follower` notes; each has a class of its own."""

    follower: ClassVar["Follower"]

    def step(self, *arguments: Any, **named: Any) -> None:
        """Note the call; the server's scheduler makes the step."""
        values = [value for value in (*arguments, *named.values()) if value is not None]
        self.follower.note_call(float(values[0]) if values else None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse: the server wouldn't know."""
        raise SpecError(
            "load the state of a scheduler before run.prepare(): during a run the server sets the "
            "learning rate, and a state loaded in a worker would be lost"
        )


class Follower:
    """Keeps a scheduler of the script where the server's is, and notes the script's calls."""

    def __init__(
        self,
        scheduler: LRScheduler,
        number: int,
        optimizer: int,
        worker: int,
        passes: TrainingPasses,
        known: KnownOptions,
    ) -> None:
        """`number`, `optimizer`: their places in the run."""
        self._scheduler = scheduler
        self._number = number
        self.optimizer = optimizer
        self._worker = worker
        self._passes = passes
        self._known = known
        self._takes_metric = _takes_metric(type(scheduler))
        self._is_in_pass = False  # whether the first call was inside a training pass
        self._calls = 0  # of the script in this process
        self._pushes = 0  # of its optimizer in this process
        self._version = 0  # of the parameters
        # At which versions the script made the calls that a new process makes again. A restored
        # server is told of a call when it is back at that version.
        self._versions: list[int] = []
        self._offset_if_new = 0  # calls of the run before those of this process
        self._contributors = 0  # of the update that its optimizer's last gradient went into
        self._shown = 0  # steps that the script's scheduler has made
        self._put_off: tuple[int, float | None] | None = None  # the server's steps and epoch
        self._is_given = False  # whether the script passes the epoch
        self._epoch: float | None = None  # the largest that was passed to it
        self._unreported: set[tuple[int, str]] = set()  # options, by group and name
        self._beginning = SchedulerSnapshot(scheduler)
        self._went_back = False  # and its rates weren't read since
        self._metrics: list[float] = []  # of all calls
        self._metrics_known = 0  # calls of the run whose metrics the server knows
        self._has_all_metrics = True  # false if the server had some from an earlier process
        self._sent: SchedulerCalls | None = None
        kind = type(scheduler)
        own = {"__doc__": kind.__doc__, "follower": self}
        scheduler.__class__ = type(kind.__name__, (_Followed, kind), own)

    # --------------------------------------------------------------------------- of the script

    def note_call(self, argument: float | None) -> None:
        """Note a call of `step` with this epoch or metric."""
        if self._takes_metric and argument is None:
            raise TypeError(f"{type(self._scheduler).__name__}.step() needs a metric")
        self._calls += 1
        if self._calls == 1:
            self._is_in_pass = self._passes.is_in_pass
        if self._repeats_calls:
            self._versions.append(self._version)
        if argument is not None or not self._is_counted_by_server:
            with self._known.change(), self._before_the_server():
                self._step_at_call(argument)

    @contextmanager
    def _before_the_server(self) -> Iterator[None]:
        """Note which options change inside a `with` block."""
        optimizers = [self._scheduler.optimizer]
        before = set(all_options(optimizers))
        yield
        changed = set(all_options(optimizers)) - before
        self._unreported |= {(option.group, option.name) for option in changed}

    def _step_at_call(self, argument: float | None) -> None:
        """Let the script's scheduler do at once what the call will make the server's do."""
        if argument is not None and self._takes_metric:
            if self._worker == 0:
                self._metrics.append(argument)
                self._step_with(argument)
        elif argument is not None:
            self._step_to_epoch(argument)
        elif self._is_given:
            self._step_to_epoch(self._scheduler.last_epoch + 1)
        elif self._is_in_pass:
            self._step_to(self._contributors)
            self.catch_up()
        else:
            self._step_to(self._call_number)

    def count_push(self, optimizer: int) -> None:
        """Note that the script has called `optimizer.step()`."""
        self._pushes += optimizer == self.optimizer

    def settle(self, optimizer: int, contributors: int) -> None:
        """Note how many gradients the update has that the last push went into; 0: none."""
        if optimizer == self.optimizer:
            self._contributors = contributors

    @property
    def _is_counted_by_server(self) -> bool:
        """Whether the server counts gradients or turns by now, so that this call adds nothing."""
        is_regular = self._is_in_pass or (not self._has_passes and self._calls == self._pushes)
        return is_regular and self._calls > 1 and not self._is_given

    @property
    def _has_passes(self) -> bool:
        return self._passes.has_begun or (self._passes.has_loader and not self._pushes)

    @property
    def _repeats_calls(self) -> bool:
        """Whether a new process makes all calls of the run again, after empty passes."""
        return self._has_passes and not self._is_in_pass

    @property
    def _offset(self) -> int:
        """What to add to the calls of this process for their number in the run."""
        return 0 if self._repeats_calls else self._offset_if_new

    @property
    def _call_number(self) -> int:
        """The number in the run of the latest call at or before the current version."""
        if self._repeats_calls:
            return bisect_right(self._versions, self._version)
        return self._calls + self._offset

    @property
    def own_options(self) -> set[tuple[int, str]]:
        """The options, by group and name, that the script has and the server may not have.

        The server doesn't know of the latest calls. Or it knows of those that other scripts make
        after a pass, and this one doesn't.
        """
        if self._takes_metric or not self._repeats_calls:
            return self._unreported
        groups = range(len(self._scheduler.optimizer.param_groups))
        return self._unreported | {(group, "lr") for group in groups}

    # --------------------------------------------------------------------------- to the server

    def report(self, optimizer: int) -> SchedulerCalls | None:
        """Return what the server should know before it gets this push; None if that is nothing."""
        mode = self._mode
        is_counted = mode in ("call", "step", "mini-batch")
        if not self._calls or (is_counted and optimizer != self.optimizer):
            return None
        if mode == "given" and self._epoch is None:  # a restored server knows of no call
            return None
        self._unreported.clear()
        if mode in ("step", "mini-batch"):
            found = SchedulerCalls(self._number, mode, self._calls, self._pushes_before)
            if self._sent is not None and _is_same_ratio(found, self._sent):
                return None
        else:
            found = self._numbered_calls(mode)
        if found == self._sent or (mode == "metric" and not found.metrics):
            return None
        self._sent = found
        return found

    def _numbered_calls(self, mode: SchedulerMode) -> SchedulerCalls:
        calls, offset = self._call_number, self._offset
        metrics = self._metrics[max(0, self._metrics_known - offset) : calls - offset]
        if self._worker == 0:
            self._metrics_known = max(self._metrics_known, calls)
        return SchedulerCalls(self._number, mode, calls, 0, self._epoch, tuple(metrics))

    @property
    def _pushes_before(self) -> int:
        """The pushes before the one that is about to be reported."""
        return self._pushes - 1

    @property
    def _mode(self) -> SchedulerMode:
        if self._takes_metric:
            return "metric"
        if self._is_given:
            return "given"
        if self._is_in_pass:
            return "mini-batch"
        if self._has_passes:
            return "epoch"
        return "step" if self._calls == self._pushes_before else "call"

    # ------------------------------------------------------------------------- from the server

    def join(self, steps: int) -> None:
        """Continue at a server whose scheduler has made this many steps."""
        self._offset_if_new = steps - self._calls
        self._has_all_metrics &= steps == self._calls or (
            self._repeats_calls and steps < self._calls
        )
        self._metrics_known = steps
        self._sent = None
        self._put_off = None
        self._unreported.clear()

    def go_back(self, steps: int, epoch: float | None) -> None:
        """Return to the beginning if the server's scheduler is behind, for `follow` to go on."""
        is_earlier = self._epoch is not None and (epoch is None or epoch < self._epoch)
        if not self._takes_metric and (steps < self._shown or is_earlier):
            self._beginning.restore()
            self._shown, self._epoch = 0, None
            self._went_back = True

    def is_behind(self, steps: int, epoch: float | None) -> bool:
        """Return whether `follow` would step the scheduler."""
        if self._takes_metric:
            return False
        is_later = epoch is not None and (self._epoch is None or epoch > self._epoch)
        return is_later or steps > self._shown or self._calls_to_repeat > 0

    def set_version(self, version: int) -> None:
        """Note the version of the parameters."""
        self._version = version

    def follow(self, steps: int, epoch: float | None) -> None:
        """Step as the server's scheduler has, unless it is behind.

        Where a pass may end, put it off until `catch_up`.
        """
        if not self._takes_metric:
            self._put_off = (steps, epoch)
            is_per_batch = self._calls > 0 and self._is_in_pass
            if not self._passes.is_in_pass or is_per_batch:
                self.catch_up()

    @property
    def has_steps_to_make(self) -> bool:
        """Whether the scheduler has put off steps of the server's."""
        return self._put_off is not None

    def catch_up(self) -> None:
        """Make the steps that were put off."""
        if self._put_off is None:
            return
        (steps, epoch), self._put_off = self._put_off, None
        with warnings.catch_warnings():
            if self._went_back:
                warnings.simplefilter("ignore")  # the script's own calls have warned
            self._step_to(steps)
            if epoch is not None:
                self._step_to_epoch(epoch)

    @property
    def _calls_to_repeat(self) -> int:
        """The script's calls at or before the current version that a restored server forgot."""
        is_numbered = self._calls > 0 and self._repeats_calls and not self._is_given
        return self._call_number - self._shown if is_numbered else 0

    def repeat_calls(self) -> None:
        """Make again the steps of calls that the server will be told of with the next gradient."""
        if not self._takes_metric and self._calls_to_repeat > 0:
            with self._before_the_server():
                self._step_to(self._call_number)

    def read_rates(self) -> None:
        """Let `get_last_lr()` return the current rates if only the server knows how they arose."""
        if self._takes_metric or self._went_back:
            self._went_back = False
            groups = self._scheduler.optimizer.param_groups
            self._scheduler._last_lr = [copied(group["lr"]) for group in groups]

    # ------------------------------------------------------------------------------ real steps

    def _step_to(self, steps: int) -> None:
        for _ in range(self._shown, steps):
            self._really_step()
        self._shown = max(self._shown, steps)

    def _step_to_epoch(self, epoch: float) -> None:
        self._is_given = True
        if self._epoch is None or epoch > self._epoch:
            self._epoch = epoch
            self._really_step(epoch)

    def _step_with(self, metric: float) -> None:
        """Step with a metric; keep the old rates unless the server will set the new ones, too."""
        groups = self._scheduler.optimizer.param_groups
        rates = [copied(group["lr"]) for group in groups]
        self._really_step(metric)
        if self._has_all_metrics:
            return
        for group, rate in zip(groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        self.read_rates()

    def _really_step(self, *arguments: Any) -> None:
        super(_Followed, self._scheduler).step(*arguments)  # type: ignore[misc] # its class is ours


def _takes_metric(kind: type[LRScheduler]) -> bool:
    """Return whether `step` must be given something, as in ReduceLROnPlateau."""
    _, *parameters = inspect.signature(kind.step).parameters.values()
    return any(
        one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters
    )


def _is_same_ratio(one: SchedulerCalls, other: SchedulerCalls) -> bool:
    return one.mode == other.mode and one.calls * other.steps == other.calls * one.steps
