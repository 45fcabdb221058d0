# SPDX-License-Identifier: BSD-3-Clause
"""The agent of a host as a process: its sockets, the token, signals."""

import select
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple, NoReturn

from paceline.errors import PeerLost, ProtocolError
from paceline.run.launch.environment import Identity
from paceline.run.net.address import listen, listen_on
from paceline.run.net.channel import Channel
from paceline.run.net.data_socket import ByteStream, DataSocket
from paceline.run.net.handshake import connect, connect_as_host, connect_data, connect_hosted
from paceline.run.net.messages import FromServer, LeaveRun
from paceline.run.net.shared_memory import SharedMemoryStore
from paceline.run.net.tcp_client import ControlSocket
from paceline.run.net.tls import client_context
from paceline.run.server.host_agent import HostAgent, LocalWorker
from paceline.run.server.host_uplink import HostedClient, HostUplink
from paceline.run.server.listener import Listener
from paceline.run.tensors.layout import Views
from paceline.run.tensors.state_spec import StateSpec

__all__ = ["ServerLinks", "serve_host"]

GOODBYE_S = 2.0  # for the head to answer a worker that leaves

_say = partial(print, flush=True)


class _Watched(NamedTuple):
    """What a descriptor is watched for."""

    owner: object
    events: int


class ServerLinks:
    """The way to the servers, over TCP."""

    def __init__(self, identity: Identity) -> None:
        self._address = identity.address
        self._token = identity.token()
        self._tls = None if identity.tls is None else client_context(identity.tls)
        self._session = b""  # of the agent
        self._control = -1  # descriptor of its control connection
        self._controls: dict[HostedClient, int] = {}
        self._epoll = select.epoll()
        self._watched: dict[int, _Watched] = {}  # by descriptor

    def fileno(self) -> int:
        """Return a descriptor that is readable when a connection has something to do."""
        return self._epoll.fileno()

    def join(
        self, spec: StateSpec, store: SharedMemoryStore, slot_of: Callable[[int], Views | None]
    ) -> HostUplink:
        """Open a session; raises PeerLost if there is no head, ProtocolError if it refuses."""
        channel = connect_as_host(self._address, self._token, self._tls)
        self._session, self._control = channel.session, channel.fileno()

        uplink = HostUplink(channel, self.open_data, store, slot_of)
        try:
            uplink.join(spec)
        except BaseException:
            uplink.close()
            raise
        return uplink

    def open_data(self, server: str) -> ByteStream:
        """Open a data connection of the session to a server; "" is the head. Raises PeerLost."""
        return self._open_data(server or self._address, self._session)

    def _open_data(self, address: str, session: bytes) -> DataSocket:
        try:
            return DataSocket(connect_data(address, self._token, session, tls=self._tls))
        except ProtocolError as error:  # the session's server is gone, and this is the next one
            raise PeerLost(str(error)) from None

    def connect_worker(self, store: SharedMemoryStore) -> HostedClient:
        """Connect to the head for one worker; raises PeerLost if the session is over."""
        with ExitStack() as on_error:
            channel = connect_hosted(self._address, self._token, self._session, self._tls)
            on_error.callback(channel.close)
            data = self._open_data(self._address, channel.session)
            on_error.pop_all()
        client = HostedClient(ControlSocket(channel), data, store)
        self._controls[client] = channel.fileno()
        return client

    def say_goodbye(self, message: LeaveRun) -> FromServer:
        """Tell the head that a worker leaves; return the answer. Raises as `join` does."""
        channel = connect(self._address, self._token, GOODBYE_S, self._tls)
        try:
            channel.send(message)
            return channel.receive()
        finally:
            channel.close()

    def watch(self, uplink: HostUplink | None, clients: list[HostedClient]) -> bool:
        """Have the listener wake up when one of these connections has something to do.

        Returns whether one of them holds bytes that the OS doesn't know about.
        """
        self._controls = {one: self._controls[one] for one in clients}
        wanted = {fd: _Watched(one, select.EPOLLIN) for one, fd in self._controls.items()}
        receiving, sending = [], []
        if uplink is not None:
            wanted[self._control] = _Watched(uplink, select.EPOLLIN)
            receiving, sending = uplink.to_receive, uplink.to_send
        for client in clients:
            receiving += client.wishes.to_receive
            sending += client.wishes.to_send
        for stream in receiving:
            wanted[stream.fileno()] = _Watched(stream, select.EPOLLIN)
        for stream in sending:
            events = select.EPOLLOUT | (select.EPOLLIN if stream in receiving else 0)
            wanted[stream.fileno()] = _Watched(stream, events)
        self._update(wanted)
        return any(stream.has_unread() for stream in receiving)

    def _update(self, wanted: dict[int, _Watched]) -> None:
        """Watch these descriptors and no others.

        The OS forgets a descriptor that is closed, whose number may be in use again.
        """
        for fd in [fd for fd, old in self._watched.items() if wanted.get(fd) != old]:
            with suppress(OSError):
                self._epoll.unregister(fd)
            del self._watched[fd]
        for fd, new in wanted.items():
            if fd not in self._watched:
                self._epoll.register(fd, new.events)
                self._watched[fd] = new

    def close(self) -> None:
        """Stop watching."""
        self._epoll.close()


def serve_host(identity: Identity) -> NoReturn:
    """Serve the workers of this host until a signal asks to stop, and exit."""
    servers = ServerLinks(identity)
    if identity.listening_fd is None:
        listening = listen(identity.listen)
    else:
        listening = listen_on(socket.socket(fileno=identity.listening_fd))
    connections = Listener([listening], identity.token(), _local_worker, _say)
    connections.stop_on(signal.SIGTERM, signal.SIGINT)
    connections.wake_up_for(servers)
    HostAgent(connections, servers).serve()
    servers.close()
    raise SystemExit(0)


def _local_worker(channel: Channel[Any]) -> LocalWorker:
    if not channel.is_local:
        raise ProtocolError("an agent serves only workers of its own host")
    return LocalWorker(channel)
