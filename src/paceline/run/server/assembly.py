# SPDX-License-Identifier: BSD-3-Clause
"""Build a server from its parts, and serve a run to its end."""

import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from paceline.core.barrier_free import Free
from paceline.core.decider import NOTHING, Decider
from paceline.core.ledger import Origin
from paceline.leases import BatchOrder, LeaseBook
from paceline.run.cores import available_cores
from paceline.run.launch.environment import Identity, check_listening
from paceline.run.launch.run_folder import commit_spec, is_resumed
from paceline.run.net.address import is_tcp, listen, listen_on, local_twin
from paceline.run.net.channel import Channel
from paceline.run.net.host_peer import HostedPeer, HostPeer
from paceline.run.net.server_messages import ServerWelcome
from paceline.run.net.shared_memory import SharedMemoryPeer, SharedMemoryStore
from paceline.run.net.tcp import NO_OTHERS, TcpPeer
from paceline.run.net.tls import server_context
from paceline.run.net.transport import PeerEnd, ServerConnections, TensorStore
from paceline.run.server.checkpoint import Archive, Saved
from paceline.run.server.checkpointer import Checkpointer
from paceline.run.server.export_weights import write_weights
from paceline.run.server.head_shard import HeadShard
from paceline.run.server.listener import Listener
from paceline.run.server.other_servers import OtherServers
from paceline.run.server.recorder import Mark, Recorder
from paceline.run.server.server import Server
from paceline.run.settings import Settings, parse_every
from paceline.run.system import System
from paceline.run.tensors.finite_check import first_spoiled
from paceline.run.tensors.group_options import ignored_changes
from paceline.run.tensors.layout import Layout, TrainingState
from paceline.run.tensors.optimizer_parts import can_split
from paceline.run.tensors.partition import partition
from paceline.run.tensors.shard import Shard, limit_threads
from paceline.run.tensors.state_spec import StateSpec
from paceline.trace.schema import EPOCH_SAMPLES, Header

__all__ = ["LocalHost", "ServerHost", "TrainedObjects", "serve_run"]

_say = partial(print, flush=True)


@dataclass(frozen=True)
class TrainedObjects:
    """What the script trains: the server's own copies."""

    state: TrainingState
    models: Sequence[nn.Module]
    schedulers: Sequence[LRScheduler] = ()
    orders: Sequence[BatchOrder | None] = ()


class ServerHost(Protocol):
    """Where a server runs: its memory, and how workers reach it."""

    def new_store(self, spec: StateSpec, layout: Layout | None = None) -> TensorStore:
        """Return memory for tensors of this kind; `layout`: if it isn't the usual one."""

    def listen(self, store: Any, others: OtherServers | None) -> ServerConnections:
        """Accept connections; raises SpecError if that is impossible."""


class LocalHost:
    """This machine: memory that its workers share, and sockets."""

    def __init__(self, identity: Identity, transport: str = "auto") -> None:
        """`transport`: "tcp" if not even workers of this host should share memory."""
        self._address = identity.address
        self._token = identity.token()
        self._token_file = identity.token_file
        self._tls = identity.tls if is_tcp(identity.address) else None
        self._listening_fd = identity.listening_fd
        self._shares = transport == "auto"

    def new_store(self, spec: StateSpec, layout: Layout | None = None) -> SharedMemoryStore:
        """Return memory that workers can map."""
        return SharedMemoryStore(spec, layout)

    def listen(self, store: SharedMemoryStore, others: OtherServers | None) -> Listener:
        """Listen at the address of the run, with the launcher's socket if it has given us one."""

        def open_peer(channel: Channel[Any]) -> PeerEnd:
            if channel.is_local:
                return SharedMemoryPeer(channel, store)
            return TcpPeer(
                channel, store, channel.session, others or NO_OTHERS, channel.remote_host
            )

        def open_host(channel: Channel[Any], host: HostPeer | None) -> PeerEnd:
            if host is not None:
                return HostedPeer(channel, store, channel.session, host)
            return HostPeer(channel, store, channel.session, others or NO_OTHERS)

        check_listening(self._address, self._token_file)
        tls = None if self._tls is None else server_context(self._tls)
        if self._listening_fd is None:
            listening = [listen(self._address)]
        else:
            listening = [listen_on(socket.socket(fileno=self._listening_fd))]
        if is_tcp(self._address) and self._shares and others is None:
            listening.append(listen(local_twin(self._address, self._token)))
        listener = Listener(listening, self._token, open_peer, _say, tls=tls)
        listener.open_host = open_host
        return listener


def serve_run(run_dir: Path, settings: Settings, trained: TrainedObjects, host: ServerHost) -> str:
    """Serve a run to its end; return why it failed, "" if it didn't.

    It continues from the newest checkpoint in the run's folder, if there is one. Raises ServerLost
    if another server of the run is gone.
    """
    policy = settings.parse_policy()
    state, versions_kept = trained.state, policy.versions_kept
    is_apart = isinstance(policy, Free)  # rules with a barrier promise gradients of one version
    others = _other_servers(settings, state, versions_kept, is_apart)
    shard: Shard
    if others is None:
        store = host.new_store(state.spec)
        shard = Shard(
            state,
            trained.schedulers,
            store,
            versions_kept=versions_kept,
            ema=settings.ema,
            apart=is_apart,
        )
    else:
        store = host.new_store(others.parts[0].spec, others.parts[0].layout)
        shard = HeadShard(state, trained.schedulers, store, others)
    limit_threads(Layout.of(state.spec).size)
    # Listen before touching any file: if another server is there, nothing in the folder is ours.
    connections = host.listen(store, others)
    if others is not None:
        others.connections = connections
    try:
        server = _make_server(run_dir, settings, shard, trained, connections, others)
    except BaseException:
        connections.shut_down()
        raise
    return server.serve()


def _other_servers(
    settings: Settings, whole: TrainingState, versions_kept: int, is_apart: bool
) -> OtherServers | None:
    """Return the other servers of the run, which haven't joined yet; None: it has only one."""
    if settings.servers == 1:
        return None
    is_split = tuple(map(can_split, whole.optimizers))
    for number, optimizer in enumerate(whole.optimizers):
        if not is_split[number]:
            _say(
                f"optimizer {number} ({type(optimizer).__qualname__}) isn't known to work element "
                "by element, so server 0 has all of its parameters"
            )
    parts = partition(whole.spec, settings.servers, is_split)
    welcome = ServerWelcome(
        settings.servers,
        settings.ema,
        versions_kept,
        is_apart,
        settings.wire,
        settings.wire_parameters,
    )
    return OtherServers(whole, parts, is_split, welcome)


def _make_server(
    run_dir: Path,
    settings: Settings,
    shard: Shard,
    trained: TrainedObjects,
    connections: ServerConnections,
    others: OtherServers | None,
) -> Server:
    """Return a server of the run in this folder, which it begins or continues."""
    policy, system = settings.parse_policy(), connections.system
    book = LeaseBook(trained.orders)
    archive = Archive(
        run_dir / "checkpoints",
        _say,
        disk=system.disk,
        start=system.start_thread,
        first_spoiled=first_spoiled,
    )
    saved = archive.load()
    if saved is not None:
        in_script = shard.first_options
        shard.load_state_dict(saved.version, saved.shard)
        if line := ignored_changes(in_script, shard.first_options, shard.state.optimizers):
            _say(line)
    header = msgspec.structs.replace(
        Header.of("run", policy, settings.spec, _about(book, settings)),
        cores=available_cores(),
        optimizers=len(shard.state.optimizers),
    )
    is_continued = (run_dir / "trace.jsonl").exists()
    recorder, origin = _open_recorder(run_dir / "trace.jsonl", header, saved, system)
    export = partial(write_weights, run_dir, trained.models, shard, system.disk)
    every = parse_every(settings.checkpoint_every)
    checkpointer = Checkpointer(archive, every, export, _say, recorder)
    connections.stop_on(signal.SIGTERM, signal.SIGINT)
    decider = Decider(policy, settings.spec, origin)
    decider.leases = book
    server = Server(settings, decider, shard, connections, recorder, checkpointer)
    if others is not None:
        server.expect_servers(others)
    server.expect_launcher()
    if is_continued:
        server.expect_return()
    if saved is not None:
        server.restore(saved)
    commit_spec(run_dir, system.disk)
    return server


def _about(book: LeaseBook, settings: Settings) -> dict[str, str]:
    """Return facts for readers of the trace."""
    samples = next(filter(None, book.epoch_samples), None)
    epoch = {} if samples is None else {EPOCH_SAMPLES: str(samples)}
    wires = {"wire": settings.wire, "wire_parameters": settings.wire_parameters}
    rounded = {name: wire for name, wire in wires.items() if wire != "exact"}
    servers = {} if settings.servers == 1 else {"servers": str(settings.servers)}
    return {"torch": str(torch.__version__), **epoch, **rounded, **servers}


def _open_recorder(
    path: Path, header: Header, saved: Saved | None, system: System
) -> tuple[Recorder, Origin]:
    """Begin or continue the trace; return it and where the run starts from."""
    is_new = not path.exists()
    recorder = Recorder(
        path, header, begins_anew=is_new, disk=system.disk, wall_clock=system.wall_time
    )
    if is_new and saved is None:
        return recorder, NOTHING
    if saved is None:
        _say("there is no checkpoint: starting from the beginning")
        origin = NOTHING
    else:
        origin = Origin(saved.version, memory=saved.memory, samples=saved.samples)
        if not recorder.holds(saved.version, Mark(*saved.trace)):
            _say("the trace is missing records from before the last checkpoint: recorded as a gap")
            recorder.note_gap(origin, saved.data)
    data = [] if saved is None else saved.data
    restored = recorder.restore(header, origin, is_resumed(path.parent), data)
    return recorder, restored.origin()
