"""A session's one sequence of events, read from a place on: rows of the transcript and what happened beside them."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import apsw

from hermes_agent.store import messages
from hermes_agent.store.messages import Stored


class Position(NamedTuple):
    """How far a reader has come: the last event and the last row that it saw."""

    event: int
    seq: int


class StoredEvent(NamedTuple):
    """One event; `row` is what it is about when `kind` is `message`."""

    number: int
    kind: str
    ref: str | None
    at: float
    row: Stored | None


def position(conn: apsw.Connection, session_key: int, event: int) -> Position:
    """The place behind event number `event`."""
    # a row's event number is never below its own and grows with it, so halving finds the last row before the place
    low, high = 0, event
    while low < high:
        middle = (low + high + 1) // 2
        if _event_of(conn, session_key, middle) <= event:
            low = middle
        else:
            high = middle - 1
    return Position(event, low)


def _event_of(conn: apsw.Connection, session_key: int, seq: int) -> int:
    for (event,) in conn.execute("SELECT event FROM messages WHERE id = ?", (messages.row_id(session_key, seq),)):
        return cast("int", event)
    return messages.MAX_SEQ + 1


def read(conn: apsw.Connection, session_key: int, after: Position, limit: int) -> tuple[list[StoredEvent], Position]:
    """At most `limit` events behind the place, in order without gaps, and the place behind them."""
    bounds = (messages.row_id(session_key, after.event), messages.row_id(session_key, messages.MAX_SEQ), limit)
    found = [
        StoredEvent(cast("int", key) & messages.MAX_SEQ, *cast("tuple[str, str | None, float]", rest), None)
        for key, *rest in conn.execute(
            "SELECT id, kind, ref, at FROM events WHERE id > ? AND id <= ? ORDER BY id LIMIT ?", bounds
        )
    ]
    for event, stored in messages.select_events(conn, session_key, after.seq, limit):
        found.append(StoredEvent(event, "message", str(stored.seq), stored.timestamp, stored))
    found.sort(key=_number)
    taken: list[StoredEvent] = []
    last = after
    for item in found[:limit]:
        if item.number != last.event + 1:
            break
        last = Position(item.number, item.row.seq if item.row is not None else last.seq)
        taken.append(item)
    return taken, last


def _number(event: StoredEvent) -> Any:
    return event.number
