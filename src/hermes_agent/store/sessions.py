"""Session rows: making, finding, changing and describing them."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import apsw

from hermes_agent import errors
from hermes_agent.store import encoding

_FIELDS = ("source", "model", "model_config", "system_prompt_hash", "parent_session_id", "user_id", "cwd", "title")
MAX_TITLE = 100
_FLAGS = ("pinned", "archived", "hidden")
_NUMBERED = re.compile(r"(.*?) #[0-9]{1,9}")
"""A title that is the next of another one."""


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


def active_rows(conn: apsw.Connection, session_key: int, fence: int) -> int | None:
    """How many of the session's rows are active, as its own row says; None when it has another fence, or is gone."""
    rows = conn.execute("SELECT message_count FROM sessions WHERE key = ? AND fence = ?", (session_key, fence))
    for (count,) in rows:
        return cast("int", count)
    return None


def known(conn: apsw.Connection, session_id: str) -> Head:
    """The head of a session that must exist; raises `UnknownSession`."""
    found = head(conn, session_id)
    if found is None:
        refuse_deleted(conn, session_id)
        raise errors.UnknownSession(f"no session {session_id!r}; see: hermes sessions list")
    return found


def refuse_deleted(conn: apsw.Connection, session_id: str) -> None:
    """Raise `UnknownSession` for the id of a session that was deleted; ask only when no session has it now."""
    for _ in conn.execute("SELECT 1 FROM tombstones WHERE id = ? LIMIT 1", (encoding.clean_text(session_id),)):
        raise errors.UnknownSession(f"session {session_id!r} was deleted")


def create(conn: apsw.Connection, session_id: str, source: str, fields: Mapping[str, Any]) -> int:
    """Make a session that is not there yet and return its key, which no other session ever had.

    Raises `SessionExists` or `InvalidTitle`.
    """
    refuse_taken(conn, session_id)
    ensure(conn, session_id, source, fields)
    return known(conn, session_id).key


def refuse_taken(conn: apsw.Connection, session_id: str) -> None:
    """Raise `SessionExists` when a session has that id."""
    if head(conn, session_id) is not None:
        raise errors.SessionExists(f"there is a session {session_id!r} already")


def ensure(conn: apsw.Connection, session_id: str, source: str, fields: Mapping[str, Any]) -> None:
    """Make the session, or fill in what is not set yet; a value that is set stays."""
    values = {key: _text(fields.get(key)) for key in _FIELDS if key != "source"}
    values["title"] = _title(str(fields.get("title") or "")) or None
    if fields.get("system_prompt"):
        values["system_prompt_hash"] = store_prompt(conn, str(fields["system_prompt"]))
    now = time.time()
    _execute_titled(
        conn,
        values["title"],
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


def _execute_titled(conn: apsw.Connection, title: str | None, sql: str, values: Any) -> None:
    """Run a statement that gives a session its title; raises `InvalidTitle` naming the session that has it."""
    try:
        conn.execute(sql, values)
    except apsw.ConstraintError as error:
        if "sessions.title" not in str(error):
            raise
        owner = _id_of_title(conn, title)
        raise errors.InvalidTitle(f"session {owner} already has that title: {title}", session_id=owner) from error


def _id_of_title(conn: apsw.Connection, title: str | None) -> str | None:
    for (session_id,) in conn.execute("SELECT id FROM sessions WHERE title = ?", (title,)):
        return cast("str", session_id)
    return None


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
    """Name a session; raises `InvalidTitle` when that is no title, or another session's."""
    session = known(conn, session_id)
    title = _checked_title(title)
    _execute_titled(conn, title, "UPDATE sessions SET title = ? WHERE key = ?", (title, session.key))


def _checked_title(text: str) -> str:
    title = _title(text)
    if not title:
        raise errors.InvalidTitle("a title needs at least one visible character")
    return title


def next_title(conn: apsw.Connection, title: str) -> str:
    """The title behind all those of the row `New`, `New #2`, `New #3`, … to which `title` belongs."""
    numbered = _NUMBERED.fullmatch(title)
    base = numbered[1] if numbered else title
    # "$" follows "#", so this walks just the titles that begin with "base #"
    rows = conn.execute(
        "SELECT max(CAST(substr(title, ?2) AS INTEGER)) FROM sessions WHERE title > ?1 || ' #' AND title < ?1 || ' $'"
        " AND length(title) < ?2 + 9 AND substr(title, ?2) NOT GLOB '*[^0-9]*'",
        (base, len(base) + 3),
    )
    number = max(cast("int | None", rows.fetchall()[0][0]) or 1, 1)
    while True:
        number += 1
        tail = f" #{number}"
        found = base[: MAX_TITLE - len(tail)].rstrip() + tail
        if _id_of_title(conn, found) is None:
            return found


def update(
    conn: apsw.Connection,
    session_id: str,
    *,
    title: str | None = None,
    end_reason: str | None = None,
    pinned: bool | None = None,
    archived: bool | None = None,
    hidden: bool | None = None,
) -> None:
    """Change what a person may change of a session; None leaves a field as it is.

    An end reason ends the session now, "" opens it again. To pin a session shows it.
    Raises `UnknownSession` or `InvalidTitle`.
    """
    session = known(conn, session_id)
    if title is not None:
        set_title(conn, session_id, title)
    if end_reason is not None:
        conn.execute(
            "UPDATE sessions SET end_reason = ?, ended_at = ? WHERE key = ?",
            (encoding.clean_text(end_reason) or None, time.time() if end_reason else None, session.key),
        )
    flags = dict(zip(_FLAGS, (pinned, archived, False if pinned else hidden), strict=True))
    for name, value in flags.items():
        if value is not None:
            conn.execute(f"UPDATE sessions SET {name} = ? WHERE key = ?", (int(value), session.key))


def branch(conn: apsw.Connection, source: Head, session_id: str, title: str | None) -> int:
    """Make an empty session like another one, with it as parent, and return its key.

    Without a title it is given the next one of the other's row. Raises `SessionExists` or `InvalidTitle`.
    """
    refuse_taken(conn, session_id)
    if title is None:
        rows = conn.execute("SELECT title FROM sessions WHERE key = ? AND title IS NOT NULL", (source.key,)).fetchall()
        title = next_title(conn, cast("str", rows[0][0])) if rows else None
    else:
        title = _checked_title(title)
    _execute_titled(
        conn,
        title,
        "INSERT INTO sessions (id, source, title, model, model_config, system_prompt_hash, parent_session_id, user_id,"
        " cwd, started_at, last_active)"
        " SELECT :id, source, :title, model, model_config, system_prompt_hash, id, user_id, cwd, :now, :now"
        " FROM sessions WHERE key = :key",
        {"id": session_id, "title": title, "now": time.time(), "key": source.key},
    )
    return conn.last_insert_rowid()


# -- describing --------------------------------------------------------------------


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


def prompt_of(conn: apsw.Connection, session_key: int) -> str:
    """A session's system prompt, "" when none is stored."""
    rows = conn.execute(
        "SELECT p.prompt FROM sessions s JOIN system_prompts p ON p.hash = s.system_prompt_hash WHERE s.key = ?",
        (session_key,),
    )
    for (prompt,) in rows:
        return cast("str", prompt)
    return ""


def recent(
    conn: apsw.Connection,
    limit: int,
    offset: int = 0,
    *,
    source: str | None = None,
    title: str | None = None,
    archived: bool | None = False,
    hidden: bool | None = False,
    pinned: bool | None = None,
    parent: str | None = None,
    since: float | None = None,
) -> list[dict[str, Any]]:
    """Sessions, the last used first, with the start of their first message.

    None lets both kinds through, or any value; a title must be equal, `parent` "" means
    none, `since` is the wall-clock time after which it was used.
    """
    where = ["TRUE"]
    where += [
        f"{name} = :{name}" for name, flag in zip(_FLAGS, (pinned, archived, hidden), strict=True) if flag is not None
    ]
    where += [f"{name} = :{name}" for name, text in (("source", source), ("title", title)) if text is not None]
    if parent is not None:
        where.append("parent_session_id = :parent" if parent else "parent_session_id IS NULL")
    if since is not None:
        where.append("last_active > :since")
    # no index on what every commit moves: that costs each of them more than a look at all sessions' rows costs here
    cursor = conn.execute(
        f"SELECT s.*, {_PREVIEW} AS preview FROM (SELECT key AS found FROM sessions WHERE {' AND '.join(where)}"
        " ORDER BY last_active DESC, key DESC LIMIT :limit OFFSET :offset) JOIN sessions s ON s.key = found"
        " ORDER BY s.last_active DESC, s.key DESC",
        {
            "limit": limit, "offset": offset, "source": source, "title": None if title is None else _title(title),
            "pinned": pinned, "archived": archived, "hidden": hidden, "parent": parent, "since": since,
        },
    )  # fmt: skip
    found: list[dict[str, Any]] = []
    names: list[str] = []
    for values in cursor:
        names = names or [column[0] for column in cursor.get_description()]
        found.append(_public(dict(zip(names, values, strict=True))))
    return found


_FIRST_ROWS = 100
"""Among this many rows a session's preview is looked for."""
_PREVIEW = (
    "(SELECT substr(group_concat("
    "CASE p.type WHEN 'text' THEN p.value WHEN 'object' THEN p.value ->> '$.text' END, ' '), 1, 200)"
    " FROM json_each((SELECT m.wire FROM messages m WHERE m.id > (s.key << 24)"
    f" AND m.id <= (s.key << 24) + min(s.last_seq, {_FIRST_ROWS}) AND m.role = 'user' ORDER BY m.id LIMIT 1),"
    " '$.content') p)"
)


def _public(values: dict[str, Any]) -> dict[str, Any]:
    values["has_system_prompt"] = values["system_prompt_hash"] is not None
    values["has_model_config"] = values["model_config"] is not None
    for name in _FLAGS:
        values[name] = bool(values[name])
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
