# SPDX-License-Identifier: BSD-3-Clause
"""The worker's state machines follow exactly the rows of their tables."""

from itertools import product

import pytest

from paceline.errors import InternalError
from paceline.run.worker import states
from paceline.run.worker.states import Backward, Connection, Turn, WorkerEvent, WorkerState

BUSY = {Turn.COMPUTING, Turn.CANCELLED, Turn.CUT, Turn.VOID}
WORTHLESS = BUSY - {Turn.COMPUTING}

# WorkerEvent by event: the states in which it may happen, and where it leads.
CONNECTION = {
    WorkerEvent.ASSIGNED: {Connection.JOINED: Connection.JOINED},
    WorkerEvent.TURN_CANCELLED: {
        Connection.JOINED: Connection.JOINED,
        Connection.ENDED: Connection.ENDED,
    },
    WorkerEvent.BACKWARD_STARTED: {state: state for state in Connection},
    WorkerEvent.BACKWARD_CUT: {state: state for state in Connection},
    WorkerEvent.BACKWARD_FINISHED: {state: state for state in Connection},
    WorkerEvent.CLOSED: {state: state for state in Connection},
    WorkerEvent.SERVER_LOST: {
        Connection.JOINED: Connection.LOST,
        Connection.ENDED: Connection.ENDED,
    },
    WorkerEvent.REJOINED: {Connection.LOST: Connection.JOINED},
    WorkerEvent.RUN_ENDED: {Connection.JOINED: Connection.ENDED},
}
TURN = {
    WorkerEvent.ASSIGNED: {Turn.IDLE: Turn.COMPUTING},
    WorkerEvent.TURN_CANCELLED: {
        Turn.COMPUTING: Turn.CANCELLED,
        **{state: state for state in WORTHLESS},
    },
    WorkerEvent.BACKWARD_STARTED: {state: state for state in Turn},
    WorkerEvent.BACKWARD_CUT: {
        Turn.IDLE: Turn.IDLE,
        Turn.CANCELLED: Turn.CUT,
        Turn.CUT: Turn.CUT,
        Turn.VOID: Turn.VOID,
    },
    WorkerEvent.BACKWARD_FINISHED: {state: state for state in Turn},
    WorkerEvent.CLOSED: dict.fromkeys(BUSY, Turn.IDLE),
    WorkerEvent.SERVER_LOST: {Turn.IDLE: Turn.IDLE, **dict.fromkeys(BUSY, Turn.VOID)},
    WorkerEvent.REJOINED: {Turn.IDLE: Turn.IDLE, Turn.VOID: Turn.VOID},
    WorkerEvent.RUN_ENDED: {
        Turn.IDLE: Turn.IDLE,
        Turn.COMPUTING: Turn.CANCELLED,
        **{state: state for state in WORTHLESS},
    },
}
BACKWARD = {
    **{event: {state: state for state in Backward} for event in WorkerEvent},
    WorkerEvent.BACKWARD_STARTED: {Backward.OUTSIDE: Backward.INSIDE},
    WorkerEvent.BACKWARD_FINISHED: {Backward.INSIDE: Backward.OUTSIDE},
}
EVERY_STATE = list(product(Connection, Turn, Backward))


def worker_in(connection: Connection, turn: Turn, backward: Backward) -> WorkerState:
    state = WorkerState()
    state.connection, state.turn, state.backward = connection, turn, backward
    return state


def where(state: WorkerState) -> tuple[Connection, Turn, Backward]:
    return state.connection, state.turn, state.backward


@pytest.mark.parametrize("event", WorkerEvent, ids=lambda event: event.name)
def test_every_event_leads_where_the_table_says_and_is_refused_elsewhere(event):
    for before in EVERY_STATE:
        state = worker_in(*before)
        tables = (CONNECTION[event], TURN[event], BACKWARD[event])
        after = tuple(table.get(old) for table, old in zip(tables, before, strict=True))
        if None in after:
            with pytest.raises(InternalError, match=f"{event.name} is illegal in a worker that is"):
                state.apply(event)
            assert where(state) == before
        else:
            state.apply(event)
            assert where(state) == after


def reachable() -> set[tuple[Connection, Turn, Backward]]:
    """Return every combination of states that legal events can lead to."""
    found = {where(WorkerState())}
    frontier = list(found)
    while frontier:
        before = frontier.pop()
        for event in WorkerEvent:
            state = worker_in(*before)
            try:
                state.apply(event)
            except InternalError:
                continue
            if where(state) not in found:
                found.add(where(state))
                frontier.append(where(state))
    return found


def test_worker_never_computes_for_a_lost_server_or_an_ended_run():
    for connection, turn, _ in reachable():
        if turn is Turn.COMPUTING:
            assert connection is Connection.JOINED
        if connection is Connection.LOST:
            assert turn in (Turn.IDLE, Turn.VOID)


def test_from_every_reachable_state_the_run_can_end_with_an_idle_worker():
    for before in reachable():
        state = worker_in(*before)
        if state.connection is Connection.LOST:
            state.apply(WorkerEvent.REJOINED)
        if not state.is_over:
            state.apply(WorkerEvent.RUN_ENDED)
        if state.has_turn:
            state.apply(WorkerEvent.CLOSED)
        assert state.is_over
        assert state.turn is Turn.IDLE


def test_end_of_a_run_is_final():
    for before in reachable():
        if before[0] is Connection.ENDED:
            for event in WorkerEvent:
                state = worker_in(*before)
                try:
                    state.apply(event)
                except InternalError:
                    continue
                assert state.is_over


def rows_of_the_docstring() -> list[tuple[str, str, str]]:
    assert states.__doc__ is not None
    names = {event.name for event in WorkerEvent}
    split = [line.split() for line in states.__doc__.splitlines()]
    return [
        (" ".join(words[: words.index(name)]), name, words[words.index(name) + 1])
        for words in split
        for name in names.intersection(words)
        if words.index(name) in (1, 2) and len(words) > words.index(name) + 1
    ]


def test_every_row_of_the_docstring_is_a_transition():
    rows = rows_of_the_docstring()
    assert len(rows) == 12
    tables = {
        **{state.name: CONNECTION for state in Connection},
        **{state.name: TURN for state in Turn},
        **{state.name: BACKWARD for state in Backward},
    }
    kinds = {"connection": Connection, "turn": Turn, "backward": Backward}
    by_name = {state.name: state for kind in kinds.values() for state in kind}
    for name, event, after in rows:
        before = BUSY if name == "any busy" else {by_name[name]}
        table = TURN if name == "any busy" else tables[name]
        for state in before:
            assert table[WorkerEvent[event]][state] is by_name[after]


def test_every_change_of_state_is_a_row_of_the_docstring():
    rows = rows_of_the_docstring()
    for table in (CONNECTION, TURN, BACKWARD):
        for event, ends in table.items():
            for before, after in ends.items():
                if before is not after:
                    names = {before.name, "any busy"} if before in BUSY else {before.name}
                    assert any((name, event.name, after.name) in rows for name in names)


def test_turn_is_worthless_once_it_is_cancelled_cut_or_void():
    for turn in Turn:
        state = worker_in(Connection.JOINED, turn, Backward.OUTSIDE)
        assert state.is_worthless == (turn in WORTHLESS)
        assert state.has_turn == (turn is not Turn.IDLE)
