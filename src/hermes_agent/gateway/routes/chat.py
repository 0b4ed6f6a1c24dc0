"""`/api/sessions/{session_id}/chat`: one message, one answer."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from msgspec import Struct

from hermes_agent.gateway import replies, turns
from hermes_agent.gateway.call import Call
from hermes_agent.gateway.keys import Scope
from hermes_agent.gateway.replies import ApiError
from hermes_agent.gateway.table import Route, starts_work


class Author(Struct, frozen=True):
    """Who wrote the message, as the caller says."""

    id: str = ""
    name: str = ""
    is_bot: bool = False


class ChatBody(Struct, frozen=True):
    """A message to a session; `input` and `instructions` are other names of `message` and `system_message`."""

    message: str | list[Any] | None = None
    input: str | list[Any] | None = None
    system_message: str | None = None
    instructions: str | None = None
    author: Author | None = None
    model: str | None = None
    provider: str | None = None
    message_id: str | None = None
    wait_s: float | None = None
    deadline_s: float | None = None
    """Seconds after which the message is not worth an answer any more."""


def options_of(body: ChatBody) -> dict[str, Any]:
    """What the turn must remember of a request beside the message."""
    author = body.author
    return {
        "system": body.system_message or body.instructions,
        "model": body.model,
        "provider": body.provider,
        "author": {"id": author.id, "name": author.name, "is_bot": author.is_bot} if author else None,
    }


async def take(call: Call, scope: str, *, streams: bool = False) -> tuple[ChatBody, turns.Receipt]:
    """Read the request and take its message; with `streams` somebody will listen to the model's words."""
    body = await call.body(ChatBody)
    if body.wait_s is not None and not 0 <= body.wait_s <= 1e5:
        raise ApiError(400, "invalid_wait_s", "wait_s is a number of seconds", param="wait_s")
    content = turns.content_of(body.message if body.message is not None else body.input)
    receipt = await turns.submit(
        call, call.path("session_id"), content, scope,
        message_id=body.message_id or "", options={**options_of(body), "stream": streams}, body=await call.fields(),
        deadline=turns.deadline_of(body.deadline_s),
    )  # fmt: skip
    return body, receipt


async def chat(call: Call) -> web.StreamResponse:
    """Take a message, run its turn and answer with its reply."""
    body, receipt = await take(call, "chat")
    receipt = await turns.finished(call, receipt, wait=body.wait_s)
    if not receipt.is_final:
        return turns.queued(call, receipt)
    turns.strict(call, receipt)
    answer = {
        "object": "hermes.session.chat.completion",
        "session_id": receipt.session_id,
        "message": {"role": "assistant", "content": receipt.reply},
        "usage": turns.usage_of(receipt),
        "runtime": {"model": receipt.model or call.profile.settings.model.default},
        **turns.state_fields(receipt),
    }
    return replies.json_reply(answer, 200, turns.headers_of(receipt))


ROUTES = (
    Route(
        "POST", "/api/sessions/{session_id}/chat", "sessionChat", chat, Scope.DM,
        "Send a message to a session and wait for the answer.", ChatBody, parameters=starts_work(),
    ),
)  # fmt: skip
