# SPDX-License-Identifier: BSD-3-Clause
"""The states of a worker, and what may happen in each.

Three small state machines run side by side. Every event goes to all of them. If the table of one
has no row for the event in its current state, `InternalError` is raised and no machine moves.

Connection: is there a server to talk to?

    ========  ===========  ========
    state     event        next
    ========  ===========  ========
    JOINED    SERVER_LOST  LOST
    JOINED    RUN_ENDED    ENDED
    LOST      REJOINED     JOINED
    ENDED     SERVER_LOST  ENDED      the server may exit before the worker does
    ========  ===========  ========

Turn: is the gradient that this worker is computing still wanted?

    =========  ==============  =========
    state      event           next
    =========  ==============  =========
    IDLE       ASSIGNED        COMPUTING
    COMPUTING  TURN_CANCELLED  CANCELLED  the update was made without this gradient
    COMPUTING  RUN_ENDED       CANCELLED
    CANCELLED  BACKWARD_CUT    CUT        the gradient is incomplete
    any busy   SERVER_LOST     VOID       the next server doesn't know this turn
    any busy   CLOSED          IDLE       the script has called optimizer.step()
    =========  ==============  =========

    "Any busy" is COMPUTING, CANCELLED, CUT or VOID. A COMPUTING or CANCELLED turn ends with a
    gradient report, a CUT one with an abandon report, a VOID one without a report. Cancelling,
    cutting or ending a turn whose gradient is no longer wanted changes nothing. Neither do the end
    of the run, the loss of the server, or a skipped backward pass in an IDLE worker.

Backward: may a gradient hook interrupt the backward pass? Only inside `run.backward()`, which knows
how to clean up; a plain `loss.backward()` runs to its end.

    =======  =================  =======
    state    event              next
    =======  =================  =======
    OUTSIDE  BACKWARD_STARTED   INSIDE
    INSIDE   BACKWARD_FINISHED  OUTSIDE
    =======  =================  =======
"""

from enum import Enum, auto

from paceline.errors import InternalError

__all__ = ["Backward", "Connection", "Turn", "WorkerEvent", "WorkerState"]


class _Named(Enum):
    """A state or an event."""

    __hash__ = object.__hash__  # Enum's own is slow, and every step looks states up


class Connection(_Named):
    """Whether there is a server to talk to."""

    JOINED = auto()
    LOST = auto()  # until the worker has joined the next server
    ENDED = auto()  # the run is over; the server may still answer requests for a state


class Turn(_Named):
    """Whether the gradient that is being computed is still wanted."""

    IDLE = auto()  # there is none
    COMPUTING = auto()
    CANCELLED = auto()  # no longer wanted, but the server expects a report
    CUT = auto()  # cancelled, and incomplete
    VOID = auto()  # no server expects a report


class Backward(_Named):
    """Whether a gradient hook may interrupt the backward pass."""

    OUTSIDE = auto()
    INSIDE = auto()


class WorkerEvent(_Named):
    """What happens to a worker."""

    ASSIGNED = auto()  # a turn has begun
    TURN_CANCELLED = auto()
    BACKWARD_STARTED = auto()
    BACKWARD_CUT = auto()  # interrupted, or skipped
    BACKWARD_FINISHED = auto()  # by itself or by a cut
    CLOSED = auto()  # the turn is over: reported, or void
    SERVER_LOST = auto()
    REJOINED = auto()
    RUN_ENDED = auto()


_BUSY = (Turn.COMPUTING, Turn.CANCELLED, Turn.CUT, Turn.VOID)
_WORTHLESS = (Turn.CANCELLED, Turn.CUT, Turn.VOID)
_BACKWARD_EVENTS = (
    WorkerEvent.BACKWARD_STARTED,
    WorkerEvent.BACKWARD_CUT,
    WorkerEvent.BACKWARD_FINISHED,
)

_CONNECTION: dict[tuple[Connection, WorkerEvent], Connection] = {
    # Computing needs no server.
    **{(state, event): state for state in Connection for event in _BACKWARD_EVENTS},
    **{(state, WorkerEvent.CLOSED): state for state in Connection},
    (Connection.JOINED, WorkerEvent.ASSIGNED): Connection.JOINED,
    (Connection.JOINED, WorkerEvent.TURN_CANCELLED): Connection.JOINED,
    (Connection.JOINED, WorkerEvent.SERVER_LOST): Connection.LOST,
    (Connection.JOINED, WorkerEvent.RUN_ENDED): Connection.ENDED,
    (Connection.LOST, WorkerEvent.REJOINED): Connection.JOINED,
    (Connection.ENDED, WorkerEvent.SERVER_LOST): Connection.ENDED,
    (Connection.ENDED, WorkerEvent.TURN_CANCELLED): Connection.ENDED,
}

_TURN: dict[tuple[Turn, WorkerEvent], Turn] = {
    **{(state, WorkerEvent.BACKWARD_STARTED): state for state in Turn},
    **{(state, WorkerEvent.BACKWARD_FINISHED): state for state in Turn},
    **{(state, WorkerEvent.TURN_CANCELLED): state for state in _WORTHLESS},
    **{(state, WorkerEvent.BACKWARD_CUT): state for state in (Turn.IDLE, Turn.CUT, Turn.VOID)},
    **{(state, WorkerEvent.RUN_ENDED): state for state in (Turn.IDLE, *_WORTHLESS)},
    **{(state, WorkerEvent.SERVER_LOST): Turn.VOID for state in _BUSY},
    **{(state, WorkerEvent.CLOSED): Turn.IDLE for state in _BUSY},
    (Turn.IDLE, WorkerEvent.SERVER_LOST): Turn.IDLE,
    (Turn.IDLE, WorkerEvent.REJOINED): Turn.IDLE,
    (Turn.VOID, WorkerEvent.REJOINED): Turn.VOID,
    (Turn.IDLE, WorkerEvent.ASSIGNED): Turn.COMPUTING,
    (Turn.COMPUTING, WorkerEvent.TURN_CANCELLED): Turn.CANCELLED,
    (Turn.COMPUTING, WorkerEvent.RUN_ENDED): Turn.CANCELLED,
    (Turn.CANCELLED, WorkerEvent.BACKWARD_CUT): Turn.CUT,
}

_BACKWARD: dict[tuple[Backward, WorkerEvent], Backward] = {
    **{
        (state, event): state
        for state in Backward
        for event in WorkerEvent
        if event not in (WorkerEvent.BACKWARD_STARTED, WorkerEvent.BACKWARD_FINISHED)
    },
    (Backward.OUTSIDE, WorkerEvent.BACKWARD_STARTED): Backward.INSIDE,
    (Backward.INSIDE, WorkerEvent.BACKWARD_FINISHED): Backward.OUTSIDE,
}


class WorkerState:
    """Where a worker is in each of the three machines."""

    def __init__(self) -> None:
        self.connection = Connection.JOINED
        self.turn = Turn.IDLE
        self.backward = Backward.OUTSIDE

    def apply(self, event: WorkerEvent) -> None:
        """Move every machine; raises InternalError, and moves none, if the event is illegal."""
        try:
            connection = _CONNECTION[self.connection, event]
            turn = _TURN[self.turn, event]
            backward = _BACKWARD[self.backward, event]
        except KeyError:
            raise InternalError(
                f"{event.name} is illegal in a worker that is {self.connection.name}, "
                f"{self.turn.name}, {self.backward.name}; please report this"
            ) from None
        self.connection, self.turn, self.backward = connection, turn, backward

    @property
    def has_turn(self) -> bool:
        """Whether the server, or one that was lost, has asked for a gradient."""
        return self.turn is not Turn.IDLE

    @property
    def is_void(self) -> bool:
        """Whether no server expects a report on the turn."""
        return self.turn is Turn.VOID

    @property
    def is_worthless(self) -> bool:
        """Whether the gradient that is being computed is no longer wanted."""
        return self.turn in _WORTHLESS

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.connection is Connection.ENDED
