# SPDX-License-Identifier: BSD-3-Clause
"""A worker's connection to the server of its run: joined, lost, and joined again.

The launcher restarts a server that dies, at the same address; until then its workers wait. Each
server needs a new end of the transport.
"""

import secrets
import ssl
import sys
from collections.abc import Callable
from contextlib import suppress

from paceline.errors import PeerLost, ProtocolError
from paceline.release import RELEASE
from paceline.run.launch.environment import Identity
from paceline.run.net import messages
from paceline.run.net.address import is_tcp, local_twin
from paceline.run.net.data_socket import DataSocket
from paceline.run.net.handshake import connect, connect_data
from paceline.run.net.server_wait import ServerWait
from paceline.run.net.shared_memory import SharedMemoryWorker
from paceline.run.net.tcp_client import ControlSocket
from paceline.run.net.tcp_worker import TcpWorker
from paceline.run.net.tls import client_context
from paceline.run.net.transport import OpenedSlot, WorkerEnd
from paceline.run.system import SYSTEM, System
from paceline.run.tensors.state_spec import StateSpec

__all__ = ["Dialer", "ServerConnection", "dialer"]

Dialer = Callable[[], WorkerEnd]
"""Connects to the server once; raises PeerLost if there is none."""


def dialer(identity: Identity, spec: StateSpec) -> Dialer:
    """Return a dialer for the server of this process: through shared memory if it is possible."""

    def dial() -> WorkerEnd:
        address, token = identity.address, identity.token()
        if not is_tcp(address):
            return SharedMemoryWorker(connect(address, token), spec)
        with suppress(PeerLost, ProtocolError):  # it isn't on this host, or wants no shared memory
            return SharedMemoryWorker(connect(local_twin(address, token), token), spec)
        tls = None if identity.tls is None else client_context(identity.tls)
        return _dial_tcp(address, token, spec, tls)

    return dial


def _dial_tcp(address: str, token: str, spec: StateSpec, tls: ssl.SSLContext | None) -> WorkerEnd:
    channel = connect(address, token, tls=tls)

    def dial_data(server: str) -> DataSocket:
        return DataSocket(connect_data(server, token, channel.session, tls=tls))

    try:
        data = dial_data(address)
    except BaseException:
        channel.close()
        raise
    return TcpWorker(ControlSocket(channel), data, spec, dial_data)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class ServerConnection:
    """A worker's end of the transport, and a new one after each loss of the server."""

    def __init__(
        self,
        worker: int,
        spec: StateSpec,
        dial: Dialer,
        ahead: tuple[int, ...] = (),
        system: System = SYSTEM,
        seat: bytes = b"",
    ) -> None:
        """`ahead`: how many batches of each stream the worker wants to hold.

        `seat`: for which its launcher has reserved the number; empty: it hasn't.
        """
        self.ahead = ahead
        self.system = system
        self._worker = worker
        self.session = secrets.token_bytes(16)
        """Identifies this process at the server."""
        self.check: Callable[[], None] = lambda: None
        """Called before each attempt to connect; may raise."""
        self._seat = seat
        self._spec = spec
        self._dial = dial
        self.end: WorkerEnd  # the worker's end of the transport; there is one after `join`
        self._has_end = False

    def join(self) -> tuple[messages.Welcome, OpenedSlot]:
        """Connect to the server, which may still be starting, and join its run.

        Tries again with growing pauses, also if another server of the run can't be reached. Raises
        ProtocolError if the server refuses this worker, PeerLost if none appears in time.
        """
        if self._has_end:
            _say("lost the server; waiting for it to restart")
        wait = ServerWait("the server", _say, self.system.monotonic)
        self.close()
        while True:
            self.check()
            try:
                self.end, self._has_end = self._dial(), True
                return self._join()
            except PeerLost as error:  # also if it dies, or can't be reached, during the welcome
                self.close()
                pause_s = wait.fail(error)
            self.system.sleep(pause_s)

    def _join(self) -> tuple[messages.Welcome, OpenedSlot]:
        join = messages.Join(
            self._worker, RELEASE, self._spec, self.ahead, self.session, self._seat
        )
        self.end.send(join)
        answer = self.end.receive()
        if isinstance(answer, messages.Refused):
            raise self.refusal(answer)
        if not isinstance(answer, messages.Welcome):
            raise ProtocolError(f"expected a welcome, got {answer!r}")
        return answer, self.end.open_slot()

    def refusal(self, message: messages.Refused) -> ProtocolError:
        """Return the error for a server that refuses this worker, which it may do at any time."""
        return ProtocolError(f"the server refused worker {self._worker}: {message.reason}")

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._has_end:
            self.end.close()
