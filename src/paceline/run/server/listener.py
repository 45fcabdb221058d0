# SPDX-License-Identifier: BSD-3-Clause
"""The server's side of all connections: who knocks, who says what, who is gone.

What comes out is only what workers say: strangers are dealt with here, and a peer that breaks the
rules is shown out before its message reaches anybody.
"""

import selectors
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from time import monotonic
from types import FrameType

from paceline.errors import PeerLost
from paceline.run.net.channel import Challenger, accept
from paceline.run.net.messages import FromWorker, Hello, Proof, Refused, decode_stranger
from paceline.run.server.peers import STRANGER_PATIENCE_S, STRANGERS_MAX, Peer, pid_of

__all__ = ["Listener"]


class Listener:
    """All connections of the server."""

    def __init__(self, sock: socket.socket, token: str) -> None:
        self._listener = sock
        self._token = token
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._strangers: dict[Peer, None] = {}  # oldest first
        self.stop_wanted = False
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def stop_on(self, *signals: int) -> None:
        """These signals ask for the end of the run; `stop_wanted` tells, and `wait` wakes up."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            del number, frame
            self.stop_wanted = True

        for number in signals:
            signal.signal(number, on_signal)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)

    def wait(self, seconds: float | None) -> list[Peer]:
        """Wait so long for somebody to say something; return who did."""
        peers = []
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._let_in()
            elif key.fileobj is self._woken:
                self._woken.recv(4096)
            else:
                peers.append(key.data)
        if self._strangers:
            self._send_away_the_slow(peers)
        return peers

    def hear(self, peer: Peer) -> Iterator[FromWorker]:
        """What a worker says; strangers are dealt with. Raises ProtocolError and PeerLost."""
        for message in peer.channel.receive_nowait():
            if isinstance(message, (Hello, Proof)):
                peer.introduce(message)
                if peer.is_proven:
                    self._strangers.pop(peer, None)
            else:
                yield message

    def close(self, peer: Peer, reason: str = "") -> None:
        """End a connection; with a reason, tell it."""
        self._strangers.pop(peer, None)
        with suppress(KeyError, ValueError):
            self._selector.unregister(peer.channel)
        if reason:
            with suppress(PeerLost):
                peer.channel.send(Refused(reason))
        peer.channel.close()

    def shut(self) -> None:
        """Close everything."""
        signal.set_wakeup_fd(-1)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Peer):
                self.close(key.data)
        self._selector.close()
        for sock in (self._listener, self._waker, self._woken):
            sock.close()

    def _let_in(self) -> None:
        channel = accept(self._listener, decode_stranger)
        if channel is None:
            return
        while len(self._strangers) >= STRANGERS_MAX:
            self.close(next(iter(self._strangers)))
        peer = Peer(channel, Challenger(self._token), monotonic(), pid_of(channel))
        self._strangers[peer] = None
        self._selector.register(channel, selectors.EVENT_READ, peer)

    def _send_away_the_slow(self, speaking: list[Peer]) -> None:
        limit = monotonic() - STRANGER_PATIENCE_S
        # Those that have spoken are not slow; it may have been us.
        for peer in [p for p in self._strangers if p.came_at < limit and p not in speaking]:
            self.close(peer, "it took too long to introduce itself")
