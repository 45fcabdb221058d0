# SPDX-License-Identifier: BSD-3-Clause
"""What a script sees: `paceline.join()` gives a `Run`, whose `prepare` makes everything else work.

Every process of a run executes the same script. In a worker, `prepare` joins the run and the
script goes on. In the server, `prepare` takes models, optimizers and schedulers as they are, serves
the run to its end, and never returns: so optimizers of any class, the script's own too, step on the
server without being sent anywhere. Started by hand, a script is an ordinary one-worker run.
"""

import inspect
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.core.decider import NOTHING, Decider
from paceline.core.events import Fate
from paceline.core.ledger import Origin
from paceline.core.policies import parse_policy
from paceline.errors import SpecError
from paceline.run.launch.environment import Identity, identity, threads
from paceline.run.launch.run_folder import commit_spec, is_resumed, settings_of
from paceline.run.net.channel import listen
from paceline.run.server.checkpoint import Archive, Saved
from paceline.run.server.checkpointer import Checkpointer
from paceline.run.server.listener import Listener
from paceline.run.server.recorder import Recorder
from paceline.run.server.server import Server
from paceline.run.server.weights import write_weights
from paceline.run.settings import Settings, parse_every
from paceline.run.tensors.layout import gather
from paceline.run.tensors.memory import keep_freed_memory
from paceline.run.tensors.shard import Shard
from paceline.run.worker.data import BatchStream, samples_in_epoch
from paceline.run.worker.optimizer import pace
from paceline.run.worker.replica import Replica
from paceline.run.worker.sampler import own_stream
from paceline.run.worker.schedule import advance, follow
from paceline.run.worker.worker import Last, Worker
from paceline.trace.schema import Header

__all__ = ["Run", "join"]

# Below this, waiting for a second thread on a busy machine costs more than it saves: measured.
WORTH_THREADS_BYTES = 32 * 2**20


def join() -> "Run":
    """Take part in the run that this process was started for; started by hand, be one alone."""
    who = identity()
    if who is None:
        return Alone()
    if (count := threads()) is not None:
        torch.set_num_threads(count)
    keep_freed_memory()
    return ServerRun(who) if who.worker is None else WorkerRun(who)


class Run:
    """One process's view of a run."""

    worker: int = 0
    """The number of this worker."""

    version: int = 0
    """How many updates the parameters have had that this worker has."""

    finished: bool = False
    """Whether the run has made its last update."""

    last: Last | None = None
    """What became of the last gradient; None before the first."""

    def __init__(self) -> None:
        self._is_prepared = False

    @property
    def is_first(self) -> bool:
        """Whether this is worker 0: for what is to be done once, such as printing."""
        return self.worker == 0

    def prepare(self, *things: Any) -> Any:
        """Take models, optimizers, schedulers and loaders into the run; once, with all of them.

        Returns them in the same order; one alone is returned as it is.
        """
        if self._is_prepared:
            raise SpecError("run.prepare() was called twice; give it everything in one call")
        self._is_prepared = True
        prepared = self._prepare(Prepared.sort(things))
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def backward(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        """`loss.backward()`, which ends early once the gradient is of no use any more."""
        loss.backward(*arguments, **options)  # type: ignore[no-untyped-call] # torch has no types

    def log(self, **scalars: float | Tensor) -> None:
        """Log numbers; the trace has their average over the contributors of each update."""

    @contextmanager
    def averaged_weights(self, model: nn.Module) -> Iterator[nn.Module]:
        """Let the model have the moving average of its weights, where the run keeps one."""
        yield model

    def _prepare(self, things: "Prepared") -> list[Any]:
        raise NotImplementedError


@dataclass(frozen=True)
class Prepared:
    """What a script prepares, sorted."""

    given: tuple[Any, ...]
    models: list[nn.Module]
    optimizers: list[Optimizer]
    schedulers: list[LRScheduler]
    loaders: list[Any]

    @classmethod
    def sort(cls, given: Sequence[Any]) -> "Prepared":
        """Tell them apart; raises SpecError at what a run cannot work with."""
        found = cls(tuple(given), [], [], [], [])
        for thing in given:
            if isinstance(thing, nn.Module):
                found.models.append(thing)
            elif isinstance(thing, Optimizer):
                found.optimizers.append(thing)
            elif isinstance(thing, ReduceLROnPlateau):
                raise SpecError(
                    "a scheduler that follows a metric cannot be prepared, for the learning rate "
                    "must follow from the version; step it in one worker (run.is_first) instead"
                )
            elif isinstance(thing, LRScheduler):
                found.schedulers.append(thing)
            elif _holds_things(thing):
                raise SpecError("give run.prepare() models and optimizers one by one, not in lists")
            elif hasattr(thing, "__iter__") and not isinstance(thing, str | bytes):
                found.loaders.append(thing)
            else:
                raise SpecError(
                    "run.prepare() takes models, optimizers, schedulers and loaders, got "
                    f"{type(thing).__qualname__}"
                )
        for scheduler in found.schedulers:
            if scheduler.optimizer not in found.optimizers:
                raise SpecError("prepare a scheduler together with its optimizer")
        return found


def _holds_things(thing: Any) -> bool:
    return isinstance(thing, list | tuple) and any(
        isinstance(one, nn.Module | Optimizer | LRScheduler) for one in thing
    )


def _check(things: Prepared) -> None:
    """Raise SpecError unless these can be trained on a server."""
    if not things.optimizers:
        raise SpecError("give run.prepare() at least one optimizer; without one nothing trains")
    for optimizer in things.optimizers:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise SpecError(
                f"{type(optimizer).__qualname__} needs a closure, and on the server there is none; "
                "use an optimizer that steps without"
            )


class Alone(Run):
    """A script that was started by hand: an ordinary run of one worker."""

    def _prepare(self, things: Prepared) -> list[Any]:
        self._schedulers = things.schedulers
        for optimizer in things.optimizers:
            optimizer.register_step_post_hook(self._count)
        for scheduler in things.schedulers:
            follow(scheduler, server=False)
        return list(things.given)

    def _count(self, optimizer: Optimizer, *_: Any) -> None:
        self.last = Last(Fate.ACCEPTED, self.version, 0, 1, 0.0)
        self.version += 1
        for scheduler in self._schedulers:
            if scheduler.optimizer is optimizer:
                advance(scheduler)


class WorkerRun(Run):
    """A worker of a run."""

    def __init__(self, who: Identity) -> None:
        super().__init__()
        assert who.worker is not None
        self.worker = who.worker
        self._who = who
        self._worker: Worker | None = None

    def _prepare(self, things: Prepared) -> list[Any]:
        _check(things)
        common = gather(things.models, things.optimizers)
        replica = self._replica = Replica(common, things.models)
        worker = self._worker = Worker(self._who, common, things.schedulers, replica)
        self._common = common
        for number, optimizer in enumerate(things.optimizers):
            pace(optimizer, number, worker)
        for scheduler in things.schedulers:
            follow(scheduler, server=True)
        _NoLoading({module for model in things.models for module in model.modules()}, worker)
        if self.worker and not worker.welcome.place:
            _seed_apart(self.worker)
        prepared = [self._prepared(thing, things, worker) for thing in things.given]
        worker.begin()
        return prepared

    def _prepared(self, thing: Any, things: Prepared, worker: Worker) -> Any:
        if not any(thing is loader for loader in things.loaders):
            return thing
        number = next(i for i, loader in enumerate(things.loaders) if loader is thing)
        welcome = worker.welcome
        own = own_stream(thing, welcome.seed, worker.number, welcome.workers)
        over, requeue = (lambda: worker.is_over), welcome.requeue
        stream = BatchStream(thing, own, number, worker.batches, over, requeue)
        worker.position.add(stream)
        return stream

    @property
    def _joined(self) -> Worker:
        if self._worker is None:
            raise SpecError("call run.prepare() first")
        return self._worker

    # What is a plain attribute alone is asked of the link here, and scripts only read it.

    @property
    def version(self) -> int:  # type: ignore[override]
        """How many updates the parameters have had that this worker has."""
        return 0 if self._worker is None else self._worker.version

    @property
    def finished(self) -> bool:  # type: ignore[override]
        """Whether the run has made its last update."""
        return self._worker is not None and self._worker.is_over

    @property
    def last(self) -> Last | None:  # type: ignore[override]
        """What became of the last gradient; None before the first."""
        return None if self._worker is None else self._worker.last

    def backward(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        """`loss.backward()`, which ends early once the gradient is of no use any more."""
        self._joined.backward(loss, *arguments, **options)

    def log(self, **scalars: float | Tensor) -> None:
        """Log numbers; the trace has their average over the contributors of each update."""
        self._joined.log(scalars)

    @contextmanager
    def averaged_weights(self, model: nn.Module) -> Iterator[nn.Module]:
        """Let the model have the moving average of its weights, where the run keeps one."""
        if not self._joined.welcome.averages:
            yield model
            return
        was_over = self._joined.is_over
        mine = {id(p) for p in model.parameters()}
        saved = []
        for own, means in zip(self._common.parameters, self._joined.averages(), strict=True):
            for parameter, mean in zip(own, means, strict=True):
                if id(parameter) in mine:
                    saved.append((parameter, parameter.data))
                    parameter.data = mean.to(parameter.device, parameter.dtype)
        try:
            yield model
        finally:
            for parameter, data in saved:
                parameter.data = data
            if self._joined.is_over and not was_over:
                self._replica.load_again()


def _seed_apart(worker: int) -> None:
    """Scripts seed all processes alike; dropout and what is drawn by hand must still differ."""
    torch.manual_seed(torch.initial_seed() + worker)
    random.seed(f"{random.getrandbits(64)} {worker}")
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        numpy.random.seed((int(numpy.random.randint(2**31)) + worker) % 2**32)


class _NoLoading:
    """Lets nobody load weights into these modules during a run; copies of them may be loaded."""

    def __init__(self, modules: set[nn.Module], worker: Worker) -> None:
        self._modules = modules
        self._worker = worker
        for module in modules:
            # torch has no types for this, so:
            module.register_load_state_dict_pre_hook(self)  # type: ignore[no-untyped-call]

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if module in self._modules and not self._worker.is_over:
            raise SpecError(
                "load weights before run.prepare(): while the run lasts the parameters are the "
                "server's, and what is loaded here would be lost"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # A module that is saved whole has something in this place that takes anything, does
        # nothing, and can be loaded where there is no Paceline.
        return getattr, ("", "format")


class ServerRun(Run):
    """The server of a run."""

    worker = -1

    def __init__(self, who: Identity) -> None:
        super().__init__()
        self._who = who

    def _prepare(self, things: Prepared) -> list[Any]:
        _check(things)
        settings = _with_samples(settings_of(self._who.run_dir), things.loaders)
        run_dir, policy = self._who.run_dir, parse_policy(settings.policy)
        common = gather(things.models, things.optimizers)
        shard = Shard(common, things.schedulers, settings, policy.versions_kept)
        if shard.layout.size < WORTH_THREADS_BYTES:
            torch.set_num_threads(1)
        # Before anything is touched: where another server is, nothing here is ours.
        listener = Listener(token=self._who.token(), sock=listen(self._who.address))
        archive = Archive(run_dir / "checkpoints", _say)
        saved = archive.load()
        if saved is not None:
            shard.restore(saved.version, saved.shard)
        header = Header.of("run", policy, settings.spec, {"torch": str(torch.__version__)})
        recorder, origin = _recorder(run_dir / "trace.jsonl", header, saved)
        checkpointer = Checkpointer(
            archive,
            parse_every(settings.checkpoint_every),
            partial(_export, run_dir, things.models, shard),
            _say,
        )
        listener.stop_on(signal.SIGTERM, signal.SIGINT)
        decider = Decider(policy, settings.spec, origin)
        server = Server(settings, decider, shard, listener, recorder, checkpointer)
        if saved is not None:
            server.restore(saved)
        del saved  # it holds a copy of everything
        commit_spec(run_dir)
        failure = server.serve()
        if failure:
            print(f"the run failed: {failure}", file=sys.stderr, flush=True)
        raise SystemExit(1 if failure else 0)


_say = partial(print, flush=True)


def _recorder(path: Path, header: Header, saved: Saved | None) -> tuple[Recorder, Origin]:
    """The trace, begun or gone on with, and where the run begins."""
    is_new = not path.exists()
    recorder = Recorder(path, header, begins_anew=is_new)
    if is_new and saved is None:
        return recorder, NOTHING
    version, memory = (saved.version, saved.memory) if saved else (0, None)
    if saved is None:
        _say("there is no checkpoint: the run begins anew")
    restored = recorder.restore(header, version, memory, is_resumed(path.parent))
    return recorder, restored.origin()


def _export(run_dir: Path, models: list[nn.Module], shard: Shard) -> None:
    """Write the weights; a run that is over does not fail for want of a disk."""
    try:
        write_weights(run_dir, models, shard)
    except Exception as error:  # a model of the script's may hold whatever it likes
        _say(f"the weights cannot be written: {error!r}")


def _with_samples(settings: Settings, loaders: list[Any]) -> Settings:
    """The settings with epochs said in samples."""
    if settings.epochs is None:
        return settings
    sizes = [size for loader in loaders if (size := samples_in_epoch(loader))]
    if not sizes:
        raise SpecError("how long an epoch is cannot be told without a loader; use --steps")
    return msgspec.structs.replace(settings, samples=round(settings.epochs * sizes[0]), epochs=None)
