# SPDX-License-Identifier: BSD-3-Clause
"""Serve a part of the parameters on this machine: memory, sockets, and the way to the head."""

import os
import signal
import sys
from contextlib import ExitStack, suppress
from functools import partial
from types import FrameType
from typing import NoReturn

from paceline.errors import InternalError, PacelineError
from paceline.run.launch.environment import Identity, check_listening
from paceline.run.net.address import host_of, listen, of_socket
from paceline.run.net.data_socket import DataSocket
from paceline.run.net.handshake import connect, connect_data
from paceline.run.net.shared_memory import SharedMemoryStore
from paceline.run.net.tcp_client import ControlSocket, TcpClient
from paceline.run.net.tls import client_context, server_context
from paceline.run.server.part_listener import HeadLink, PartListener
from paceline.run.server.part_server import PartServer
from paceline.run.system import SYSTEM, System
from paceline.run.tensors.layout import TrainingState
from paceline.run.tensors.partition import Part

__all__ = ["serve_part"]

EVERYWHERE = ("0.0.0.0", "::", "[::]", "")  # as a host to listen at

# Seconds after SIGTERM. What stops a whole run this way, such as systemd or Slurm, also stops the
# head, which can't save the run without this server.
LINGER_S = 20

_say = partial(print, flush=True)


class _PartHost:
    """This machine."""

    system: System = SYSTEM

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._token = identity.token()
        tls = identity.tls
        self._server_tls = None if tls is None else server_context(tls)
        self._client_tls = None if tls is None else client_context(tls)

    def new_store(self, part: Part) -> SharedMemoryStore:
        """Return memory for a part."""
        return SharedMemoryStore(part.spec, part.layout)

    def connect(self) -> PartListener:
        """Connect to the head once, and listen; raises PeerLost if there is no head."""
        who, token = self._identity, self._token
        check_listening(who.listen, who.token_file)
        with ExitStack() as on_error:
            channel = connect(who.address, token, tls=self._client_tls)
            on_error.callback(channel.close)
            data = connect_data(who.address, token, channel.session, tls=self._client_tls)
            on_error.callback(data.close)
            listening = listen(who.listen)
            on_error.pop_all()
        address = of_socket(listening, who.listen)
        if host_of(address) in EVERYWHERE:  # the head is reached from the address that others need
            port = address.rpartition(":")[2]
            address = f"tcp:{_bracketed(data.getsockname()[0])}:{port}"
        control, stream = ControlSocket(channel), DataSocket(data)
        head = HeadLink(control, stream, TcpClient(control, stream))
        return PartListener([listening], address, token, head, SYSTEM, self._server_tls)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class _Stopped(BaseException):
    """A signal ends this process."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def serve_part(identity: Identity, whole: TrainingState) -> NoReturn:
    """Serve a part of a run until it has ended, and exit.

    If that is impossible, because the head refuses this server, say, exit with the error's code.
    """
    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _stop_soon)
    try:
        PartServer(identity.server, whole, _PartHost(identity), _say).serve()
    except InternalError:
        raise
    except PacelineError as error:
        print(error, file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from None
    except _Stopped as stopped:
        _die_of(stopped.number)
    raise SystemExit(0)


def _stop_soon(number: int, frame: FrameType | None) -> None:
    """End this process after a while, unless the run ends before; at once at the next signal."""
    del frame
    signal.signal(number, _stop)
    signal.signal(signal.SIGALRM, lambda _, frame: _stop(number, frame))
    signal.alarm(LINGER_S)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """End this process, which has nothing to save, without a traceback."""
    del frame
    raise _Stopped(number)


def _die_of(number: int) -> None:
    """Die of a signal, so that a launcher doesn't take it for the end of the run."""
    with suppress(OSError):  # nobody reads them
        sys.stdout.flush()
        sys.stderr.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
