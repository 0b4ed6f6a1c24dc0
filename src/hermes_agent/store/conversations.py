"""Which session a conversation goes on in whose client keeps no session id: found by its transcript, or by a name.

A turn can carry a digest over all that had been said when it began, its own message
included. A client that sends its transcript along is recognised by the digest of what
precedes its last message and by the answer that it shows behind that. A session is given
to one such client only: it is found while the turn is its last one, and taking a message
behind that turn proves it again. Where two sessions fit equally well, neither is found.

A name is kept as a digest over its owner, its kind and itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import apsw

from hermes_agent import errors
from hermes_agent.store import messages, sessions, turns, writer
from hermes_agent.store.session_db import SessionDB
from hermes_agent.store.turns import TurnRecord, TurnState

_LOOKED_AT = 8
"""Turns with one digest that are compared; when there are more, none of them is certain."""


class Name(NamedTuple):
    """A name that `owner` gave to a session; each `kind` has names of its own."""

    owner: str
    kind: str
    name: str

    @property
    def digest(self) -> bytes:
        return hashlib.blake2b(json.dumps(self).encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Thread:
    """What must hold of a session, and what is noted of it, in the transaction that takes a message for it."""

    follows: int | None = None
    """Key of the turn that must still be the session's last one."""
    transcript: bytes = b""
    """Digest by which the new turn is found again."""
    history: Sequence[messages.Row] = ()
    """Rows with which the session begins if it is made."""
    name: Name | None = None
    """Name under which the session must be known; a session that is made is given it."""
    user: str | None = None
    """Whose session it must be, if it is somebody's."""


class Found(NamedTuple):
    """A session that goes on, and the turn behind which it does."""

    session_id: str
    turn_key: int


# -- in the transaction that takes a message ----------------------------------------


def enter(conn: apsw.Connection, head: sessions.Head, thread: Thread, *, is_new: bool) -> None:
    """Prove that the message belongs into this session, and begin the session if it was made for it.

    Raises `ConversationMoved` when the session is not, or no more, the one to go on in, and
    `UnknownSession` for somebody else's.
    """
    if thread.user is not None:
        for (owner,) in conn.execute("SELECT user_id FROM sessions WHERE key = ?", (head.key,)):
            if owner not in (None, thread.user):
                raise errors.UnknownSession(f"no session {head.id!r}; see: hermes sessions list")
    if thread.follows is not None:
        if not conn.execute(f"SELECT 1 {_LAST_TURNS} AND t.key = ?", (thread.follows,)).fetchall():
            raise errors.ConversationMoved
        conn.execute("UPDATE turns SET transcript = NULL WHERE key = ?", (thread.follows,))
    if thread.name is not None:
        _enter_named(conn, head, thread.name, is_new=is_new)
    if is_new and thread.history:
        writer.append(conn, head, thread.history)


def _enter_named(conn: apsw.Connection, head: sessions.Head, name: Name, *, is_new: bool) -> None:
    if not is_new:
        if _key_of_name(conn, name) != head.key:
            raise errors.ConversationMoved
        return
    known = _key_of_name(conn, name)
    if known is not None and _live_session(conn, known) is not None:
        raise errors.ConversationMoved
    conn.execute("INSERT OR REPLACE INTO session_names VALUES (?, ?)", (name.digest, head.key))


def remember(conn: apsw.Connection, turn_key: int, thread: Thread | None) -> None:
    """Make a turn that was just taken findable by its transcript."""
    if thread is not None and thread.transcript:
        conn.execute("UPDATE turns SET transcript = ? WHERE key = ?", (thread.transcript, turn_key))


_LAST_TURNS = (
    "FROM turns t JOIN sessions s ON s.key = t.session_key"
    f" WHERE t.state IN ({turns.ENDS}) AND t.end_seq = s.last_seq AND NOT EXISTS"
    f" (SELECT 1 FROM turns o WHERE o.session_key = s.key AND o.state NOT IN ({turns.ENDS}))"
)
"""Turns that have ended and behind which nothing stands or waits in their session."""


# -- looking ------------------------------------------------------------------------


class Conversations:
    """Finds the session to go on in, and reads what was said in a turn."""

    def __init__(self, db: SessionDB) -> None:
        self._db = db

    def continued(self, transcript: bytes, answer: str) -> Found | None:
        """The session whose last turn began with that transcript and was answered like that; None if none is sure."""

        def work(conn: apsw.Connection) -> Found | None:
            rows = conn.execute(
                f"SELECT t.key, s.id {_LAST_TURNS} AND t.transcript = ? ORDER BY t.key DESC LIMIT ?",
                (transcript, _LOOKED_AT + 1),
            ).fetchall()
            if len(rows) > _LOOKED_AT:
                return None
            found = [Found(str(session_id), cast("int", key)) for key, session_id in rows]
            fitting = [item for item in found if _plain(answer) in _answers(conn, turns.by_key(conn, item.turn_key))]
            return fitting[0] if len(fitting) == 1 else None

        return self._db.database.read(work)

    def is_last(self, turn_key: int) -> bool:
        """Whether a turn has ended and is its session's last one."""
        sql = f"SELECT 1 {_LAST_TURNS} AND t.key = ?"
        return self._db.database.read(lambda conn: bool(conn.execute(sql, (turn_key,)).fetchall()))

    def named(self, name: Name) -> str | None:
        """The session of a name, None for a new name. Raises `UnknownSession` when its session was deleted."""

        def work(conn: apsw.Connection) -> str | None:
            key = _key_of_name(conn, name)
            if key is None:
                return None
            for (session_id,) in conn.execute("SELECT id FROM sessions WHERE key = ?", (key,)):
                return str(session_id)
            raise errors.UnknownSession(f"the session of {name.kind} {name.name!r} was deleted")

        return self._db.database.read(work)

    def live(self, name: Name) -> str | None:
        """The session of a name, None when there is none, or when it has ended or was deleted."""

        def work(conn: apsw.Connection) -> str | None:
            key = _key_of_name(conn, name)
            return None if key is None else _live_session(conn, key)

        return self._db.database.read(work)

    def said(self, turn: TurnRecord) -> list[dict[str, Any]]:
        """The rows of a turn behind its message, in order."""
        return self._db.database.read(lambda conn: _said(conn, turn))

    def hide(self, turn_key: int) -> None:
        """Mark a turn as withdrawn from its readers; what it did stays."""
        sql = "UPDATE turns SET options = json_set(coalesce(options, '{}'), '$.hidden', json('true')) WHERE key = ?"
        self._db.database.write(lambda conn: bool(conn.execute(sql, (turn_key,))))


def _key_of_name(conn: apsw.Connection, name: Name) -> int | None:
    for (key,) in conn.execute("SELECT session_key FROM session_names WHERE digest = ?", (name.digest,)):
        return cast("int", key)
    return None


def _live_session(conn: apsw.Connection, key: int) -> str | None:
    for (session_id,) in conn.execute("SELECT id FROM sessions WHERE key = ? AND ended_at IS NULL", (key,)):
        return str(session_id)
    return None


def _said(conn: apsw.Connection, turn: TurnRecord) -> list[dict[str, Any]]:
    if turn.user_seq is None:
        return []
    until = messages.MAX_SEQ if turn.end_seq is None else turn.end_seq
    rows = messages.select(conn, turn.session_key, after=turn.user_seq, until=until)
    return [{**row.fields(), "seq": row.seq} for row in rows if row.turn_key == turn.key]


def _answers(conn: apsw.Connection, turn: TurnRecord) -> set[str]:
    """What a client may have been shown as the answer of a turn: its last words, or all of them."""
    texts = [str(row.get("content") or "") for row in _said(conn, turn) if row["role"] == "assistant"]
    if turn.state is not TurnState.DONE:
        texts.append(turn.prose or "")
    return {_plain(texts[-1]), _plain(" ".join(texts))} if texts else set()


def _plain(text: str) -> str:
    """A text as clients keep it: what they do to white space does not count."""
    return " ".join(text.split())
