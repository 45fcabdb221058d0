# SPDX-License-Identifier: BSD-3-Clause
"""What a script sees: `paceline.join()` and the `Run` that it returns.

Every process of a run executes the same script. In a worker, `prepare` joins the run and the script
continues. In the server, `prepare` never returns: it takes the models, optimizers and schedulers,
serves the run to its end, and exits. So the server can step an optimizer of any class, even one
that the script defines, and no optimizer has to be sent to it. A script that you start by hand,
with plain `python`, trains alone as a run of one worker.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import Any, TypeVar, TypeVarTuple, overload

import msgspec
import torch
from torch import Tensor, nn

from paceline.core.events import Fate
from paceline.errors import SpecError
from paceline.run.launch.child import call_at_success, end_cleanly_at, tell_joining, tell_leaving
from paceline.run.launch.environment import Identity, threads
from paceline.run.launch.environment import identity as identity_from_environment
from paceline.run.launch.run_folder import settings_of
from paceline.run.launch.torchrun import join_torchrun
from paceline.run.prepare_arguments import Prepared
from paceline.run.saving import make_saves_atomic
from paceline.run.server.assembly import LocalHost, TrainedObjects, serve_run
from paceline.run.server.part_host import serve_part
from paceline.run.server.run_size import workers_of
from paceline.run.settings import Settings
from paceline.run.step_hooks import call_after_step
from paceline.run.system import SYSTEM, System
from paceline.run.tensors.layout import gather
from paceline.run.tensors.memory_limits import keep_freed_memory
from paceline.run.tensors.state_spec import StateSpec
from paceline.run.worker.batch_sources import BatchSource, LeasedSource, OwnSource
from paceline.run.worker.batch_stream import BatchStream, StreamSettings
from paceline.run.worker.connection import Dialer, ServerConnection, dialer
from paceline.run.worker.departure import Departure
from paceline.run.worker.last_gradient import Last
from paceline.run.worker.load_guard import guard_loading
from paceline.run.worker.optimizer import pace
from paceline.run.worker.pass_iterator import LoaderEnded
from paceline.run.worker.replica import Replica
from paceline.run.worker.sampler import ahead_of, count_samples, order_of, with_shared_order
from paceline.run.worker.seeds import seed_apart
from paceline.run.worker.worker import Worker

__all__ = ["Run", "join"]

T = TypeVar("T")
U = TypeVar("U")
Ts = TypeVarTuple("Ts")


def join() -> "Run":
    """Join the run that this process was started for.

    A script that was started by hand becomes a run of one worker.
    """
    own = identity_from_environment()
    started = join_torchrun() if own is None else None
    if started is not None:
        own = started.identity
    if own is None:
        return Alone()
    if (count := threads()) is not None:
        torch.set_num_threads(count)
    keep_freed_memory()
    make_saves_atomic(own)
    if own.worker is None:
        return ServerRun(own)
    run = WorkerRun(own, dialer if started is None else started.renewing(dialer))
    if started is not None:
        started.watch_end(run.disconnect)
    run.departure.watch()
    call_at_success(run.leave)
    end_cleanly_at(LoaderEnded)
    # A loader's processes must not keep the connection: its closing tells the server that we died.
    os.register_at_fork(after_in_child=run.disconnect)
    return run


class Run:
    """One process's view of a run."""

    worker: int = 0
    """The number of this worker."""

    workers: int = 1
    """How many workers the run was started with."""

    version: int = 0
    """How many updates are in the parameters that this worker has."""

    finished: bool = False
    """Whether the run has made its last update."""

    last: Last | None = None
    """What became of the last gradient; None before the first."""

    def __init__(self) -> None:
        self._is_prepared = False

    @property
    def is_first(self) -> bool:
        """Whether this is worker 0; use it for what only one worker should do, such as printing."""
        return self.worker == 0

    @overload
    def prepare(self, single: T, /) -> T: ...

    @overload
    def prepare(self, first: T, second: U, /, *others: *Ts) -> tuple[T, U, *Ts]: ...

    def prepare(self, *given: *Ts) -> Any:
        """Prepare the models, optimizers, schedulers and loaders that the run trains with.

        Call it once, with all of them. It returns them in the same order, or the object itself if
        there is only one. In a worker, a loader comes back as a `BatchStream`, which forwards
        every attribute to the loader; type checkers see the loader's own type.
        """
        if self._is_prepared:
            raise SpecError("run.prepare() was called twice; pass everything in one call")
        self._is_prepared = True
        returned = self._prepare(Prepared.sort(given))
        return returned[0] if len(returned) == 1 else tuple(returned)

    def backward(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        """Run `loss.backward()`, and stop early once the gradient is no longer wanted."""
        loss.backward(*arguments, **options)

    def log(self, **scalars: float | Tensor) -> None:
        """Log numbers with the next gradient.

        The trace records their average over the contributors of each update.
        """

    def stop(self) -> None:
        """End the run for all workers, e.g. because the model no longer improves.

        When it returns, the run is finished and this worker has the last version. In a script that
        you start with plain `python`, it only sets `finished`: leave the loop yourself.
        """
        self.finished = True

    @contextmanager
    def averaged_weights(self, model: nn.Module) -> Iterator[nn.Module]:
        """Give the model the moving average of its weights inside a `with` block.

        A run that keeps no moving average (`--ema`) leaves the weights unchanged.
        """
        yield model

    def _prepare(self, prepared: Prepared) -> list[Any]:
        raise NotImplementedError


class Alone(Run):
    """A script that was started by hand: a run of one worker in one process.

    It computes bit for bit what it would without Paceline: `prepare` changes nothing.
    """

    def _prepare(self, prepared: Prepared) -> list[Any]:
        for optimizer in prepared.optimizers:
            call_after_step(optimizer, self._on_step)
        return list(prepared.given)

    def _on_step(self) -> None:
        self.last = Last(Fate.ACCEPTED, self.version, 0, 1, 0.0)
        self.version += 1


class WorkerRun(Run):
    """A worker of a run."""

    def __init__(
        self,
        identity: Identity,
        make_dialer: Callable[[Identity, StateSpec], Dialer] = dialer,
        system: System = SYSTEM,
    ) -> None:
        """`make_dialer` returns how to connect to the server."""
        super().__init__()
        assert identity.worker is not None
        self.worker = identity.worker
        self._identity = identity
        self._make_dialer = make_dialer
        self._system = system
        self.departure = Departure(identity, tell_leaving)
        self._server: ServerConnection | None = None
        self._worker: Worker | None = None

    def _prepare(self, prepared: Prepared) -> list[Any]:
        prepared.check()
        training_state = self._training_state = gather(prepared.models, prepared.optimizers)
        replica = self._replica = Replica(training_state, prepared.models)
        dial = self._make_dialer(self._identity, training_state.spec)
        ahead = tuple([ahead_of(loader) for loader in prepared.loaders])
        server = self._server = ServerConnection(
            self.worker, training_state.spec, dial, ahead, self._system, self._identity.seat
        )
        server.check, self.departure.session = self.departure.check, server.session
        worker = self._worker = Worker(self.worker, replica, prepared.schedulers, server)
        for number, optimizer in enumerate(prepared.optimizers):
            pace(optimizer, number, worker)
        guard_loading(prepared.models, self._before_loading)
        if self.worker and not worker.welcome.position:
            seed_apart(self.worker)
        returned = [self._wrap(one, prepared.loaders, worker) for one in prepared.given]
        tell_joining()
        worker.begin()
        return returned

    def leave(self) -> None:
        """Tell the server that the script has ended, if it has joined a run."""
        if self._worker is not None and not self.departure.has_begun:
            self._worker.leave()

    def disconnect(self) -> None:
        """Close the connection to the server in this process, if there is one."""
        if self._server is not None:
            self._server.close()

    def _before_loading(self) -> None:
        """Refuse to load weights before the first gradient of a run.

        After it, the script gets parameters of its own: it may load its best weights and test them,
        but not train with them.
        """
        if self._joined.is_over:
            return
        if self._joined.last is None:
            raise SpecError(
                "load weights before run.prepare(): during a run the server owns the parameters, "
                "and a state loaded in a worker would be lost"
            )
        self._replica.leave()

    def _wrap(self, one: Any, loaders: list[Any], worker: Worker) -> Any:
        """Wrap a loader in a `BatchStream`; return anything else as it is."""
        number = next((i for i, loader in enumerate(loaders) if loader is one), None)
        if number is None:
            return one
        source = self._source(one, number, worker)
        welcome = worker.welcome
        settings = StreamSettings(number, welcome.shares, welcome.requeue, self._system.monotonic)
        stream = BatchStream(one, source, worker.batches, settings, lambda: worker.is_over)
        worker.position.add(stream)
        return stream

    def _source(self, loader: Any, number: int, worker: Worker) -> BatchSource:
        order = order_of(loader)
        if order is None or not order.batches:
            samples = inf if order is None else order.samples
            return OwnSource(loader, samples, lambda: worker.leases.done[number])
        if not isinstance(loader, list | tuple):
            # Far apart, because similar seeds of a generator may give similar numbers.
            seed = (worker.welcome.seed * 1_000_003 + number) * 0x9E3779B97F4A7C15
            loader = with_shared_order(loader, order, seed, worker.number)
        return LeasedSource(loader, order, number, worker.leases)

    @property
    def _joined(self) -> Worker:
        if self._worker is None:
            raise SpecError("call run.prepare() before you use the run")
        return self._worker

    # These are plain attributes of `Run`. Scripts only read them, so properties can replace them.

    @property
    def workers(self) -> int:  # type: ignore[override] # scripts only read it
        """How many workers the run was started with."""
        if self._worker is None:  # a script may divide its data before it calls prepare
            return workers_of(self._identity)
        return self._worker.welcome.workers

    @property
    def version(self) -> int:  # type: ignore[override] # scripts only read it
        """How many updates are in the parameters that this worker has."""
        return 0 if self._worker is None else self._worker.version

    @property
    def finished(self) -> bool:  # type: ignore[override] # scripts only read it
        """Whether the run has made its last update."""
        return self._worker is not None and self._worker.is_over

    @property
    def last(self) -> Last | None:  # type: ignore[override] # scripts only read it
        """What became of the last gradient; None before the first."""
        return None if self._worker is None else self._worker.last

    def backward(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        """Run `loss.backward()`, and stop early once the gradient is no longer wanted."""
        self._joined.backward(loss, *arguments, **options)

    def log(self, **scalars: float | Tensor) -> None:
        """Log numbers with the next gradient.

        The trace records their average over the contributors of each update.
        """
        self._joined.log(scalars)

    def stop(self) -> None:
        """End the run for all workers, e.g. because the model no longer improves.

        When it returns, the run is finished and this worker has the last version.
        """
        self._joined.stop()

    @contextmanager
    def averaged_weights(self, model: nn.Module) -> Iterator[nn.Module]:
        """Give the model the moving average of its weights inside a `with` block.

        A run that keeps no moving average (`--ema`) leaves the weights unchanged.
        """
        if not self._joined.welcome.averages:
            yield model
            return
        was_over = self._joined.is_over
        averages = self._joined.requests.averages()
        in_model = {id(p) for p in model.parameters()}
        saved = []
        for own, means in zip(self._training_state.parameters, averages, strict=True):
            for parameter, mean in zip(own, means, strict=True):
                if id(parameter) in in_model:
                    saved.append((parameter, parameter.data))
                    parameter.data = mean.to(parameter.device, parameter.dtype)
        try:
            yield model
        finally:
            for parameter, data in saved:
                parameter.data = data
            if self._joined.is_over and not was_over:
                self._replica.load_again()


class ServerRun(Run):
    """The server of a run."""

    worker = -1

    def __init__(self, identity: Identity) -> None:
        super().__init__()
        self._identity = identity

    @property
    def workers(self) -> int:  # type: ignore[override] # read only, as in a worker
        """How many workers the run was started with."""
        return workers_of(self._identity)

    def _prepare(self, prepared: Prepared) -> list[Any]:
        prepared.check()
        if not self._identity.is_head:
            serve_part(self._identity, gather(prepared.models, prepared.optimizers))
        settings = _with_samples(settings_of(self._identity.run_dir), prepared.loaders)
        state = gather(prepared.models, prepared.optimizers)
        orders = [order_of(loader) for loader in prepared.loaders]
        trained = TrainedObjects(state, prepared.models, prepared.schedulers, orders)
        host = LocalHost(self._identity, settings.transport)
        failure = serve_run(self._identity.run_dir, settings, trained, host)
        if failure:
            print(f"the run failed: {failure}", file=sys.stderr, flush=True)
        raise SystemExit(1 if failure else 0)


def _with_samples(settings: Settings, loaders: list[Any]) -> Settings:
    """Return the settings with a number of samples instead of epochs."""
    if settings.epochs is None:
        return settings
    sizes = [size for loader in loaders if (size := _samples_in_pass(loader))]
    if not sizes:
        raise SpecError("--epochs needs a loader whose length is known; use --steps instead")
    spec = replace(settings.spec, samples=round(settings.epochs * sizes[0]))
    return msgspec.structs.replace(settings, spec=spec, epochs=None)


def _samples_in_pass(loader: Any) -> int | None:
    """Return how many samples one pass over the loader has; None if that is unknown."""
    if isinstance(loader, list | tuple):
        return sum(map(count_samples, loader))
    order = order_of(loader)
    return None if order is None else order.samples
