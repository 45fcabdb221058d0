# SPDX-License-Identifier: BSD-3-Clause
"""The connection of a launcher of workers to the head of their run, which is elsewhere.

Through it, the launcher gets numbers for its workers, and learns how the run goes. The head may not
be there yet, and may be restarted: the link then connects again, with growing pauses, and asks for
the same numbers. The monitor decides when; its owner calls it.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

from paceline.errors import PeerLost, ProtocolError
from paceline.release import RELEASE
from paceline.run.launch.monitor import RunMonitor
from paceline.run.launch.watch_channel import ServerEnd
from paceline.run.net.address import NobodyListens
from paceline.run.net.messages import FromServer, LeaveRun, NumberReserved, Refused, ReserveNumber
from paceline.run.net.server_wait import ServerWait
from paceline.run.system import SYSTEM, System

__all__ = ["HeadConnection"]


class HeadConnection:
    """A launcher's connection to the head, and what it has got through it."""

    def __init__(
        self, dial: Callable[[], ServerEnd], wait: ServerWait, system: System = SYSTEM
    ) -> None:
        """`dial` connects to the head; it raises PeerLost or ProtocolError."""
        self.monitor = RunMonitor(self._dial, system, lambda: self._pause_s)
        self.refusal = ""
        """Why the head has refused this launcher; "": it hasn't."""
        self.gave_up = ""
        """Why the link no longer waits for the head; "": it does, or is connected."""
        self.is_run_gone = False  # no process listens at the address of the head
        self.reserved: dict[bytes, NumberReserved] = {}  # by seat
        self.say = wait.say
        """Shows a line to the user."""
        self.on_connect: Callable[[], None] = lambda: None
        self._dial_head = dial
        self._wait = wait
        self._pause_s = 0.0
        self._requests: dict[bytes, ReserveNumber] = {}  # by seat
        self._end: ServerEnd | None = None
        self._base: Counter[int] = Counter()  # gradients that earlier heads accepted, by worker
        self._last: Counter[int] = Counter()  # that this head has accepted

    def start(self) -> None:
        """Begin to look for the head."""
        self._wait.begin()
        self.monitor.on_server_start()

    def request(self, seat: bytes, wanted: int | None, *, is_fixed: bool = False) -> None:
        """Ask for a number for a seat; the answer will be in `reserved`."""
        self.reserved.pop(seat, None)
        request = self._requests[seat] = ReserveNumber(seat, RELEASE, wanted, is_fixed)
        if self._end is not None:
            with suppress(PeerLost):  # the next receive reports it
                self._end.send(request)

    def leave(self, worker: int, seat: bytes) -> None:
        """Tell the head that a worker leaves, because its host is about to go."""
        if self._end is not None:
            with suppress(PeerLost):  # the next receive reports it
                self._end.send(LeaveRun(worker, seat=seat))

    def progress(self, worker: int) -> int:
        """Return how many gradients of a worker were accepted; it never gets smaller."""
        accepted = self.monitor.accepted[worker]
        if accepted < self._last[worker]:
            self._base[worker] += self._last[worker]
        self._last[worker] = accepted
        return self._base[worker] + accepted

    def _dial(self) -> ServerEnd:
        try:
            end = self._end = _LinkedEnd(self._dial_head(), self)
        except ProtocolError as error:
            self.refuse(str(error))
            raise PeerLost(self.refusal) from None
        except PeerLost as error:
            self.is_run_gone = isinstance(error, NobodyListens)
            self._fail(error)
            raise
        self.is_run_gone = False
        self.on_connect()
        for request in self._requests.values():
            end.send(request)
        return end

    def take(self, reserved: NumberReserved) -> None:
        """Note a number; from now on, ask for the same one."""
        self.reserved[reserved.seat] = reserved
        request = self._requests[reserved.seat]
        self._requests[reserved.seat] = ReserveNumber(
            request.seat, RELEASE, reserved.number, request.is_fixed
        )

    def refuse(self, reason: str) -> None:
        """Note that the head refuses this launcher: trying again is useless."""
        self.refusal = reason
        self._end = None

    def lose(self, error: PeerLost, *, was_heard: bool) -> None:
        """Note that the connection is gone; `was_heard`: the head had answered."""
        self._end = None
        if was_heard:
            self._wait.begin()
        self._fail(error)

    def _fail(self, error: PeerLost) -> None:
        """Note a failed attempt, and when to make the next one."""
        try:
            self._pause_s = self._wait.fail(error)
        except PeerLost as limit:
            self.gave_up = str(limit)


class _LinkedEnd:
    """A connection whose messages about numbers are for the link, the others for its monitor."""

    def __init__(self, end: ServerEnd, link: HeadConnection) -> None:
        self._end = end
        self._link = link
        self._was_heard = False

    def send(self, message: object) -> None:
        """Send a message."""
        self._end.send(message)

    def receive_nowait(self) -> Iterator[FromServer]:
        """Yield the messages that have arrived and aren't for the link."""
        try:
            for message in self._end.receive_nowait():
                self._was_heard = True
                if isinstance(message, NumberReserved):
                    self._link.take(message)
                elif isinstance(message, Refused):
                    self._link.refuse(f"the server refused this host's workers: {message.reason}")
                else:
                    yield message
        except ProtocolError as error:
            self._link.refuse(str(error))
            raise
        except PeerLost as error:
            self._link.lose(error, was_heard=self._was_heard)
            raise

    def wait_readable(self, timeout_s: float) -> bool:
        """Return whether there is something to receive within this time."""
        return self._end.wait_readable(timeout_s)

    def close(self) -> None:
        """Close the connection."""
        self._end.close()
