"""`/api/sessions`: making, finding, changing and removing sessions."""

from __future__ import annotations

import secrets
import time
from typing import Any

from aiohttp import web
from msgspec import Struct

from hermes_agent.gateway import replies
from hermes_agent.gateway.call import Call
from hermes_agent.gateway.keys import Scope
from hermes_agent.gateway.replies import ApiError
from hermes_agent.gateway.table import Route


class NewSession(Struct, frozen=True):
    """A session to be made; everything may be left out."""

    id: str | None = None
    session_id: str | None = None
    title: str | None = None
    source: str | None = None
    system_prompt: str | None = None
    model: str | None = None


async def create(call: Call) -> web.StreamResponse:
    """Make a session."""
    body = await call.body(NewSession)
    session_id = body.id or body.session_id or f"api_{int(time.time())}_{secrets.token_hex(4)}"
    fields = {"title": body.title, "model": body.model, "system_prompt": body.system_prompt}
    try:
        await call.profile.read(call.profile.db.create_session, session_id, "api_server", **fields)
    except ValueError as error:
        raise ApiError(400, "invalid_session_id", str(error), param="id") from None
    return replies.json_reply({"object": "hermes.session", "session": await _session(call, session_id)}, 201)


async def _session(call: Call, session_id: str) -> dict[str, Any]:
    found = await call.profile.read(call.profile.db.get_session, session_id)
    if found is None:
        raise ApiError(404, "session_not_found", f"no session {session_id!r}")
    found.pop("system_prompt", None)
    return found


ROUTES = (Route("POST", "/api/sessions", "createSession", create, Scope.RUN, "Make a session.", NewSession, 201),)
