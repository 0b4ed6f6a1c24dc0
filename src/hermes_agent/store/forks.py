"""Branching a session: a copy of its rows under another id, which goes its own way from there."""

from __future__ import annotations

import json
import struct
from typing import Any, NamedTuple, cast

import apsw

from hermes_agent import errors
from hermes_agent.store import messages, processes, sessions, turns
from hermes_agent.store.messages import BLOCK, Row, row_id
from hermes_agent.store.sessions import Head
from hermes_agent.store.turns import TurnState


def fork(
    conn: apsw.Connection, source_id: str, session_id: str, *, title: str | None = None, at_seq: int | None = None
) -> Head:
    """Make a session that begins with the active rows of another one; returns where it stands.

    The rows are those up to number `at_seq` (None: all) which belong to turns that have
    ended; a reply whose calls have not all been answered by then stays behind. The bytes are
    the same, so a provider's cache of them holds. The source is not changed. Part of the
    caller's transaction; however long the source is, a block of rows is in memory.

    Raises `UnknownSession`, `SessionExists`, `InvalidTitle`, `UsageError` for a row that is
    not there, and `StoreDamaged` when the source was changed outside hermes.
    """
    source = sessions.known(conn, source_id)
    if at_seq is not None and not 1 <= at_seq <= source.last_seq:
        raise errors.UsageError(f"session {source_id} has no row {at_seq}; it ends at row {source.last_seq}")
    until = _last_whole(conn, source.key, min(at_seq or source.last_seq, _last_ended(conn, source)))
    key = sessions.branch(conn, source, session_id, title)
    ends = _unanswered(conn, source.key, until)
    copied = _copy(conn, source, key, until, {end.seq for end in ends})
    conn.execute(
        "UPDATE sessions SET last_seq = ?1, last_event = ?1, message_count = ?1, head = ?2, tool_call_count = ?3"
        " WHERE key = ?4",
        (copied.seq, copied.head, copied.calls, key),
    )
    _copy_ends(conn, key, ends, copied.numbers)
    _lend_files(conn, source.key, key, until)
    return sessions.known(conn, session_id)


# -- where to stop -----------------------------------------------------------------


def _last_ended(conn: apsw.Connection, source: Head) -> int:
    """The last row before the first turn that has not ended."""
    rows = conn.execute(
        f"SELECT min(user_seq) - 1 FROM turns WHERE session_key = ? AND state NOT IN ({turns.ENDS})", (source.key,)
    )
    found = cast("int | None", rows.fetchall()[0][0])
    return source.last_seq if found is None else found


def _last_whole(conn: apsw.Connection, session_key: int, until: int) -> int:
    """The last row up to `until` behind which no call waits for its result."""
    answered: set[Any] = set()
    rows = conn.execute(
        "SELECT id, role, wire ->> '$.tool_call_id', (SELECT json_group_array(c.value ->> '$.id')"
        " FROM json_each(m.wire, '$.tool_calls') c) FROM messages m"
        " WHERE id > ? AND id <= ? AND active ORDER BY id DESC",
        (row_id(session_key, 0), row_id(session_key, until)),
    )
    for key, role, call_id, asked in rows:
        if role == "tool":
            answered.add(call_id)
        elif answered.issuperset(json.loads(cast("str", asked))):
            break
        else:
            until = (cast("int", key) & messages.MAX_SEQ) - 1
            answered.clear()
    return until


# -- copying -----------------------------------------------------------------------


class _Copied(NamedTuple):
    """What stands in the new session."""

    seq: int
    head: bytes
    calls: int
    numbers: dict[int, int]
    """The new numbers of those rows that were asked for."""


def _copy(conn: apsw.Connection, source: Head, key: int, until: int, wanted: set[int]) -> _Copied:
    """Copy the active rows up to `until`, each checked against the source's chain and linked into a new one."""
    seq, chain = 0, b""
    last, head, calls = 0, b"", 0
    numbers: dict[int, int] = {}
    while seq < until:
        rows: list[Row] = []
        block = _block(conn, source.key, seq, until)
        if not block:
            raise _damaged(source.id, seq + 1)
        for found, *values, active, asked, stored in block:
            seq += 1
            row = Row(*values)
            chain = _linked(chain, seq, row)
            if found != seq or chain != stored:
                raise _damaged(source.id, seq)
            if active:
                rows.append(row)
                calls += asked
                if seq in wanted:
                    numbers[seq] = last + len(rows)
        placed = messages.place(rows, last, head)
        messages.insert(conn, key, placed, None, last + 1)
        if placed:
            last, head = placed[-1].seq, placed[-1].hash
    if until == source.last_seq and chain != source.head:
        raise _damaged(source.id, until)
    return _Copied(last, head, calls, numbers)


def _block(conn: apsw.Connection, session_key: int, after: int, until: int) -> list[tuple[Any, ...]]:
    """The next rows: number, what a `Row` has, active, how many calls it makes, hash."""
    return conn.execute(
        f"SELECT id & {messages.MAX_SEQ}, role, CAST(wire AS BLOB), CAST(extra AS BLOB), timestamp,"
        " iif(EXISTS (SELECT 1 FROM messages_fts_docsize d WHERE d.id = m.id), content, ''),"
        " active, coalesce(json_array_length(wire, '$.tool_calls'), 0), hash"
        " FROM messages m WHERE id > ? AND id <= ? ORDER BY id LIMIT ?",
        (row_id(session_key, after), row_id(session_key, until), BLOCK),
    ).fetchall()


def _linked(chain: bytes, seq: int, row: Row) -> bytes:
    try:
        return messages.link(chain, seq, row)
    except (TypeError, struct.error):
        return b""


def _damaged(session_id: str, seq: int) -> errors.StoreDamaged:
    return errors.StoreDamaged(
        f"row {seq} of session {session_id} was changed or is missing: the store was damaged or edited outside hermes; "
        "nothing was copied, restore a backup of state.db"
    )


# -- what hangs on the rows ----------------------------------------------------------


class _End(NamedTuple):
    """A turn that ended without an answer, as it is copied."""

    seq: int
    state: str
    reason: str | None
    error: str | None
    prose: str | None
    accepted_at: float
    ended_at: float | None


def _unanswered(conn: apsw.Connection, session_key: int, until: int) -> list[_End]:
    rows = conn.execute(
        "SELECT end_seq, state, reason, error, prose, accepted_at, ended_at FROM turns"
        " WHERE session_key = ? AND state IN (?, ?, ?) AND end_seq <= ? ORDER BY key",
        (session_key, TurnState.FAILED, TurnState.CANCELLED, TurnState.EXPIRED, until),
    )
    return [
        _End(*cast("tuple[int, str, str | None, str | None, str | None, float, float | None]", row)) for row in rows
    ]


def _copy_ends(conn: apsw.Connection, key: int, ends: list[_End], numbers: dict[int, int]) -> None:
    """Keep what the wire derives from these turns the same."""
    conn.executemany(
        "INSERT INTO turns (id, session_key, state, owner, end_seq, reason, error, prose, accepted_at, ended_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (turns.new_turn_id(), key, end.state, processes.identity(), numbers[end.seq], *end[2:])
            for end in ends
            if end.seq in numbers
        ],
    )


def _lend_files(conn: apsw.Connection, source_key: int, key: int, until: int) -> None:
    """Note whose files the copied rows speak of, so that they outlive the source."""
    conn.execute(
        "INSERT INTO lent_turns SELECT id, ?1 FROM turns t WHERE session_key = ?2 AND user_seq <= ?3"
        " AND EXISTS (SELECT 1 FROM tool_calls c WHERE c.turn_key = t.key)"
        " UNION SELECT turn_id, ?1 FROM lent_turns WHERE session_key = ?2",
        (key, source_key, until),
    )
