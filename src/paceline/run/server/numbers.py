# SPDX-License-Identifier: BSD-3-Clause
"""The numbers of workers that were started on other hosts without one.

A launcher of such workers asks for a number for each of its seats. It gets the lowest one that no
worker has, that isn't reserved and that wasn't given up; beyond those that the run was started
with, they are additional backups. The number stays reserved while the launcher's connection is
open, also while its worker is being restarted.

The next server knows nothing of reservations. So it lets those who had a number come back first:
for a while, it answers only launchers that ask for a certain number.
"""

from collections.abc import Callable
from contextlib import suppress
from itertools import count
from math import inf
from typing import Any, NamedTuple

from paceline.errors import PeerLost, ProtocolError
from paceline.release import RELEASE
from paceline.run.net.messages import Join, NumberReserved, ReserveNumber
from paceline.run.net.number_messages import AskRunSize, RunSize
from paceline.run.net.transport import PeerEnd
from paceline.run.server.roster import Roster
from paceline.run.server.timers import RunClock
from paceline.run.settings import Settings

__all__ = ["Numbers"]

SEATS_MAX = 1000  # of one launcher
RETURN_S = 5.0  # after the start of a server that continues a run; a launcher takes about a second


class _Reservation(NamedTuple):
    """Who has reserved a number."""

    end: PeerEnd
    seat: bytes


class Numbers:
    """Reserves numbers for workers that join later."""

    def __init__(
        self,
        settings: Settings,
        roster: Roster,
        clock: RunClock,
        look_at: Callable[[PeerEnd], None],
    ) -> None:
        """`look_at`: handles what has arrived at a connection, such as that it was closed."""
        self._settings = settings
        self._roster = roster
        self._clock = clock
        self._look_at = look_at
        self._reserved: dict[int, _Reservation] = {}  # by number
        self._waiting: list[tuple[PeerEnd, ReserveNumber]] = []
        self._opens_at = -inf  # before, only those who had a number get one
        self.handlers: dict[type, Callable[[PeerEnd, Any], None]] = {
            ReserveNumber: self._on_reserve,
            AskRunSize: self._on_ask,
        }

    def expect_return(self) -> None:
        """Let those come back first who had a number at an earlier server."""
        self._opens_at = self._clock.now() + RETURN_S

    def check(self, join: Join) -> None:
        """Raise ProtocolError if the number of a worker that joins is reserved for another one."""
        reservation = self._reserved.get(join.worker)
        if reservation is not None and reservation.seat != join.seat:
            raise _taken(join.worker)

    def remove(self, end: PeerEnd) -> None:
        """Forget what was reserved through a connection that is gone."""
        self._waiting = [one for one in self._waiting if one[0] is not end]
        for number in [n for n, one in self._reserved.items() if one.end is end]:
            del self._reserved[number]

    def tick(self) -> None:
        """Answer those who have waited for their number, if it is time."""
        if not self._waiting or self._clock.now() < self._opens_at:
            return
        waiting, self._waiting = self._waiting, []
        for end, message in waiting:
            with suppress(PeerLost):  # the next receive reports it
                self._reserve(end, message)

    def _on_reserve(self, end: PeerEnd, message: ReserveNumber) -> None:
        if message.release != RELEASE:
            raise ProtocolError(f"expected Paceline {RELEASE} in a worker, got {message.release}")
        asked = [*(one.end for one in self._reserved.values()), *(one for one, _ in self._waiting)]
        if asked.count(end) >= SEATS_MAX and self._number_of(message.seat) is None:
            raise ProtocolError(f"one launcher may start at most {SEATS_MAX} workers")
        if message.wanted is None and self._clock.now() < self._opens_at:
            self._waiting.append((end, message))
        else:
            self._reserve(end, message)

    def _on_ask(self, end: PeerEnd, message: AskRunSize) -> None:
        del message
        end.send(RunSize(self._settings.spec.workers))

    def _reserve(self, end: PeerEnd, message: ReserveNumber) -> None:
        number = self._choose(message)
        self._reserved[number] = _Reservation(end, message.seat)
        spec, grace_s = self._settings.spec, self._settings.grace_s
        end.send(NumberReserved(message.seat, number, spec.workers, spec.seed, grace_s))

    def _choose(self, message: ReserveNumber) -> int:
        own = self._number_of(message.seat)
        if own is not None:
            return own
        wanted = message.wanted
        if wanted is not None:
            member = self._roster.get(wanted)
            if member is not None:
                self._look_at(member.end)  # its process may have died, which isn't known yet
            if not self._is_taken(wanted):
                return wanted
            if message.is_fixed:
                raise _taken(wanted)
        return next(number for number in count() if self._is_free(number))

    def _number_of(self, seat: bytes) -> int | None:
        """Return the number that the seat, or its worker, has already."""
        reserved = (number for number, one in self._reserved.items() if one.seat == seat)
        joined = (peer.worker for peer in self._roster.members if peer.seat == seat)
        return next(reserved, next(joined, None))

    def _is_taken(self, number: int) -> bool:
        return number in self._reserved or self._roster.get(number) is not None

    def _is_free(self, number: int) -> bool:
        return not self._is_taken(number) and not self._roster.is_given_up(number)


def _taken(number: int) -> ProtocolError:
    return ProtocolError(f"there is already a worker {number}; give this one another number")
