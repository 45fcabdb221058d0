# SPDX-License-Identifier: BSD-3-Clause
"""Forward Ethernet frames between two interfaces, each after a delay: a long cable as a program.

    python link_delay.py INTERFACE INTERFACE SECONDS

`Hosts.delay` runs it in the namespace of the switch. It prints a line when it begins to forward,
and ends when its standard input is closed. It imports only the standard library.

Frames arrive in order and leave in order, so a queue for each direction is enough. The kernel
gives each frame with a small header that describes what the network card would still have to do:
to cut a large piece into packets, and to fill in checksums. Sent along, the header makes the kernel
go on as if the frame had never left it.
"""

import select
import socket
import sys
from collections import deque
from contextlib import suppress
from time import monotonic

SOL_PACKET = 263
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
SO_SNDBUFFORCE = 32
SO_RCVBUFFORCE = 33
ETH_P_ALL = 3
BUFFER_BYTES = 64 << 20  # half a second at 1 Gbit/s
FRAME_MAX = 128 << 10
FRAMES_AT_ONCE = 64  # then look at the other direction


def open_interface(name: str) -> socket.socket:
    """Return a socket that receives and sends whole frames."""
    frames = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    frames.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    frames.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    frames.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    frames.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER_BYTES)
    frames.bind((name, ETH_P_ALL))
    frames.setblocking(False)
    return frames


class Direction:
    """Frames on their way from one interface to the other."""

    def __init__(self, source: socket.socket, target: socket.socket, seconds: float) -> None:
        self.source = source
        self._target = target
        self._seconds = seconds
        self._waiting: deque[tuple[float, bytes]] = deque()

    @property
    def due(self) -> float | None:
        """When the next frame has to leave."""
        return self._waiting[0][0] if self._waiting else None

    def receive(self) -> None:
        """Take frames that have arrived."""
        with suppress(OSError):  # no more frames, or the cable is unplugged
            for _ in range(FRAMES_AT_ONCE):
                frame = self.source.recv(FRAME_MAX)
                self._waiting.append((monotonic() + self._seconds, frame))

    def send(self, now: float) -> None:
        """Send the frames that are due."""
        while self._waiting and self._waiting[0][0] <= now:
            frame = self._waiting.popleft()[1]
            with suppress(OSError):  # the queue is full or the cable is unplugged: it is lost
                self._target.send(frame)


def forward(near: socket.socket, far: socket.socket, seconds: float) -> None:
    """Forward until standard input is closed."""
    directions = [Direction(near, far, seconds), Direction(far, near, seconds)]
    readable = [near, far, sys.stdin]
    while True:
        due = min((d.due for d in directions if d.due is not None), default=None)
        timeout = None if due is None else max(0.0, due - monotonic())
        ready = select.select(readable, [], [], timeout)[0]
        if sys.stdin in ready:
            return
        for direction in directions:
            if direction.source in ready:
                direction.receive()
            direction.send(monotonic())


if __name__ == "__main__":
    ends = [open_interface(name) for name in sys.argv[1:3]]
    print("forwarding", flush=True)
    forward(ends[0], ends[1], float(sys.argv[3]))
