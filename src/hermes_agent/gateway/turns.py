"""Starting a turn over the API and answering with what became of it, the same on every route."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, cast

from aiohttp import web

from hermes_agent.delivery.service import Receipt
from hermes_agent.errors import FailureReason, MessageConflict
from hermes_agent.gateway import replies
from hermes_agent.gateway.call import Call
from hermes_agent.gateway.replies import ApiError
from hermes_agent.store.conversations import Thread
from hermes_agent.store.deliveries import Incoming
from hermes_agent.store.turns import TurnState

MAX_TEXT = 65_536
"""Characters of one message."""
MAX_PARTS = 1000
MAX_SECONDS = 1e6

Content = str | list[Any]


def content_of(value: Any, *, param: str = "message", code: str = "missing_message") -> Content:
    """A message's content, checked: text, or a list of text and image parts. Raises `ApiError` 400."""
    if isinstance(value, str):
        if not value.strip():
            raise ApiError(400, code, f"{param} must not be empty", param=param)
        if len(value) > MAX_TEXT:
            raise ApiError(413, "message_too_long", f"{param} has more than {MAX_TEXT} characters", param=param)
        return value
    if isinstance(value, list) and value:
        parts = cast("list[Any]", value)
        if len(parts) > MAX_PARTS:
            raise ApiError(400, "too_many_parts", f"{param} has more than {MAX_PARTS} parts", param=param)
        found = [_part(part, param) for part in parts]
        if all(part["type"] == "text" for part in found):
            return content_of("\n".join(part["text"] for part in found), param=param, code=code)
        return found
    raise ApiError(400, code, f"{param} is a text or a list of content parts", param=param)


def _part(part: Any, param: str) -> dict[str, Any]:
    """One content part in the form in which it is stored and sent to a model."""
    fields = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
    kind, text, image = fields.get("type"), fields.get("text"), fields.get("image_url")
    if kind in ("text", "input_text", "output_text") and isinstance(text, str):
        return {"type": "text", "text": text}
    if kind in ("image_url", "input_image"):
        url = cast("dict[str, Any]", image).get("url") if isinstance(image, dict) else image
        if isinstance(url, str) and url.startswith(("https://", "http://", "data:image/")):
            return {"type": "image_url", "image_url": {"url": url}}
    raise ApiError(400, "unsupported_content_type", "a content part is text or an image with a URL", param=param)


async def submit(
    call: Call,
    session_id: str,
    content: Content,
    scope: str,
    *,
    message_id: str = "",
    options: Mapping[str, Any] | None = None,
    create: Mapping[str, Any] | None = None,
    body: Mapping[str, Any] | None = None,
    conflict: int = 422,
    thread: Thread | None = None,
    attempt: int = 0,
    deadline: float | None = None,
    turn_id: str = "",
) -> Receipt:
    """Take the message; it is durable, once, when this returns.

    Its id is the `Idempotency-Key`, else `message_id`; `attempt` counts the messages that
    were taken under it because the earlier ones had failed. Another message under the same id is
    an `ApiError` with the status `conflict`, one that does not belong there a `ConversationMoved`.
    `deadline` is what `deadline_of` gives; `turn_id` is what a new turn is called, by default a name is made.
    """
    key = call.idempotency_key or message_id
    if key and attempt:
        key = f"{key} {attempt}"  # no client's own key has a space
    incoming = Incoming(
        sender=call.principal.name,
        content=content,
        scope=f"{scope}:{session_id}" if create is None else scope,
        message_id=key,
        options={name: value for name, value in (options or {}).items() if value},
        deadline=deadline,
        turn_id=turn_id,
        body_hash=fingerprint(body) if key and body is not None else b"",
        thread=thread,
    )
    try:
        return await call.profile.submit(session_id, incoming, create)
    except MessageConflict as error:
        raise ApiError(
            conflict, "idempotency_key_conflict", str(error), param="Idempotency-Key",
            failure=FailureReason.MESSAGE_CONFLICT,
        ) from None  # fmt: skip


def deadline_of(seconds: float | None, *, param: str = "deadline_s") -> float | None:
    """The time on the clock in so many seconds, after which an answer is worth nothing. Raises `ApiError` 400."""
    if seconds is None:
        return None
    if not 0 < seconds <= MAX_SECONDS:
        raise ApiError(400, f"invalid_{param}", f"{param} is a number of seconds above 0", param=param)
    return time.time() + seconds


def fingerprint(body: Mapping[str, Any]) -> bytes:
    """What tells a repeat of a request from another one under its key."""
    return Incoming(sender="", content="", options=dict(body)).fingerprint()


async def finished(call: Call, receipt: Receipt, *, wait: float | None = None) -> Receipt:
    """The receipt when its turn has ended, or has had its time: `wait` seconds, or as the client prefers.

    A repeat of a message whose turn still runs is a 409 unless its sender said how long to wait.
    """
    prefer = call.prefer
    seconds = wait if wait is not None else prefer.wait
    if prefer.respond_async:
        seconds = 0.0
    if not receipt.is_new and not receipt.is_final and seconds is None:
        raise ApiError(
            409, "request_in_progress", "This message is being answered; ask for its delivery, or prefer to wait.",
            headers={"Retry-After": "1", "Location": location(call, receipt)},
        )  # fmt: skip
    if not receipt.is_final:
        limit = call.profile.settings.gateway.turn_timeout
        ended = await call.profile.ended(receipt.turn_id, limit if seconds is None else min(seconds, limit))
        receipt = ended._replace(is_new=receipt.is_new)
    if not receipt.is_final and receipt.reason is not None:
        raise failure(receipt)
    return receipt


def location(call: Call, receipt: Receipt) -> str:
    """Where what became of a message can be asked."""
    prefix = "" if "profile" not in call.request.match_info else f"/p/{call.path('profile')}"
    return f"{prefix}/api/deliveries/{receipt.turn_id}"


def failure(receipt: Receipt) -> ApiError:
    """A failed turn as an error."""
    reason = receipt.reason or FailureReason.UNKNOWN
    return ApiError(replies.STATUS[reason], str(reason), receipt.error or receipt.reply, failure=reason)


def strict(call: Call, receipt: Receipt) -> None:
    """Raise the failure of a turn that ended without an answer, if the client prefers that."""
    if call.prefer.strict and receipt.is_final and receipt.state is not TurnState.DONE:
        raise failure(receipt)


def usage_of(receipt: Receipt) -> dict[str, int]:
    """Tokens of a turn under the names of the sessions API."""
    used = receipt.usage
    given, answered = used.get("input_tokens", 0), used.get("output_tokens", 0)
    return {"input_tokens": given, "output_tokens": answered, "total_tokens": given + answered}


def headers_of(receipt: Receipt) -> dict[str, str]:
    """The headers of every answer about a turn."""
    found = {"X-Hermes-Session-Id": header_text(receipt.session_id)}
    if not receipt.is_new:
        found["Idempotency-Replayed"] = "true"
    if receipt.is_final and receipt.state is not TurnState.DONE:
        found["X-Hermes-Completed"] = "false"
        found["X-Hermes-Error"] = str(receipt.reason or FailureReason.UNKNOWN)
    return found


def header_text(text: str) -> str:
    """A text that a header can hold."""
    return "".join(char if " " <= char <= "~" else "?" for char in text)


def state_fields(receipt: Receipt) -> dict[str, Any]:
    """What every answer says of its turn."""
    found: dict[str, Any] = {
        "delivery_id": receipt.turn_id,
        "attempts": receipt.attempts,
        "completed": receipt.state is TurnState.DONE,
    }
    if receipt.is_final and receipt.state is not TurnState.DONE:
        found["failure"] = replies.failure_fields(receipt.reason or FailureReason.UNKNOWN)
    return found


def queued(call: Call, receipt: Receipt) -> web.Response:
    """202: the message is taken and not answered yet."""
    status = "queued" if receipt.state is TurnState.ACCEPTED else "running"
    fields = {
        "object": "hermes.session.chat.queued", "session_id": receipt.session_id, "status": status,
        "delivery_id": receipt.turn_id, "location": location(call, receipt),
    }  # fmt: skip
    return replies.json_reply(fields, 202, {**headers_of(receipt), "Location": location(call, receipt)})
