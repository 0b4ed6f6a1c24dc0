"""Session rows: making, finding and describing them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import apsw

from hermes_agent import errors
from hermes_agent.store import encoding

_FIELDS = ("source", "model", "model_config", "system_prompt_hash", "parent_session_id", "user_id", "cwd", "title")
MAX_TITLE = 100


class Head(NamedTuple):
    """Where a session stands: what the next write must continue from."""

    key: int
    id: str
    fence: int
    last_seq: int
    last_event: int
    head: bytes


def head(conn: apsw.Connection, session_id: str) -> Head | None:
    """The head of a session, None when there is no such session."""
    for values in conn.execute(
        "SELECT key, id, fence, last_seq, last_event, head FROM sessions WHERE id = ?",
        (encoding.clean_text(session_id),),
    ):
        return Head(*cast("tuple[int, str, int, int, int, bytes]", values))
    return None


def active_rows(conn: apsw.Connection, session_key: int) -> int:
    """How many of the session's rows are active, as its own row says."""
    for (count,) in conn.execute("SELECT message_count FROM sessions WHERE key = ?", (session_key,)):
        return cast("int", count)
    return 0


def known(conn: apsw.Connection, session_id: str) -> Head:
    """The head of a session that must exist; raises `UnknownSession`."""
    found = head(conn, session_id)
    if found is None:
        raise errors.UnknownSession(f"no session {session_id!r}; see: hermes sessions list")
    return found


def ensure(conn: apsw.Connection, session_id: str, source: str, fields: Mapping[str, Any]) -> None:
    """Make the session, or fill in what is not set yet; a value that is set stays."""
    values = {key: _text(fields.get(key)) for key in _FIELDS if key != "source"}
    values["title"] = _title(str(fields.get("title") or "")) or None
    if fields.get("system_prompt"):
        values["system_prompt_hash"] = store_prompt(conn, str(fields["system_prompt"]))
    now = time.time()
    _execute_titled(
        conn,
        "INSERT INTO sessions (id, source, started_at, last_active, model, model_config, system_prompt_hash,"
        " parent_session_id, user_id, cwd, title)"
        " VALUES (:id, :source, :now, :now, :model, :model_config, :system_prompt_hash, :parent_session_id,"
        " :user_id, :cwd, :title)"
        " ON CONFLICT (id) DO UPDATE SET"
        " source = iif(source = 'unknown', excluded.source, source),"
        " model = coalesce(model, excluded.model),"
        " model_config = coalesce(model_config, excluded.model_config),"
        " system_prompt_hash = coalesce(system_prompt_hash, excluded.system_prompt_hash),"
        " parent_session_id = coalesce(parent_session_id, excluded.parent_session_id),"
        " user_id = coalesce(user_id, excluded.user_id), cwd = coalesce(cwd, excluded.cwd),"
        " title = coalesce(title, excluded.title)",
        {"id": session_id, "source": _text(source), "now": now, **values},
    )


def _text(value: Any) -> Any:
    """A column's value as it can be stored: clean text, JSON for what has parts."""
    if isinstance(value, (dict, list)):
        return json.dumps(encoding.clean_json(value), ensure_ascii=False, sort_keys=True)
    return encoding.clean_text(value) if isinstance(value, str) else value


def _title(text: str) -> str:
    return "".join(char for char in " ".join(text.split()) if char.isprintable())[:MAX_TITLE].strip()


def _execute_titled(conn: apsw.Connection, sql: str, values: Any) -> None:
    try:
        conn.execute(sql, values)
    except apsw.ConstraintError as error:
        if "sessions.title" not in str(error):
            raise
        raise errors.UsageError("another session already has that title") from error


def store_prompt(conn: apsw.Connection, prompt: str) -> bytes:
    """Keep a system prompt under its hash, once."""
    prompt = encoding.clean_text(prompt)
    digest = hashlib.blake2b(prompt.encode(), digest_size=16).digest()
    conn.execute("INSERT OR IGNORE INTO system_prompts VALUES (?, ?)", (digest, prompt))
    return digest


def set_system_prompt(conn: apsw.Connection, session_key: int, fence: int, prompt: str) -> None:
    """Replace the session's system prompt; raises `StaleLease` when the session is not ours any more."""
    conn.execute(
        "UPDATE sessions SET system_prompt_hash = ? WHERE key = ? AND fence = ?",
        (store_prompt(conn, prompt), session_key, fence),
    )
    if conn.changes() != 1:
        raise errors.StaleLease


def set_title(conn: apsw.Connection, session_id: str, title: str) -> None:
    """Name a session; raises `UsageError` when another session has that name."""
    session = known(conn, session_id)
    title = _title(title)
    if not title:
        raise errors.UsageError("a title needs at least one visible character")
    _execute_titled(conn, "UPDATE sessions SET title = ? WHERE key = ?", (title, session.key))


def describe(conn: apsw.Connection, session_id: str) -> dict[str, Any] | None:
    """One session as a dict, its prompt included."""
    cursor = conn.execute(
        "SELECT s.*, p.prompt AS system_prompt FROM sessions s"
        " LEFT JOIN system_prompts p ON p.hash = s.system_prompt_hash WHERE s.id = ?",
        (encoding.clean_text(session_id),),
    )
    for values in cursor:
        names = [column[0] for column in cursor.get_description()]
        return _public(dict(zip(names, values, strict=True)))
    return None


def recent(conn: apsw.Connection, limit: int, offset: int = 0) -> list[dict[str, Any]]:
    """Sessions, the last used first, with the start of their first message."""
    cursor = conn.execute(
        "SELECT s.*, (SELECT substr(m.content, 1, 200) FROM messages m WHERE m.id > (s.key << 24)"
        " AND m.id <= (s.key << 24) + s.last_seq AND m.role = 'user' ORDER BY m.id LIMIT 1) AS preview"
        " FROM sessions s ORDER BY s.last_active DESC, s.key DESC LIMIT ? OFFSET ?",
        (limit, offset),
    )
    found: list[dict[str, Any]] = []
    names: list[str] = []
    for values in cursor:
        names = names or [column[0] for column in cursor.get_description()]
        found.append(_public(dict(zip(names, values, strict=True))))
    return found


def _public(values: dict[str, Any]) -> dict[str, Any]:
    for name in ("head", "system_prompt_hash", "key", "fence", "last_event"):
        values.pop(name, None)
    return values


def resolve(conn: apsw.Connection, name: str) -> str:
    """The id meant by an id, a title, a unique beginning of an id, or `latest`; the first of these that fits.

    Raises `UnknownSession` or `AmbiguousSession`.
    """
    name = encoding.clean_text(name)
    rows = conn.execute("SELECT id FROM sessions WHERE id = ?1 OR title = ?1 ORDER BY id = ?1 DESC", (name,))
    matches = [cast("str", found) for (found,) in rows][:1]
    if name and not matches:
        # from the name itself up to behind everything that begins with it
        rows = conn.execute(
            "SELECT id FROM sessions WHERE id >= ?1 AND id < ?1 || char(0x10FFFF) ORDER BY id LIMIT 6", (name,)
        )
        matches = [cast("str", found) for (found,) in rows]
    if name == "latest" and len(matches) != 1:
        rows = conn.execute("SELECT id FROM sessions ORDER BY last_active DESC, key DESC LIMIT 1")
        matches = [cast("str", found) for (found,) in rows]
        if not matches:
            raise errors.UnknownSession("there is no session yet")
    if not matches:
        raise errors.UnknownSession(f"no session is called {name!r}; see: hermes sessions list")
    if len(matches) > 1:
        shown = ", ".join(matches[:5]) + (", …" if len(matches) > 5 else "")
        raise errors.AmbiguousSession(f"{name!r} is the beginning of several sessions: {shown}")
    return matches[0]
