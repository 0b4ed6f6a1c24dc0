"""Conversations whose clients keep no session: what they send of one, and the session in which it goes on.

A client that sends its whole transcript with each message is recognised by it. The
session that goes on is the one whose last turn began with the same messages, from the
same key and under the same names (`user`, `X-Hermes-Session-Key`), and whose answer is the one that
the client shows behind them; only the new message is stored then, and what is sent to the model
begins as before. Every other transcript begins a session of its own, with the earlier
messages as its first rows: a first message always, an edited or branched one, one that
another session went on with, and one that fits several sessions equally well. System messages do not count,
since clients put the time of day into them; they hold for the one turn. Ids of sessions are
random: nothing that a client says leads to somebody else's session.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from aiohttp import web
from msgspec import Struct

from hermes_agent.delivery.service import Receipt
from hermes_agent.errors import ConversationMoved, FailureReason, UnknownSession
from hermes_agent.gateway import turns
from hermes_agent.gateway.call import Call
from hermes_agent.gateway.replies import ApiError
from hermes_agent.gateway.turns import Content
from hermes_agent.providers.base import ToolCall
from hermes_agent.store.conversations import Conversations, Name, Thread
from hermes_agent.store.session_db import encode_row
from hermes_agent.store.turns import TurnState
from hermes_agent.transcript import rows
from hermes_agent.transcript.rows import Row

MAX_MESSAGES = 5000
"""Messages of one request."""
UNSAID = "_unsaid"
"""Mark on a row of a history that does not count when a transcript is compared."""
SESSION_ID = "X-Hermes-Session-Id"
SESSION_KEY = "X-Hermes-Session-Key"

_LOOKS = 4
"""How often a session to go on in is looked for while others take it before us."""
_ATTEMPTS = 16
_LONGEST = 256
_NO_NAMES = frozenset((".", "..", "search"))
"""What a path, or a route, takes for something else."""

_encode = msgspec.json.Encoder(order="deterministic").encode


class ChatMessage(Struct, frozen=True):
    """One message of a chat."""

    role: str
    content: str | list[Any] | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Transcript:
    """What a client sent of a conversation: the new message, and what stands before it."""

    system: str
    history: list[Row]
    content: Content

    def digests(self, whose: Sequence[str]) -> tuple[bytes | None, str, bytes]:
        """The digest up to the last earlier message of the user, the answer to that, and the digest of the whole.

        The first is None where there is no such message, or something else than an answer stands behind it.
        """
        said = hashlib.blake2b(_encode(whose), digest_size=16)
        asked: bytes | None = None
        answer: list[str] = []
        for row in self.history:
            if row.get(UNSAID):
                continue
            said.update(_said(row))
            if row["role"] == "user":
                asked, answer = said.digest(), []
            elif row["role"] == "assistant" and "tool_calls" not in row:
                answer.append(text_of(row["content"]))
            else:
                asked = None
        said.update(_said({"role": "user", "content": self.content}))
        return asked, "\n\n".join(answer), said.digest()

    def encoded(self) -> list[Any]:
        """The history as rows of the store."""
        return [encode_row(row) for row in self.history]

    def newest(self) -> Content:
        """The new message for a session with a history of its own: all that the user said behind the last answer."""
        at = len(self.history)
        while at and self.history[at - 1]["role"] == "user":
            at -= 1
        return joined([*(row["content"] for row in self.history[at:]), self.content])


def from_messages(messages: Sequence[ChatMessage], *, param: str = "messages") -> Transcript:
    """The messages of a chat completion; raises `ApiError` 400 that names the message which does not fit."""
    if not messages:
        raise ApiError(400, f"missing_{param}", f"{param} must not be empty", param=param)
    check_count(messages, param)
    system = [text_of(message.content) for message in messages if message.role in ("system", "developer")]
    spoken = [(at, one) for at, one in enumerate(messages) if one.role not in ("system", "developer")]
    if not spoken or spoken[-1][1].role != "user":
        at = spoken[-1][0] if spoken else len(messages) - 1
        raise ApiError(400, f"invalid_{param}", "the last message must be the user's", param=f"{param}[{at}].role")
    now = time.time()
    history = [_row(message, f"{param}[{at}]", now) for at, message in spoken[:-1]]
    at, last = spoken[-1]
    content = turns.content_of(last.content, param=f"{param}[{at}].content")
    return Transcript("\n\n".join(filter(None, system)), history, content)


def check_count(items: Sequence[Any], param: str) -> None:
    """Raise `ApiError` 400 for too many of them."""
    if len(items) > MAX_MESSAGES:
        raise ApiError(400, "too_many_messages", f"{param} has more than {MAX_MESSAGES} items", param=param)


def _row(message: ChatMessage, where: str, now: float) -> Row:
    match message.role:
        case "user":
            row = rows.user_row(message.content, timestamp=now)
        case "assistant":
            calls = [tool_call(call, f"{where}.tool_calls") for call in message.tool_calls or ()]
            row = rows.assistant_row(message.content, calls, timestamp=now)
        case "tool" | "function":
            row = rows.tool_row(message.name or "", message.content, message.tool_call_id or "", timestamp=now)
            if not message.name:
                del row["name"], row["tool_name"]
        case _:
            raise ApiError(400, "invalid_messages", "role is none that a message can have", param=f"{where}.role")
    return row


def tool_call(call: Any, param: str) -> ToolCall:
    """A client's tool call, whose name must be a text; the rest is brought into shape."""
    fields = cast("dict[str, Any]", call) if isinstance(call, dict) else {}
    inner = fields.get("function")
    function = cast("dict[str, Any]", inner) if isinstance(inner, dict) else fields
    name, call_id = function.get("name"), fields.get("call_id") or fields.get("id") or ""
    if not isinstance(name, str) or not isinstance(call_id, str):
        raise ApiError(400, "invalid_tool_calls", "a tool call has an id and the name of a function", param=param)
    return ToolCall(call_id, name, rows.wire_arguments(function.get("arguments")))


def text_of(content: Any) -> str:
    """The words of a content."""
    if isinstance(content, str):
        return content
    parts = cast("list[Any]", content or [])
    texts = [part if isinstance(part, str) else cast("dict[str, Any]", part or {}).get("text") for part in parts]
    return "\n".join(text for text in texts if isinstance(text, str))


def joined(contents: Sequence[Content]) -> Content:
    """Several contents as one."""
    if len(contents) == 1:
        return contents[0]
    if all(isinstance(content, str) for content in contents):
        return turns.content_of("\n\n".join(cast("list[str]", contents)), param="input")
    lists = ([{"type": "text", "text": one}] if isinstance(one, str) else one for one in contents)
    return turns.content_of([part for parts in lists for part in parts], param="input")


def _said(row: Row) -> bytes:
    """What of a row tells it from another one: not what clients do to white space at its ends."""
    content = row.get("content")
    if not isinstance(content, str) and content is not None:
        parts = cast("list[Any]", content)
        is_text = all(isinstance(part, str) or cast("Row", part).get("type") == "text" for part in parts)
        content = text_of(parts) if is_text else parts
    if isinstance(content, str):
        content = content.strip()
    return _encode((row["role"], content, row.get("tool_calls"), row.get("tool_call_id")))


# -- the session ------------------------------------------------------------------------


def header(call: Call, name: str) -> str:
    """The id or name in a header, "" without it; raises `ApiError` 400 for one that cannot name anything."""
    text = call.request.headers.get(name, "").strip()
    if not text:
        return ""
    return checked_name(text, name, "invalid_session_id" if name == SESSION_ID else "invalid_session_key")


def checked_name(text: str, param: str, code: str) -> str:
    """`text` if it can be a name: visible, short, and not a path."""
    if (
        len(text) > _LONGEST
        or not text.strip()
        or not text.isprintable()
        or {"/", "\\"} & set(text)
        or text in _NO_NAMES
    ):
        raise ApiError(
            400, code, f"{param} is 1 to {_LONGEST} visible characters without / and \\", param=param,
        )  # fmt: skip
    return text


def new_session_id() -> str:
    """An id that nobody can guess."""
    return f"api-{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class Order:
    """A turn that a client asks for, but for where it shall run."""

    call: Call
    scope: str
    options: Mapping[str, Any]
    body: Mapping[str, Any]

    @property
    def conversations(self) -> Conversations:
        return Conversations(self.call.profile.db)

    async def submit(self, session_id: str, content: Content, thread: Thread) -> Receipt:
        """Take the message into that session, which is made when it is missing.

        A message whose turn failed before it called a tool does not hold its id for ever: sent again, it is
        taken anew. Raises `ConversationMoved`.
        """
        create = {"source": "api_server", "user_id": self.call.principal.name}
        for attempt in range(_ATTEMPTS):
            receipt = await turns.submit(
                self.call, session_id, content, self.scope, options=self.options, create=create,
                body=self.body, thread=thread, attempt=attempt,
            )  # fmt: skip
            if receipt.is_new or receipt.state is not TurnState.FAILED or not await self._may_run_again(receipt):
                break
        return receipt  # pyright: ignore[reportPossiblyUnboundVariable] - there is a first attempt

    async def _may_run_again(self, receipt: Receipt) -> bool:
        if receipt.reason is FailureReason.POISON:
            return False
        profile = self.call.profile
        view = await profile.read(profile.service.intake.find, receipt.turn_id)
        if view is None:
            return False
        said = await profile.read(self.conversations.said, view.turn)
        return not any(row.get("tool_calls") for row in said)


Place = tuple[str, Content, Thread]
"""A session, what to tell it, and what must hold of it."""


async def in_place(order: Order, look: Callable[[int], Awaitable[Place]]) -> Receipt:
    """Submit where `look` says, and look again while others are before us; it is told how often it looked already."""
    looked = 0
    while True:
        place = await look(looked)
        try:
            return await order.submit(*place)
        except ConversationMoved:
            looked += 1
            if looked >= _LOOKS * 2:
                raise


async def take(order: Order, transcript: Transcript, whose: Iterable[str]) -> Receipt:
    """Take a message with its transcript, in the session that goes on with it or in a new one."""
    call = order.call
    asked, answer, whole = transcript.digests((order.scope, call.principal.name, *whose))

    async def look(looked: int) -> Place:
        if asked is not None and looked < _LOOKS:
            found = await call.profile.read(order.conversations.continued, asked, answer)
            if found is not None:
                thread = Thread(follows=found.turn_key, transcript=whole)
                return found.session_id, transcript.content, thread
        return new_session_id(), transcript.content, Thread(transcript=whole, history=transcript.encoded())

    return await in_place(order, look)


async def take_named(order: Order, transcript: Transcript, name: Name, *, only_live: bool) -> Receipt:
    """Take a message into the session of a name, or into a new one that is given the name.

    With `only_live` the name of a session that has ended or was deleted is free again; else
    a deleted session is an `UnknownSession`.
    """
    find = order.conversations.live if only_live else order.conversations.named

    async def look(_: int) -> Place:
        session_id = await order.call.profile.read(find, name)
        if session_id is not None:
            return session_id, transcript.newest(), Thread(name=name)
        return new_session_id(), transcript.content, Thread(name=name, history=transcript.encoded())

    return await in_place(order, look)


# -- the answer -------------------------------------------------------------------------


async def answered(call: Call, receipt: Receipt) -> Receipt:
    """The receipt when its turn has ended or the client wants to wait no longer; a repeat waits for the first."""
    wait = call.prefer.wait
    return await turns.finished(
        call, receipt, wait=call.profile.settings.gateway.turn_timeout if wait is None else wait
    )


def not_yet(call: Call, receipt: Receipt) -> web.Response:
    """The answer to a client whose turn did not end in time; raises `ApiError` if it did not expect that."""
    prefer = call.prefer
    if prefer.respond_async or prefer.wait is not None:
        return turns.queued(call, receipt)
    status, code = (503, "gateway_draining") if call.profile.service.is_draining else (504, "answer_pending")
    headers = {**turns.headers_of(receipt), "Location": turns.location(call, receipt), "Retry-After": "1"}
    if not call.idempotency_key:
        headers["X-Should-Retry"] = "false"  # it would be another message
    raise ApiError(
        status, code, "The message was taken and is not answered yet; ask for its delivery.", headers=headers
    )


def is_clean(receipt: Receipt) -> bool:
    """Whether a turn gave a whole answer."""
    return receipt.state is TurnState.DONE and receipt.finish_reason != "length"


def outcome(receipt: Receipt) -> dict[str, Any]:
    """What the clients of the chat API read of a turn that did not end cleanly."""
    if receipt.state is TurnState.DONE:
        return {"completed": False, "partial": True, "failed": False, "error": None, "error_code": "output_truncated"}
    reason = receipt.reason or FailureReason.UNKNOWN
    return {
        "completed": False, "partial": False, "failed": True,
        "error": receipt.error or receipt.reply, "error_code": str(reason),
    }  # fmt: skip


def headers_of(receipt: Receipt) -> dict[str, str]:
    """The headers of an answer, with those that say that it is cut."""
    found = turns.headers_of(receipt)
    if receipt.is_final and receipt.state is TurnState.DONE and not is_clean(receipt):
        found |= {"X-Hermes-Completed": "false", "X-Hermes-Partial": "true"}
    return found


def details_of(receipt: Receipt, given: str, answered: str) -> dict[str, Any]:
    """Tokens of a turn under OpenAI's names."""
    used = turns.usage_of(receipt)
    return {
        given: used["input_tokens"], answered: used["output_tokens"], "total_tokens": used["total_tokens"],
        f"{given}_details": {"cached_tokens": receipt.usage.get("cache_read_tokens", 0)},
        f"{answered}_details": {"reasoning_tokens": receipt.usage.get("reasoning_tokens", 0)},
    }  # fmt: skip


def as_running(receipt: Receipt) -> Receipt:
    """A receipt as of when its turn had just begun."""
    return receipt._replace(state=TurnState.RUNNING, reason=None)


async def looked_at(call: Call, receipt: Receipt, *, is_over: bool = False) -> Receipt:
    """What is known of a turn that a stream tells: of one whose steps the store refuses, that it failed.

    So it is with one that `is_over` without having ended: its session was deleted, or this process stops.
    """
    found = None
    with contextlib.suppress(UnknownSession):
        found = await call.profile.read(call.profile.service.get, receipt.turn_id)
    known = found or receipt
    if known.is_final or not (is_over or known.reason):
        return known
    reason = known.reason or (FailureReason.DRAINING if found else FailureReason.UNKNOWN)
    return known._replace(state=TurnState.FAILED, reason=reason)
