"""Messages as they come in: which id of which sender began which turn, and what waits."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import apsw

from hermes_agent import errors
from hermes_agent.store import encoding, messages, turns
from hermes_agent.store.conversations import Thread
from hermes_agent.store.sessions import Head
from hermes_agent.store.turns import TurnRecord, TurnState

KEPT_SECONDS = 7 * 24 * 3600.0
"""How long an id is remembered after its turn has ended."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """One message on its way in.

    `message_id` is the sender's own id, "" when it gave none; the same `sender`, `scope`
    and id name one message for ever. `content` is text or a list of content parts.
    `options` is what else the turn needs to run, also after a restart; JSON.
    """

    sender: str
    content: Any
    scope: str = ""
    message_id: str = ""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    deadline: float | None = None
    """Wall-clock seconds after which it is not worth an answer."""
    turn_id: str = ""
    """What its turn shall be called, if it is new; by default a name is made."""
    body_hash: bytes = b""
    """Over what the sender sent; by default over content and options."""
    thread: Thread | None = None
    """Where in a conversation it belongs, if that is to be checked as it is taken."""

    def fingerprint(self) -> bytes:
        """What tells a repeat of this message from another one under its id."""
        if self.body_hash:
            return self.body_hash
        text = json.dumps([self.content, dict(self.options)], sort_keys=True, default=str)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:16]

    @property
    def text(self) -> str:
        """The content as text; of parts, their text."""
        if isinstance(self.content, str):
            return encoding.clean_text(self.content)
        parts = cast("list[Any]", self.content)
        return encoding.clean_text("\n".join(str(part["text"]) for part in parts if "text" in part))


class Limits(NamedTuple):
    """How many messages may wait."""

    session: int
    total: int


class Admission(NamedTuple):
    """The turn of a message, and whether the message was new."""

    turn: TurnRecord
    is_new: bool


def known(conn: apsw.Connection, message: Incoming) -> TurnRecord | None:
    """The turn that this message began when it came before; raises `MessageConflict` for another one under its id."""
    if not message.message_id:
        return None
    rows = conn.execute(
        "SELECT turn_key, body_hash FROM inbox WHERE sender = ? AND scope = ? AND message_id = ?",
        (message.sender, message.scope, message.message_id),
    )
    for turn_key, body_hash in rows:
        if body_hash != message.fingerprint():
            raise errors.MessageConflict(f"the id {message.message_id!r} was used for another message")
        return turns.by_key(conn, turn_key)
    return None


def check_room(conn: apsw.Connection, session_key: int, limits: Limits) -> None:
    """Raise `QueueFull` when too many messages wait, in this session or in all."""
    waiting = (TurnState.ACCEPTED,)
    for (count,) in conn.execute(
        "SELECT count(*) FROM turns WHERE session_key = ? AND state = ?", (session_key, *waiting)
    ):
        if count >= limits.session:
            raise errors.QueueFull(f"{count} messages wait in this session already")
    for (count,) in conn.execute("SELECT count(*) FROM turns WHERE state = ?", waiting):
        if count >= limits.total:
            raise errors.QueueFull(f"{count} messages wait already")


def remember(conn: apsw.Connection, message: Incoming, turn_key: int) -> None:
    """Store who sent the message of this turn, under its id or else the turn's."""
    conn.execute(
        "INSERT INTO inbox VALUES (?, ?, ?, ?, ?, ?)",
        (
            message.sender, message.scope, message.message_id or f"turn:{turn_key}", turn_key,
            message.fingerprint(), time.time(),
        ),
    )  # fmt: skip


def options_of(message: Incoming) -> dict[str, Any]:
    """What a turn must remember of its message beside the text."""
    options = dict(message.options)
    if not isinstance(message.content, str):
        options["content"] = message.content
    return options


def accept(conn: apsw.Connection, session: Head, message: Incoming, turn_id: str) -> TurnRecord:
    """Store a message that waits for its turn, or points at the unanswered row that already holds it."""
    turn = turns.accept(
        conn, session.key, message.text, turn_id,
        user_seq=unanswered(conn, session, message), options=options_of(message), deadline=message.deadline,
    )  # fmt: skip
    remember(conn, message, turn.key)
    return turn


def unanswered(conn: apsw.Connection, session: Head, message: Incoming) -> int | None:
    """Number of the session's last row, if it is this very message, stored by nobody's turn and not answered.

    Only for a message without an id of its own: that one says itself whether it is a repeat.
    """
    if message.message_id or not isinstance(message.content, str):
        return None
    last = (messages.row_id(session.key, session.last_seq), message.text)
    rows = conn.execute(
        "SELECT 1 FROM messages WHERE id = ? AND role = 'user' AND turn_key IS NULL AND content = ?", last
    )
    if not rows.fetchall():
        return None
    taken = conn.execute("SELECT 1 FROM turns WHERE session_key = ? AND user_seq = ?", (session.key, session.last_seq))
    return None if taken.fetchall() else session.last_seq


def sender_of(conn: apsw.Connection, turn_key: int) -> tuple[str, str, str] | None:
    """Sender, scope and id of the message that began a turn; None for a turn that nobody delivered."""
    for values in conn.execute("SELECT sender, scope, message_id FROM inbox WHERE turn_key = ?", (turn_key,)):
        return cast("tuple[str, str, str]", values)
    return None


def find_message(conn: apsw.Connection, sender: str, message_id: str) -> TurnRecord | None:
    """The turn of a sender's message by the sender's id, the newest scope first."""
    rows = conn.execute(
        "SELECT turn_key FROM inbox WHERE sender = ? AND message_id = ? ORDER BY received_at DESC LIMIT 1",
        (sender, message_id),
    )
    for (turn_key,) in rows:
        return turns.by_key(conn, cast("int", turn_key))
    return None


def unfinished(conn: apsw.Connection) -> list[tuple[str, TurnRecord]]:
    """Delivered turns that have not ended, oldest first, each with its session's id."""
    rows = conn.execute(
        "SELECT t.key, s.id FROM turns t JOIN sessions s ON s.key = t.session_key"
        f" WHERE t.state NOT IN ({turns.ENDS}) AND EXISTS (SELECT 1 FROM inbox i WHERE i.turn_key = t.key)"
        " ORDER BY t.key"
    ).fetchall()
    return [(str(session_id), turns.by_key(conn, cast("int", key))) for key, session_id in rows]


def unanswered_of(conn: apsw.Connection, sender: str | None, limit: int) -> list[TurnRecord]:
    """At most `limit` delivered turns that have not ended, a sender's or all, oldest first."""
    keys = conn.execute(
        "SELECT t.key FROM turns t JOIN sessions s ON s.key = t.session_key"
        f" WHERE t.state NOT IN ({turns.ENDS})"
        " AND EXISTS (SELECT 1 FROM inbox i WHERE i.turn_key = t.key AND (?1 IS NULL OR i.sender = ?1))"
        " ORDER BY t.key LIMIT ?2",
        (sender, limit),
    ).fetchall()
    return [turns.by_key(conn, cast("int", key)) for (key,) in keys]


def forget_old(conn: apsw.Connection, before: float) -> int:
    """Drop ids whose turns ended before that wall-clock time; returns how many."""
    conn.execute("DELETE FROM inbox WHERE turn_key IN (SELECT key FROM turns WHERE ended_at < ?)", (before,))
    return conn.changes()


def session_of(conn: apsw.Connection, session_key: int) -> str:
    """The id of a session by its key."""
    for (session_id,) in conn.execute("SELECT id FROM sessions WHERE key = ?", (session_key,)):
        return cast("str", session_id)
    raise errors.UnknownSession("the session of this turn was deleted")
