# SPDX-License-Identifier: BSD-3-Clause
"""Build a server from its parts, and serve a run to its end."""

import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from paceline.core.barrier_free import Free
from paceline.core.decider import NOTHING, Decider
from paceline.core.ledger import Origin
from paceline.leases import BatchOrder, LeaseBook
from paceline.run.launch.environment import Identity
from paceline.run.launch.run_folder import commit_spec, is_resumed
from paceline.run.net.address import listen
from paceline.run.net.shared_memory import SharedMemoryPeer, SharedMemoryStore
from paceline.run.server.checkpoint import Archive, Saved
from paceline.run.server.checkpointer import Checkpointer
from paceline.run.server.cores import available_cores
from paceline.run.server.export_weights import write_weights
from paceline.run.server.listener import Listener
from paceline.run.server.recorder import Recorder
from paceline.run.server.server import Server
from paceline.run.settings import Settings, parse_every
from paceline.run.tensors.layout import TrainingState
from paceline.run.tensors.shard import Shard
from paceline.trace.schema import EPOCH_SAMPLES, Header

__all__ = ["serve_run"]

# Below this, waiting for a second thread on a busy machine costs more than it saves (measured).
WORTH_THREADS_BYTES = 32 * 2**20

_say = partial(print, flush=True)


def serve_run(
    identity: Identity,
    settings: Settings,
    state: TrainingState,
    models: Sequence[nn.Module],
    schedulers: Sequence[LRScheduler],
    orders: Sequence[BatchOrder | None],
) -> str:
    """Serve a run to its end; return why it failed, "" if it didn't.

    It continues from the newest checkpoint in the run's folder, if there is one.
    """
    store = SharedMemoryStore(state.spec)
    policy = settings.parse_policy()
    shard = Shard(
        state,
        schedulers,
        store,
        versions_kept=policy.versions_kept,
        ema=settings.ema,
        # Rules with a barrier promise gradients of one version.
        apart=isinstance(policy, Free),
    )
    if shard.size_bytes < WORTH_THREADS_BYTES:
        torch.set_num_threads(1)
    token = identity.token()  # raises if it can't be read, so before there is a socket to close
    # Listen before touching any file: if another server is there, nothing in the folder is ours.
    listener = Listener(
        listen(identity.address),
        token,
        lambda channel: SharedMemoryPeer(channel, store),
        _say,
    )
    try:
        book = LeaseBook(orders)
        server = _make_server(identity.run_dir, settings, shard, models, listener, book)
    except BaseException:
        listener.shut_down()
        raise
    return server.serve()


def _make_server(
    run_dir: Path,
    settings: Settings,
    shard: Shard,
    models: Sequence[nn.Module],
    listener: Listener,
    book: LeaseBook,
) -> Server:
    """Return a server of the run in this folder, which it begins or continues."""
    policy = settings.parse_policy()
    archive = Archive(run_dir / "checkpoints", _say)
    saved = archive.load()
    if saved is not None:
        shard.load_state_dict(saved.version, saved.shard)
    header = msgspec.structs.replace(
        Header.of("run", policy, settings.spec, _about(book)),
        cores=available_cores(),
        optimizers=len(shard.state.optimizers),
    )
    recorder, origin = _open_recorder(run_dir / "trace.jsonl", header, saved)
    export = partial(_export, run_dir, models, shard)
    every = parse_every(settings.checkpoint_every)
    checkpointer = Checkpointer(archive, every, export, _say)
    listener.stop_on(signal.SIGTERM, signal.SIGINT)
    decider = Decider(policy, settings.spec, origin)
    decider.leases = book
    server = Server(settings, decider, shard, listener, recorder, checkpointer)
    server.expect_launcher()
    if saved is not None:
        server.restore(saved)
    commit_spec(run_dir)
    return server


def _about(book: LeaseBook) -> dict[str, str]:
    """Return facts for readers of the trace."""
    samples = next(filter(None, book.epoch_samples), None)
    epoch = {} if samples is None else {EPOCH_SAMPLES: str(samples)}
    return {"torch": str(torch.__version__), **epoch}


def _open_recorder(path: Path, header: Header, saved: Saved | None) -> tuple[Recorder, Origin]:
    """Begin or continue the trace; return it and where the run starts from."""
    is_new = not path.exists()
    recorder = Recorder(path, header, begins_anew=is_new)
    if is_new and saved is None:
        return recorder, NOTHING
    if saved is None:
        _say("there is no checkpoint: starting from the beginning")
        origin = NOTHING
    else:
        origin = Origin(saved.version, memory=saved.memory, samples=saved.samples)
    data = [] if saved is None else saved.data
    restored = recorder.restore(header, origin, is_resumed(path.parent), data)
    return recorder, restored.origin()


def _export(run_dir: Path, models: Sequence[nn.Module], shard: Shard) -> None:
    """Write the weights; a run that has ended doesn't fail because of a full disk."""
    try:
        write_weights(run_dir, models, shard)
    except Exception as error:  # a script's model may hold anything
        _say(f"cannot write the weights: {error!r}")
