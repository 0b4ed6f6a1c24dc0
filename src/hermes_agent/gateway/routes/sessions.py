"""`/api/sessions`: making, finding, changing, branching, searching and removing sessions."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct

from hermes_agent.errors import InvalidTitle, SessionExists
from hermes_agent.gateway import replies, transcripts, turns
from hermes_agent.gateway.call import Call
from hermes_agent.gateway.keys import Scope
from hermes_agent.gateway.replies import ApiError
from hermes_agent.gateway.table import Parameter, Route
from hermes_agent.store import search as search_module
from hermes_agent.store.search import Hit

MAX_LIST = 200
MAX_MESSAGES = 500

_SOURCES = frozenset("api_server hermes_browser cli telegram discord slack desktop dashboard".split())
_MESSAGE_FIELDS = (
    "id", "seq", "session_id", "role", "content", "tool_call_id", "tool_calls", "name", "tool_name", "timestamp",
    "finish_reason", "reasoning", "reasoning_content", "display_kind", "author",
)  # fmt: skip


class NewSession(Struct, frozen=True):
    """A session to be made; everything may be left out."""

    id: str | None = None
    session_id: str | None = None
    title: str | None = None
    source: str | None = None
    system_prompt: str | None = None
    model: str | None = None
    provider: str | None = None


class SessionChanges(Struct, frozen=True, forbid_unknown_fields=True):
    """What may be changed of a session."""

    title: str | None = None
    end_reason: str | None = None
    pinned: bool | None = None
    archived: bool | None = None
    hidden: bool | None = None
    unread: bool | None = None
    """Accepted for clients that send it; nothing is kept."""


class Fork(Struct, frozen=True):
    """A branch to be made of a session."""

    id: str | None = None
    title: str | None = None
    at_seq: int | None = None
    """The last row that the branch shall hold."""


def public(fields: dict[str, Any]) -> dict[str, Any]:
    """A session as clients see it: without its prompt."""
    has_prompt = bool(fields.get("system_prompt") or fields.get("system_prompt_hash"))
    hidden = ("system_prompt", "model_config", "last_seq")
    found = {name: value for name, value in fields.items() if name not in hidden}
    for name in ("pinned", "archived", "hidden"):
        found[name] = bool(found.get(name))
    return {
        **found,
        "estimated_cost_usd": None,
        "actual_cost_usd": None,
        "has_system_prompt": has_prompt,
        "has_model_config": bool(fields.get("model_config")),
    }


async def session_of(call: Call, session_id: str) -> dict[str, Any]:
    """A session's public fields; raises `ApiError` 404."""
    found = await call.profile.read(call.profile.db.get_session, session_id)
    if found is None:
        raise ApiError(404, "session_not_found", f"no session {session_id!r}")
    return public(found)


def _title_error(error: InvalidTitle) -> ApiError:
    return ApiError(400, "invalid_title", str(error), param="title")


async def list_(call: Call) -> web.StreamResponse:
    """List sessions, the last used first."""
    limit, offset = call.number("limit", 50, least=1, most=MAX_LIST), call.number("offset", 0)
    title = call.request.query.get("title")
    hidden = None if title is not None and call.flag("include_hidden") else False
    which: dict[str, Any] = {
        "source": call.request.query.get("source") or None,
        "title": title,
        "hidden": hidden,
        "archived": None if call.flag("include_archived") else False,
        "parent": None if call.flag("include_children", default=True) else "",
    }
    found = await call.profile.read(call.profile.db.list_sessions, limit + 1, offset, **which)
    data = [public(fields) for fields in found[:limit]]
    return replies.json_reply(
        {"object": "list", "data": data, "limit": limit, "offset": offset, "has_more": len(found) > limit}
    )


async def create(call: Call) -> web.StreamResponse:
    """Make a session."""
    body = await call.body(NewSession)
    session_id = transcripts.checked_name(body.id or body.session_id or new_id(), "id", "invalid_session_id")
    fields: dict[str, Any] = {"title": body.title, "model": body.model, "system_prompt": body.system_prompt}
    if body.provider:
        fields["model_config"] = {"provider": body.provider}
    source = "hermes_browser" if body.source == "browser" else body.source or ""
    try:
        await call.profile.read(
            call.profile.db.create_new_session, session_id, source if source in _SOURCES else "api_server", **fields
        )
    except SessionExists as error:
        raise ApiError(409, "session_exists", str(error), param="id") from None
    except InvalidTitle as error:
        raise _title_error(error) from None
    answer = {"object": "hermes.session", "session": await session_of(call, session_id)}
    return replies.json_reply(answer, 201, {"X-Hermes-Session-Id": turns.header_text(session_id)})


def new_id() -> str:
    """An id for a session that its client did not name."""
    return f"api_{int(time.time())}_{secrets.token_hex(4)}"


async def read(call: Call) -> web.StreamResponse:
    """Read one session."""
    return replies.json_reply({"object": "hermes.session", "session": await session_of(call, call.path("session_id"))})


async def change(call: Call) -> web.StreamResponse:
    """Change a session's title, end or marks."""
    session_id = call.path("session_id")
    body = await call.body(SessionChanges)
    changes = {name: value for name, value in msgspec.structs.asdict(body).items() if name != "unread"}
    try:
        await call.profile.read(call.profile.db.update_session, session_id, **changes)
    except InvalidTitle as error:
        raise _title_error(error) from None
    return replies.json_reply({"object": "hermes.session", "session": await session_of(call, session_id)})


async def delete(call: Call) -> web.StreamResponse:
    """Remove a session and everything that was stored of it."""
    session_id = call.path("session_id")
    await call.profile.delete_session(session_id)
    return replies.json_reply({"object": "hermes.session.deleted", "id": session_id, "deleted": True})


async def messages(call: Call) -> web.StreamResponse:
    """Read a page of a session's messages, oldest first."""
    session_id, db = call.path("session_id"), call.profile.db
    limit = call.number("limit", MAX_MESSAGES, least=1, most=MAX_MESSAGES)
    offset = call.number("offset", 0)
    order = call.request.query.get("order") or "latest"
    if order not in ("oldest", "latest"):
        raise ApiError(400, "invalid_pagination", "order is oldest or latest", param="order")
    total = await call.profile.read(db.message_count, session_id)
    first = offset if order == "oldest" else max(total - offset - limit, 0)
    count = limit if order == "oldest" else max(min(limit, total - offset), 0)
    rows = await call.profile.read(db.get_messages, session_id, count, first) if count else []
    if not call.flag("include_compacted"):
        rows = [row for row in rows if row["active"]]
    data = [{name: row[name] for name in _MESSAGE_FIELDS if row.get(name) is not None} for row in rows]
    for row in data:
        row.setdefault("content", None)
    page = {"limit": limit, "offset": offset, "order": order, "returned": len(data), "total": total}
    return replies.json_reply({"object": "list", "session_id": session_id, "data": data, "pagination": page})


async def fork(call: Call) -> web.StreamResponse:
    """Make a session that begins as a copy of this one."""
    body = await call.body(Fork)
    source_id = call.path("session_id")
    session_id = transcripts.checked_name(body.id or new_id(), "id", "invalid_session_id")
    if body.at_seq is not None and body.at_seq < 0:
        raise ApiError(400, "invalid_at_seq", "at_seq is the number of a row", param="at_seq")
    try:
        await call.profile.read(
            call.profile.db.fork_session, source_id, session_id, title=body.title, at_seq=body.at_seq
        )
    except SessionExists as error:
        raise ApiError(409, "session_exists", str(error), param="id") from None
    except InvalidTitle as error:
        raise _title_error(error) from None
    answer = {"object": "hermes.session", "session": await session_of(call, session_id)}
    return replies.json_reply(answer, 201, {"X-Hermes-Session-Id": turns.header_text(session_id)})


async def search(call: Call) -> web.StreamResponse:
    """Find messages by their words, in all sessions or in one."""
    query = call.request.query.get("q", call.request.query.get("query", ""))
    if not query.strip():
        raise ApiError(400, "missing_query", "q holds the words to look for", param="q")
    limit, offset = call.number("limit", 20, least=1, most=100), call.number("offset", 0, most=10_000)
    found = await call.profile.read(
        search_module.search,
        call.profile.db.database,
        query,
        limit=limit,
        offset=offset,
        session_id=call.request.query.get("session_id") or None,
        source=call.request.query.get("source") or None,
    )
    return replies.json_reply(
        {
            "object": "list",
            "data": [_hit(hit) for hit in found.hits],
            "limit": limit,
            "offset": offset,
            "has_more": found.has_more,
            "scanned": found.scanned,
            "complete": found.complete,
        }
    )


def _hit(hit: Hit) -> dict[str, Any]:
    return {"object": "hermes.search.hit", **hit._asdict()}


_PAGE = (Parameter("limit", "How many at most.", "integer"), Parameter("offset", "How many to leave out.", "integer"))

ROUTES = (
    Route(
        "GET", "/api/sessions", "listSessions", list_, Scope.READ, "List sessions, the last used first.",
        parameters=(
            *_PAGE,
            Parameter("source", "Where they come from."),
            Parameter("title", "Their exact title."),
            Parameter("include_hidden", "Hidden ones too; with `title` only.", "boolean"),
            Parameter("include_archived", "Archived ones too.", "boolean"),
            Parameter("include_children", "Branches too.", "boolean"),
        ),
    ),
    Route("POST", "/api/sessions", "createSession", create, Scope.RUN, "Make a session.", NewSession, 201),
    Route(
        "GET", "/api/sessions/search", "searchSessions", search, Scope.READ, "Find messages by their words.",
        parameters=(
            Parameter("q", "The words; `OR`, `NOT`, phrases and beginnings (`word*`)."),
            Parameter("session_id", "In this session only."),
            Parameter("source", "In sessions of this source only."),
            *_PAGE,
        ),
    ),
    Route("GET", "/api/sessions/{session_id}", "readSession", read, Scope.READ, "Read a session."),
    Route(
        "PATCH", "/api/sessions/{session_id}", "changeSession", change, Scope.RUN,
        "Change a session's title, end or marks.", SessionChanges,
    ),
    Route("DELETE", "/api/sessions/{session_id}", "deleteSession", delete, Scope.ADMIN, "Remove a session for good."),
    Route(
        "GET", "/api/sessions/{session_id}/messages", "listMessages", messages, Scope.READ,
        "Read a page of a session's messages.",
        parameters=(
            *_PAGE,
            Parameter("order", "`latest` counts from the end, `oldest` from the beginning."),
            Parameter("include_compacted", "Also rows that a summary stands for.", "boolean"),
        ),
    ),
    Route(
        "POST", "/api/sessions/{session_id}/fork", "forkSession", fork, Scope.RUN,
        "Make a session that begins as a copy of this one.", Fork, 201,
    ),
)  # fmt: skip
