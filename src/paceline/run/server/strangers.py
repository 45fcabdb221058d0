# SPDX-License-Identifier: BSD-3-Clause
"""Connections that have not proved that they know the token: accept and authenticate them.

Anyone who reaches the server's address can connect, as often as they like. Strangers must cost the
run neither memory nor time:

- each may send a few hundred bytes and has a few seconds; of too many, the oldest is closed;
- together they get a small share of the server's processor time. Once they have used it up, they
  wait, and the OS refuses further connections when its queue is full. What was used for a client
  that turns out to know the token is given back, so that any number of workers can start;
- strangers have an epoll of their own, which is one entry in the listener's selector.

With TLS, the first byte tells whether a client speaks it. Only then does a connection get the
memory that TLS needs.
"""

import select
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import thread_time
from typing import Any, NamedTuple

from paceline.errors import PeerLost, ProtocolError
from paceline.run.net.address import accept
from paceline.run.net.channel import STRANGER_LIMIT, Channel, wait_ready
from paceline.run.net.connection_messages import Kind
from paceline.run.net.handshake import Challenger
from paceline.run.net.messages import Hello, Refused, decode_stranger
from paceline.run.net.tls import wrap_server
from paceline.run.server.refusals import Refusals

__all__ = ["STRANGERS_MAX", "STRANGER_TIMEOUT_S", "Authenticated", "Strangers"]

STRANGER_TIMEOUT_S = 10.0  # to authenticate, which takes a worker milliseconds
STRANGERS_MAX = 256  # unauthenticated connections at a time; the oldest is closed for a new one
SHARE = 0.02  # of the server's processor time, in the long run
SAVED_S = 0.1  # of processor time that strangers haven't used; many workers may start at once
RESUMES_S = 0.0005  # after strangers have used up their time, they wait until they have this much
EVENTS_MAX = 16  # served before the listener looks at its members again
PAUSE_S = 1.0  # before accepting again, if the process has too many open files

_TLS_HANDSHAKE = b"\x16"  # the first byte of a client that speaks TLS


class Authenticated(NamedTuple):
    """A connection that has proved that it knows the token."""

    channel: Channel[Any]
    session: bytes  # that it opens, unless it is a data connection
    kind: Kind
    of_session: bytes  # that a "data" or "hosted" connection belongs to


@dataclass(eq=False)
class _Stranger:
    sock: socket.socket
    channel: Channel[Any]
    challenger: Challenger
    accepted_at: float
    used_s: float = 0.0  # processor time
    needs_tls: bool = False  # it must speak TLS, and hasn't sent anything yet


class Strangers:
    """All unauthenticated connections of the server, and the sockets that it listens on."""

    def __init__(
        self,
        listening: Sequence[socket.socket],
        token: str,
        refusals: Refusals,
        clock: Callable[[], float],
        tls: ssl.SSLContext | None = None,
        processor_time: Callable[[], float] = thread_time,
    ) -> None:
        """`tls`: for TCP connections; None: they aren't encrypted."""
        self._listening = {sock.fileno(): sock for sock in listening}
        self._token = token
        self._refusals = refusals
        self._clock = clock
        self._tls = tls
        self._processor_time = processor_time
        self._epoll = select.epoll()
        for fd in self._listening:
            self._epoll.register(fd, select.EPOLLIN)
        self._strangers: dict[int, _Stranger] = {}  # by descriptor, oldest first
        self._saved_s = SAVED_S
        self._saved_at = clock()
        self._serve_at = 0.0  # until then, strangers have used up their time
        self._accept_at = 0.0  # when to accept again; 0: now

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._strangers)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `serve` has something to do."""
        return self._epoll.fileno()

    def close(self) -> None:
        """Close all connections and sockets."""
        for fd in list(self._strangers):
            self._drop(fd)
        self._epoll.close()
        for sock in self._listening.values():
            sock.close()

    # ------------------------------------------------------------------------- processor time

    def pause_s(self) -> float:
        """Return for how long not to call `serve`; 0: it may be called."""
        return max(0.0, self._serve_at - self._clock())

    def due_s(self) -> float | None:
        """Return when to call `serve` even if the descriptor isn't readable; None: no need to."""
        times = [self._accept_at] if self._accept_at else []
        if self._strangers:
            times.append(next(iter(self._strangers.values())).accepted_at + STRANGER_TIMEOUT_S)
        return max(0.0, min(times) - self._clock()) if times else None

    def serve(self) -> list[Authenticated]:
        """Accept and authenticate a few; return those that are authenticated now."""
        began = self._processor_time()
        found = []
        if self._accept_at and self._clock() >= self._accept_at:
            self._resume_accepting()
        for fd, _ in self._epoll.poll(0, EVENTS_MAX):
            if fd in self._listening:
                self._accept(self._listening[fd])
            elif fd in self._strangers:
                found += self._authenticate(fd)
        self._close_slow()
        self._spend(self._processor_time() - began)
        return found

    def _spend(self, used_s: float) -> None:
        """Note how much was used; once it is too much, wait until there is enough for a while."""
        now = self._clock()
        self._saved_s = min(SAVED_S, self._saved_s + SHARE * (now - self._saved_at)) - used_s
        self._saved_at = now
        if self._saved_s <= 0:
            self._serve_at = now + (RESUMES_S - self._saved_s) / SHARE

    # ------------------------------------------------------------------------------- accepting

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(EVENTS_MAX):
            try:
                sock = accept(listening)
            except OSError:
                self._on_no_resources()
                return
            if sock is None:
                return
            self._add(sock)

    def _add(self, sock: socket.socket) -> None:
        while len(self._strangers) >= STRANGERS_MAX:
            self._drop(next(iter(self._strangers)))
        channel: Channel[Any] = Channel(sock, decode_stranger, STRANGER_LIMIT)
        self._strangers[sock.fileno()] = _Stranger(
            sock,
            channel,
            Challenger(self._token),
            self._clock(),
            needs_tls=self._tls is not None and not channel.is_local,
        )
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _on_no_resources(self) -> None:
        """Make room, or stop accepting for a while: a pending connection would wake us forever."""
        if self._strangers:
            self._drop(next(iter(self._strangers)))
        elif not self._accept_at:
            self._accept_at = self._clock() + PAUSE_S
            for fd in self._listening:
                self._epoll.unregister(fd)

    def _resume_accepting(self) -> None:
        self._accept_at = 0.0
        for fd in self._listening:
            self._epoll.register(fd, select.EPOLLIN)

    # -------------------------------------------------------------------------- authentication

    def _authenticate(self, fd: int) -> list[Authenticated]:
        """Continue the handshake; return the connection if it is complete."""
        stranger, began = self._strangers[fd], self._processor_time()
        found: list[Authenticated] = []
        try:
            if not stranger.needs_tls or self._begin_tls(stranger):
                found = self._receive(fd, stranger)
        except ProtocolError as error:
            self._forget(fd)
            self.refuse(stranger.channel, str(error))
        except (PeerLost, OSError):
            self._drop(fd)
        stranger.used_s += self._processor_time() - began
        if found:
            self._saved_s += stranger.used_s
        return found

    def _begin_tls(self, stranger: _Stranger) -> bool:
        """Use TLS from now on; return False if nothing has arrived yet. May raise OSError."""
        assert self._tls is not None
        try:
            first = stranger.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        if not first:
            raise PeerLost("the connection was closed")
        if first != _TLS_HANDSHAKE:
            raise ProtocolError("this server uses TLS; give its clients TLS certificates as well")
        stranger.sock = wrap_server(stranger.sock, self._tls)
        stranger.channel = Channel(stranger.sock, decode_stranger, STRANGER_LIMIT)
        stranger.needs_tls = False
        return True

    def _receive(self, fd: int, stranger: _Stranger) -> list[Authenticated]:
        channel, challenger = stranger.channel, stranger.challenger
        channel.flush()
        for message in channel.receive_nowait():
            if isinstance(message, Hello):
                channel.send(challenger.answer(message))
                continue
            challenger.check(message)
            self._forget(fd)
            kind, of_session = message.kind, message.session
            return [Authenticated(channel, challenger.session, kind, of_session)]
        return []

    def refuse(self, channel: Channel[Any], reason: str) -> None:
        """Report that a client is refused, tell it why, and close the connection."""
        self._refusals.add(reason, self._clock())
        self._dismiss(channel, reason)

    def _dismiss(self, channel: Channel[Any], reason: str) -> None:
        with suppress(PeerLost, ProtocolError):
            channel.send(Refused(reason))
        channel.close()

    # --------------------------------------------------------------------------------- closing

    def _close_slow(self) -> None:
        limit = self._clock() - STRANGER_TIMEOUT_S
        slow = []
        for fd, stranger in self._strangers.items():
            if stranger.accepted_at >= limit:
                break
            if not wait_ready([fd], [], 0):  # otherwise the server was slow, not the stranger
                slow.append(fd)
        for fd in slow:
            channel = self._strangers[fd].channel
            self._forget(fd)
            self._dismiss(channel, "it took too long to authenticate")

    def _drop(self, fd: int) -> None:
        """Close a connection without a word."""
        stranger = self._strangers[fd]
        self._forget(fd)
        stranger.channel.close()
        stranger.sock.close()

    def _forget(self, fd: int) -> None:
        del self._strangers[fd]
        self._epoll.unregister(fd)
