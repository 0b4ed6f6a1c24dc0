"""`hermes sessions`: what is stored, as a list and as a transcript."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from typing import Any, cast

import click

from hermes_agent import home as home_module
from hermes_agent.agent import plan
from hermes_agent.cli.screen import Stream, one_line
from hermes_agent.cli.session_table import table
from hermes_agent.errors import FAILURES, FailureReason, StoreMissing, UnknownSession
from hermes_agent.store.session_db import SessionDB
from hermes_agent.transcript import rows
from hermes_agent.transcript.rows import ArgumentsError

Row = dict[str, Any]

MAX_RESULT_LINES = 12
MAX_RESULT_CHARS = 1000

_FORMAT = click.Option(
    ["--format", "format_"], type=click.Choice(["text", "json"]), default="text", help="What is printed."
)


def _list(limit: int, format_: str) -> int:
    out = Stream(sys.stdout)
    db = _open()
    if db is None:
        out.write("[]\n" if format_ == "json" else "No session is stored yet. Begin one with: hermes\n")
        return 0
    with db:
        found = db.list_sessions(limit)
    if format_ == "json":
        out.raw(json.dumps([_facts(session) for session in found], indent=2) + "\n")
    elif found:
        out.write(table(found, out) + "\n")
    else:
        out.write("No session is stored yet. Begin one with: hermes\n")
    return 0


def _show(session: str, format_: str) -> int:
    out = Stream(sys.stdout)
    db = _open()
    if db is None:
        raise UnknownSession(f"no session is called {session!r}: there is no session yet")
    with db:
        session_id = db.resolve_session(session)
        facts = db.get_session(session_id) or {}
        messages = db.get_messages_as_conversation(session_id)
        unfinished = [turn.id for turn in db.open_turns(session_id)]
    if format_ == "json":
        document = {**_facts(facts), "open_turns": unfinished, "messages": [_public(row) for row in messages]}
        out.raw(json.dumps(document, indent=2, default=str) + "\n")
        return 0
    out.write("\n".join(_transcript(facts, messages)) + "\n")
    if unfinished:
        out.write(f"— a turn runs, or was interrupted; hermes -r {session_id} finishes it\n")
    return 0


def _open() -> SessionDB | None:
    """The store, read only; None when there is none."""
    try:
        return SessionDB(home_module.hermes_home() / "state.db", read_only=True)
    except StoreMissing:
        return None


def _facts(session: Row) -> Row:
    return {
        "id": session.get("id"),
        "title": session.get("title"),
        "source": session.get("source"),
        "model": session.get("model"),
        "cwd": session.get("cwd"),
        "messages": session.get("last_seq"),
        "started_at": session.get("started_at"),
        "last_active": session.get("last_active"),
        "preview": session.get("preview"),
    }


def _public(row: Row) -> Row:
    found = {key: value for key, value in row.items() if not key.startswith("_")}
    return found | {"seq": row.get("_seq")} | ({"turn_outcome": row["_turn_outcome"]} if "_turn_outcome" in row else {})


# -- text -------------------------------------------------------------------------


def _transcript(facts: Row, messages: Iterable[Row]) -> Iterable[str]:
    title = f" · {one_line(facts['title'])}" if facts.get("title") else ""
    yield f"session {facts['id']}{title} · {facts.get('model') or 'no model'} · {facts.get('cwd') or ''}"
    for row in messages:
        yield ""
        yield from _row(row)
        if "_turn_outcome" in row:
            yield f"— the turn ended without an answer: {_why(row['_turn_outcome'])}"


def _row(row: Row) -> Iterable[str]:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.get("timestamp") or 0))
    if row["role"] == "tool":
        yield f"[{row.get('name') or row.get('tool_name') or 'tool'}] {stamp}"
        yield from ("    " + line for line in _cut(_text(row.get("content"))))
        return
    yield f"{row['role']} {stamp}"
    text = _text(row.get("content"))
    if text:
        yield text
    for call in row.get("tool_calls") or ():
        function: Row = call.get("function") or {}
        yield f"  → {function.get('name')}  {one_line(_about(function))}"


def _about(function: Row) -> str:
    try:
        return plan.preview(str(function.get("name")), rows.parse_arguments(function.get("arguments")))
    except ArgumentsError:
        return str(function.get("arguments"))[:120]


def _cut(text: str) -> list[str]:
    lines = text[:MAX_RESULT_CHARS].split("\n")
    if len(lines) > MAX_RESULT_LINES or len(text) > MAX_RESULT_CHARS:
        return [*lines[:MAX_RESULT_LINES], f"… ({len(text)} characters in all)"]
    return lines


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = cast("list[Any]", content) if isinstance(content, list) else []
    dicts = [cast("Row", part) for part in parts if isinstance(part, dict)]
    return "\n".join(str(part.get("text", f"[{part.get('type', 'part')}]")) for part in dicts)


def _why(outcome: str) -> str:
    if outcome in FailureReason.__members__.values():
        return f"{outcome.replace('_', ' ')}. {FAILURES[FailureReason(outcome)].advice}"
    return outcome


command = click.Group("sessions", help="List the stored sessions, or show one.")
command.add_command(
    click.Command(
        "list",
        params=[
            click.Option(
                ["--limit"], type=click.IntRange(min=1), default=50, show_default=True, help="How many at most."
            ),
            _FORMAT,
        ],
        callback=_list,
        help="The sessions, the last used first.",
    )
)
command.add_command(
    click.Command(
        "show",
        params=[click.Argument(["session"]), _FORMAT],
        callback=_show,
        help="The transcript of a session: its id, the beginning of it, its title, or latest.",
    )
)
