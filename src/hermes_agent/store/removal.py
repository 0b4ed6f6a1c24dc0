"""Removing a session for good: unknown to everybody at once, its rows slice by slice, their traces at the end.

`begin` is one small transaction. What it leaves is erased in transactions that hold nobody
up for long; a process that dies among them leaves a tombstone that says how far it came,
and `finish` goes on from there. `scrub` rewrites the file, since a database moves rows
about and leaves old copies of them where no statement reaches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import apsw

from hermes_agent import errors, failpoints
from hermes_agent.store import leases, messages, processes, sessions, turns, usage
from hermes_agent.store.database import Database, translated
from hermes_agent.store.turns import TurnState
from hermes_agent.store.usage import UsageDelta

EraseFiles = Callable[[Sequence[str]], None]
"""Erases the files that hold results of turns, by their public ids; it may be called again for the same ones."""

OF_THE_DELETED = 0
"""Under this session key stands what removed sessions used."""

_ROWS_LEFT, _TRACES_LEFT, _NOTHING_LEFT = range(3)
_SLICE_ROWS = 200
_SLICE_BYTES = 256 * 1024
_SLICE_EVENTS = 5000
_MERGE_PAGES = 500
"""Pages of the search index that one step rewrites: some tens of milliseconds."""


def begin(conn: apsw.Connection, session_id: str) -> int:
    """Make the session unknown and leave a tombstone with its id; returns its key.

    Part of the caller's transaction. Raises `UnknownSession`, or `SessionBusy` while a
    live owner runs a turn on it or keeps a message waiting for one.
    """
    session = sessions.known(conn, session_id)
    leases.refuse_if_held(conn, session.key, session_id)
    for turn in turns.open_turns(conn, session.key):
        if turn.state is not TurnState.RUNNING and processes.is_alive(turn.owner):
            pid = processes.pid_of(turn.owner)
            raise errors.SessionBusy(f"session {session_id} is in use by process {pid}: a message waits there")
    used = conn.execute(
        "SELECT model, provider, api_calls, input_tokens, output_tokens, cache_read_tokens, cache_write_tokens,"
        " reasoning_tokens FROM usage WHERE session_key = ?",
        (session.key,),
    ).fetchall()
    for values in used:
        usage.add(conn, OF_THE_DELETED, UsageDelta(*cast("tuple[str, str, int, int, int, int, int, int]", values)))
    with _overwriting(conn):
        rows = conn.execute("DELETE FROM sessions WHERE key = ? RETURNING system_prompt_hash", (session.key,))
        [(prompt,)] = rows.fetchall()
        conn.execute(
            "DELETE FROM system_prompts WHERE hash = ?1"
            " AND NOT EXISTS (SELECT 1 FROM sessions WHERE system_prompt_hash = ?1)",
            (prompt,),
        )
        conn.execute("DELETE FROM usage WHERE session_key = ?", (session.key,))
        conn.execute("DELETE FROM session_leases WHERE session_key = ?", (session.key,))
    conn.execute("INSERT INTO tombstones VALUES (?, ?, ?, ?)", (session.key, session.id, time.time(), _ROWS_LEFT))
    return session.key


def has_begun(conn: apsw.Connection, session_key: int) -> bool:
    """Whether the session of that key was removed."""
    return bool(conn.execute("SELECT 1 FROM tombstones WHERE session_key = ?", (session_key,)).fetchall())


def finish(database: Database, erase_files: EraseFiles | None = None) -> None:
    """Erase all that is left of removed sessions; what another process cut off included.

    Files are erased before the rows that name them. Without `erase_files` they stay.
    """
    for session_key in database.read(lambda conn: _left(conn, _ROWS_LEFT)):
        _purge(database, session_key, erase_files)


def scrub(database: Database) -> bool:
    """Rewrite index and file when traces of removed sessions may be in them; True when there are none any more.

    Others wait for their writes while the file is rewritten, about 10 ms a megabyte. It needs as much
    room again. False when the disk or a long reader did not let it happen; ask again later.
    """
    session_keys = database.read(lambda conn: _left(conn, _TRACES_LEFT))
    if not session_keys:
        return True
    try:
        _merge_index(database)
        if not _rewrite(database):
            return False
        failpoints.hit("removal.scrubbed")
        database.write(lambda conn: _mark(conn, session_keys, _NOTHING_LEFT))
    except errors.StoreError as error:
        if error.reason not in {errors.FailureReason.STORE_FULL, errors.FailureReason.STORE_LOCKED}:
            raise
        return False
    return True


# -- rows ------------------------------------------------------------------------


def _purge(database: Database, session_key: int, erase_files: EraseFiles | None) -> None:
    def all_of(work: Callable[[apsw.Connection, int], bool]) -> None:
        while database.write(lambda conn: work(conn, session_key), durable=False, place=session_key):
            failpoints.hit("removal.slice")

    all_of(_erase_rows)
    all_of(_erase_events)
    if erase_files is not None:
        turn_ids = database.read(lambda conn: _turns_with_files(conn, session_key))
        if turn_ids:
            erase_files(turn_ids)
            failpoints.hit("removal.files")
    all_of(_erase_turns)
    database.write(lambda conn: _close(conn, session_key))
    failpoints.hit("removal.purged")


def _erase_rows(conn: apsw.Connection, session_key: int) -> bool:
    """Erase a slice of rows, and the words that the index holds of them; False when that was the last."""
    first, end = messages.row_id(session_key, 0), messages.row_id(session_key, messages.MAX_SEQ)
    last, size = first, 0
    sizes = conn.execute(
        "SELECT id, octet_length(wire) FROM messages WHERE id > ? AND id <= ? ORDER BY id LIMIT ?",
        (first, end, _SLICE_ROWS),
    ).fetchall()
    for row_id, length in cast("list[tuple[int, int]]", sizes):
        last, size = row_id, size + length
        if size > _SLICE_BYTES:
            break
    indexed = conn.execute(
        "SELECT m.id, m.content FROM messages m JOIN messages_fts_docsize d ON d.id = m.id"
        " WHERE m.id > ? AND m.id <= ? ORDER BY m.id",
        (first, last),
    ).fetchall()
    with _overwriting(conn):
        # the index forgets a text only when it is told what it was
        conn.executemany("INSERT INTO messages_fts (messages_fts, rowid, content) VALUES ('delete', ?, ?)", indexed)
        # and writes itself out here, not after the pages are no longer overwritten
        conn.execute("SAVEPOINT index_written")
        conn.execute("RELEASE index_written")
        conn.execute("DELETE FROM messages WHERE id > ? AND id <= ?", (first, last))
        conn.execute("DELETE FROM seals WHERE id > ? AND id <= ?", (first, last))
    return last != first


def _erase_events(conn: apsw.Connection, session_key: int) -> bool:
    bounds = (messages.row_id(session_key, 0), messages.row_id(session_key, messages.MAX_SEQ), _SLICE_EVENTS)
    with _overwriting(conn):
        conn.execute(
            "DELETE FROM events WHERE id IN (SELECT id FROM events WHERE id > ? AND id <= ? ORDER BY id LIMIT ?)",
            bounds,
        )
    return conn.changes() > 0


def _erase_turns(conn: apsw.Connection, session_key: int) -> bool:
    """Erase a slice of turns with all that hangs on them; False when there was none left."""
    slice_of = "(SELECT key FROM turns WHERE session_key = ? ORDER BY state, key LIMIT ?)"
    bounds = (session_key, _SLICE_ROWS)
    with _overwriting(conn):
        for table in ("tool_calls", "approvals", "inbox"):
            conn.execute(f"DELETE FROM {table} WHERE turn_key IN {slice_of}", bounds)
        conn.execute(f"DELETE FROM turns WHERE key IN {slice_of}", bounds)
    return conn.changes() > 0


def _turns_with_files(conn: apsw.Connection, session_key: int) -> list[str]:
    """Turns that called tools and whose results no session shows any more."""
    rows = conn.execute(
        "WITH shown (id) AS ("
        " SELECT t.id FROM turns t WHERE t.session_key = ?1"
        " AND EXISTS (SELECT 1 FROM tool_calls c WHERE c.turn_key = t.key)"
        " UNION SELECT turn_id FROM lent_turns WHERE session_key = ?1)"
        " SELECT id FROM shown WHERE NOT EXISTS"
        " (SELECT 1 FROM lent_turns l JOIN sessions s ON s.key = l.session_key WHERE l.turn_id = shown.id)"
        " AND NOT EXISTS (SELECT 1 FROM turns t JOIN sessions s ON s.key = t.session_key WHERE t.id = shown.id)",
        (session_key,),
    )
    return [cast("str", turn_id) for (turn_id,) in rows]


def _close(conn: apsw.Connection, session_key: int) -> None:
    conn.execute("DELETE FROM lent_turns WHERE session_key = ?", (session_key,))
    _mark(conn, [session_key], _TRACES_LEFT)


def _left(conn: apsw.Connection, stage: int) -> list[int]:
    rows = conn.execute("SELECT session_key FROM tombstones WHERE stage = ? AND stage < 2", (stage,))
    return [cast("int", session_key) for (session_key,) in rows]


def _mark(conn: apsw.Connection, session_keys: Sequence[int], stage: int) -> None:
    conn.executemany("UPDATE tombstones SET stage = ? WHERE session_key = ?", [(stage, key) for key in session_keys])


@contextmanager
def _overwriting(conn: apsw.Connection) -> Iterator[None]:
    """What is deleted inside is overwritten, not only given free."""
    conn.execute("PRAGMA secure_delete=ON").fetchall()
    try:
        yield
    finally:
        conn.execute("PRAGMA secure_delete=OFF").fetchall()


# -- traces ----------------------------------------------------------------------


def _merge_index(database: Database) -> None:
    """Bring the search index into one piece: until then its older pieces hold words that were erased."""

    def step(pages: int) -> bool:
        def work(conn: apsw.Connection) -> bool:
            before = conn.total_changes()
            conn.execute("INSERT INTO messages_fts (messages_fts, rank) VALUES ('merge', ?)", (pages,))
            return conn.total_changes() - before > 1

        return database.write(work, durable=False)

    pages = database.read(lambda conn: cast("int", conn.execute("PRAGMA page_count").fetchall()[0][0]))
    step(-_MERGE_PAGES)
    # others write on, so that there is always something to merge: after so many steps it is not what was there
    for _ in range(2 * pages // _MERGE_PAGES + 16):
        if not step(_MERGE_PAGES):
            return
        failpoints.hit("removal.merged")


def _rewrite(database: Database) -> bool:
    """Write the file anew without what is free in it, and empty the log; False while a reader keeps the log."""
    conn = database.connect()
    try:
        with translated(database.path, database.notice):
            deadline = time.monotonic() + database.options.patience
            while True:
                try:
                    conn.execute("VACUUM")
                    break
                except apsw.BusyError:
                    if time.monotonic() > deadline:
                        raise
            [(busy, *_)] = conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            return not busy
    finally:
        conn.close()
