"""`SessionDB`: the small face of the store that the agent, the command and embedders use."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import apsw

from hermes_agent import errors, failpoints, home
from hermes_agent.store import anchors, database, encoding, forks, leases, messages, removal, sessions, turns, writer
from hermes_agent.store.database import StoreOptions
from hermes_agent.store.writer import SessionWriter


class SessionDB:
    """Sessions and their messages in one SQLite file, durable when a call returns.

    `db_path` defaults to `<HERMES_HOME>/state.db`. Handles on one file in one process
    share its connections; `close` drops a reference. Every method raises `StoreError`s
    with one typed reason and leaves nothing half done.
    """

    def __init__(
        self, db_path: str | Path | None = None, read_only: bool = False, *, options: StoreOptions | None = None
    ) -> None:
        self.db_path = Path(db_path) if db_path is not None else home.hermes_home() / "state.db"
        self._closed = False
        self._open = database.open_database(self.db_path, options, read_only=read_only)
        path = self._open.path
        try:
            store_id = self._open.store_id
        except BaseException:
            self._open.close()
            raise
        self._anchors = anchors.Anchors(
            path.with_name(path.name + "-anchors"), store_id, synced=self._open.options.synchronous == "FULL"
        )
        self._appender = writer.Appender(self._open, self._anchors)

    def close(self) -> None:
        """Drop this handle; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._anchors.close()
            self._open.close()

    @property
    def _database(self) -> database.Database:
        self._check_open()
        return self._open

    @property
    def database(self) -> database.Database:
        """The open file, for the other faces of the store."""
        return self._database

    @property
    def anchors(self) -> anchors.Anchors:
        """Where the sessions' ends are kept outside the file."""
        return self._anchors

    def _check_open(self) -> None:
        if self._closed:
            raise errors.StoreError("this handle on the store is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def commits(self) -> int:
        """Transactions committed by this process on this file."""
        return self._open.commits

    # -- sessions -----------------------------------------------------------

    def create_session(self, session_id: str, source: str = "unknown", **fields: Any) -> str:
        """Make the session or fill in fields that are not set yet; returns its id.

        Fields: model, model_config, system_prompt, parent_session_id, user_id, cwd, title.
        """
        _check_id(session_id)

        def work(conn: apsw.Connection) -> int:
            is_new = sessions.head(conn, session_id) is None
            sessions.ensure(conn, session_id, source, fields)
            return sessions.known(conn, session_id).key if is_new else 0

        made = self._database.write(work)
        if made:
            self._anchors.forget(made)
        return session_id

    def create_new_session(self, session_id: str, source: str = "unknown", **fields: Any) -> str:
        """Make the session or raise `SessionExists`, `InvalidTitle`; fields as for `create_session`.

        The id of a deleted session may be used again; nothing of the old one comes with it.
        """
        _check_id(session_id)
        self._anchors.forget(self._database.write(lambda conn: sessions.create(conn, session_id, source, fields)))
        return session_id

    def get_session(self, session_id: str) -> dict[str, Any] | None:
        """One session's fields, None when it does not exist."""
        return self._database.read(lambda conn: sessions.describe(conn, session_id))

    def resolve_session(self, name: str) -> str:
        """The id meant by an id, a title, a unique beginning of an id, or `latest`.

        Raises `UnknownSession` or `AmbiguousSession`; never makes a session.
        """
        return self._database.read(lambda conn: sessions.resolve(conn, name))

    def list_sessions(self, limit: int = 50, offset: int = 0, **which: Any) -> list[dict[str, Any]]:
        """Sessions, the last used first, each with a `preview` of its first message.

        Which: source, title (exact), archived and hidden (False; None for both kinds), pinned,
        parent (a session's id, "" for none), since (seconds); see `sessions.recent`.
        """
        return self._database.read(lambda conn: sessions.recent(conn, limit, offset, **which))

    def set_session_title(self, session_id: str, title: str) -> None:
        """Name a session; raises `InvalidTitle` when the name is taken."""
        self._database.write(lambda conn: sessions.set_title(conn, session_id, title))

    def update_session(self, session_id: str, **changes: Any) -> None:
        """Change title, end_reason, pinned, archived, hidden, all or none; see `sessions.update`.

        Raises `UnknownSession` or `InvalidTitle`.
        """
        self._database.write(lambda conn: sessions.update(conn, session_id, **changes))

    def fork_session(
        self, source_id: str, session_id: str, *, title: str | None = None, at_seq: int | None = None
    ) -> str:
        """Make a session that begins as a copy of another one, up to its last ended turn; see `forks.fork`."""
        _check_id(session_id)
        made = sessions.Head(0, "", 0, 0, 0, b"")

        def work(conn: apsw.Connection) -> sessions.Head:
            nonlocal made
            source = sessions.known(conn, source_id)
            self._anchors.check_end(source.key, source_id, source.last_seq)
            made = forks.fork(conn, source_id, session_id, title=title, at_seq=at_seq)
            return made

        # last in its transaction: no session has a higher key
        head = self._database.write(
            work, landed=lambda conn: sessions.head(conn, session_id) == made, place=sys.maxsize
        )
        self._anchors.forget(head.key)
        self._anchors.record(head.key, head.last_seq, head.head)
        return session_id

    def delete_session(
        self, session_id: str, *, erase_files: removal.EraseFiles | None = None, scrub: bool = True
    ) -> bool:
        """Remove a session and all that was stored of it; True when no trace of it is left in the file.

        It is unknown as soon as this begins; what a killed process left is taken up by the next
        call, or by `removal.finish`. `erase_files` is given the turns whose spilled results
        are to be erased. Without `scrub`, which rewrites the file, old copies of its rows may stay
        until `removal.scrub`.

        Raises `UnknownSession`, or `SessionBusy` while a turn runs or waits.
        """
        removed = 0

        def work(conn: apsw.Connection) -> int:
            nonlocal removed
            removed = removal.begin(conn, session_id)
            return removed

        self._anchors.forget(self._database.write(work, landed=lambda conn: removal.has_begun(conn, removed)))
        failpoints.hit("removal.begun")
        removal.finish(self._database, erase_files)
        return scrub and removal.scrub(self._database)

    # -- messages -----------------------------------------------------------

    def append_message(self, session_id: str, role: str, content: Any = None, **fields: Any) -> int:
        """Append one message to a session no turn runs on; returns its row id once it is durable.

        Fields: tool_calls, tool_call_id, tool_name, name, timestamp and anything else that
        shall be stored beside the message. Raises `SessionBusy` while a turn runs.
        """
        message = {"role": role, "content": content, **fields}
        if role == "tool" and fields.get("tool_name") and "name" not in fields:
            message["name"] = fields["tool_name"]
        return self.append_messages_batch(session_id, [message])[0]

    def append_messages_batch(self, session_id: str, rows: Sequence[Mapping[str, Any]]) -> list[int]:
        """Append several messages, all or none; returns their row ids."""
        return self.append_rows(session_id, [encode_row(row) for row in rows])

    def append_rows(self, session_id: str, rows: Sequence[messages.Row]) -> list[int]:
        """The same for rows that are encoded already."""
        self._check_open()
        return self._appender.append(session_id, rows)

    def message_count(self, session_id: str) -> int:
        """How many messages the session holds."""
        return self._database.read(lambda conn: sessions.known(conn, session_id)).last_seq

    def get_messages(self, session_id: str, limit: int | None = None, offset: int = 0) -> list[dict[str, Any]]:
        """Stored rows, oldest first, with `id`, `seq` and their marks; content as it was stored."""
        key = self._head(session_id).key
        until = messages.MAX_SEQ if limit is None else min(offset + limit, messages.MAX_SEQ)

        def work(conn: apsw.Connection) -> list[dict[str, Any]]:
            return [
                {
                    **row.fields(), "id": row.id, "seq": row.seq, "session_id": session_id,
                    "active": row.active, "compacted": row.compacted,
                }
                for row in messages.select(conn, key, after=offset, until=until)
            ]  # fmt: skip

        return self._database.read(work)

    def get_messages_as_conversation(self, session_id: str) -> list[dict[str, Any]]:
        """The session as chat messages, each with `_db_persisted`; nothing is repaired.

        The row on which a turn ended without an answer carries why in `_turn_outcome`.
        Raises `StoreDamaged` when rows were changed or are missing.
        """
        # read first: others write on, so what is read later is never behind it
        anchored = self._anchors.read(self._head(session_id).key)

        def work(
            conn: apsw.Connection,
        ) -> tuple[sessions.Head, list[dict[str, Any]], dict[int, str], bytes | None]:
            head = sessions.known(conn, session_id)
            rows = messages.conversation(
                conn,
                head.key,
                last_seq=head.last_seq,
                head=head.head,
                active=sessions.active_rows(conn, head.key, head.fence),
            )
            hash_at = messages.hash_of(conn, head.key, anchored[0]) if anchored else None
            return head, rows, turns.outcomes(conn, head.key), hash_at

        head, rows, outcomes, hash_at = self._database.read(work)
        self._anchors.check(head.key, session_id, head.last_seq, anchored, hash_at)
        for row in rows if outcomes else ():
            if row["_seq"] in outcomes:
                row["_turn_outcome"] = outcomes[row["_seq"]]
        return rows

    # -- turns --------------------------------------------------------------

    def claim(self, session_id: str, *, wait: float = 0.0, **create: Any) -> SessionWriter:
        """Take the session's lease; with `source=…` and fields the session is made when it is missing.

        Waits up to `wait` seconds for another owner. Raises `SessionBusy`, or
        `UnknownSession` when nothing says how to make it, or it was deleted.
        """
        if "source" in create:
            _check_id(session_id)

        def work(conn: apsw.Connection) -> tuple[sessions.Head, bool]:
            found = sessions.head(conn, session_id)
            if "source" in create:
                if found is None:
                    sessions.refuse_deleted(conn, session_id)
                sessions.ensure(conn, session_id, create["source"], create)
            head = sessions.known(conn, session_id)
            leases.acquire(conn, head.key, session_id)
            if found is not None:
                self._anchors.check_end(head.key, session_id, head.last_seq)
            return sessions.known(conn, session_id), found is None

        deadline = time.monotonic() + wait
        while True:
            try:
                head, is_new = self._database.write(work, durable=False)
                failpoints.hit("lease.acquired")
                break
            except errors.SessionBusy:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(min(0.1, max(0.0, deadline - time.monotonic())))
        if is_new:
            self._anchors.forget(head.key)
        return SessionWriter(self._database, self._anchors, head)

    def accept_turn(self, session_id: str, text: str) -> turns.TurnRecord:
        """Store, durably, a message that waits until the session is free."""
        turn_id = turns.new_turn_id()
        return self._database.write(
            lambda conn: turns.accept(conn, sessions.known(conn, session_id).key, text, turn_id),
            landed=lambda conn: turns.find(conn, turn_id) is not None,
        )

    def withdraw_turn(self, turn: turns.TurnRecord, reason: str) -> None:
        """Cancel a message that still waits; a turn that has begun is left alone."""
        self._database.write(lambda conn: turns.withdraw(conn, turn.key, reason))

    def find_turn(self, turn_id: str) -> turns.TurnRecord | None:
        """A turn by its public id."""
        return self._database.read(lambda conn: turns.find(conn, turn_id))

    def open_turns(self, session_id: str) -> list[turns.TurnRecord]:
        """The session's turns that have not ended, oldest first."""
        key = self._head(session_id).key
        return self._database.read(lambda conn: turns.open_turns(conn, key))

    def _head(self, session_id: str) -> sessions.Head:
        return self._database.read(lambda conn: sessions.known(conn, session_id))


def _check_id(session_id: str) -> None:
    if not session_id.isprintable() or not session_id.strip():
        raise ValueError("a session id is a non-empty string of visible characters")


def encode_row(row: Mapping[str, Any]) -> messages.Row:
    """A message dict as a row of the store; `timestamp` is filled in when it is missing.

    Raises `TypeError` when the role is no string or a value cannot be stored as JSON.
    """
    role = row.get("role")
    if not isinstance(role, str) or not role:
        raise TypeError("a message needs a role")
    wire, extra = encoding.split(row)
    return messages.Row(
        encoding.clean_text(role),
        encoding.encode(wire),
        encoding.encode(extra) if extra else None,
        _timestamp(row.get("timestamp")),
        encoding.searchable(role, row.get("content")),
    )


def _timestamp(value: Any) -> float:
    if not value:
        return time.time()
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not math.isfinite(seconds):
        raise TypeError(f"a timestamp is a number of seconds, not {value!r}")
    return seconds
