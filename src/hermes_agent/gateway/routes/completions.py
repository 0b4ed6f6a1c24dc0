"""`/v1/chat/completions`: OpenAI's chat API, with the agent and its tools behind it.

The session is the one of `X-Hermes-Session-Id` (its history is the store's; it is made when it is missing,
and then begins with the earlier messages), else the one that goes on with the client's transcript
(see `transcripts`). What a client says of tools, sampling or formats is accepted and has no effect: the
server's tools run on the server, and calls of them are never in the answer.

A stream's `content` is what the agent says to the person and nothing else: what it says before it calls a
tool too, with a blank line between two texts. Without a stream the answer is the last text alone.
"""

from __future__ import annotations

import contextlib
from typing import Any

from aiohttp import web
from msgspec import Struct

from hermes_agent.delivery.service import Receipt
from hermes_agent.gateway import replies, transcripts, turns, work
from hermes_agent.gateway.call import Call
from hermes_agent.gateway.keys import Scope
from hermes_agent.gateway.replies import ApiError
from hermes_agent.gateway.sse import EventStream
from hermes_agent.gateway.story import Frame
from hermes_agent.gateway.table import Parameter, Route, starts_work
from hermes_agent.gateway.transcripts import SESSION_ID, SESSION_KEY, ChatMessage, Order, Transcript
from hermes_agent.gateway.words import Words
from hermes_agent.store.conversations import Thread
from hermes_agent.store.turns import TurnState

_SCOPE = "completions"
_OF_THE_TRANSPORT = frozenset(("stream", "stream_options"))
"""Fields that do not make another message of a request."""


class StreamOptions(Struct, frozen=True):
    """What a stream shall hold."""

    include_usage: bool | None = None


class CompletionBody(Struct, frozen=True):
    """A chat with a new message of the user at its end; what is not named here has no effect."""

    messages: list[ChatMessage]
    model: str | None = None
    provider: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None


async def complete(call: Call) -> web.StreamResponse:
    """Take the last message of a chat, run its turn and answer with its reply."""
    body = await call.body(CompletionBody)
    transcript = transcripts.from_messages(body.messages)
    receipt = await _take(call, body, transcript)
    if body.stream:
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return await _Stream(call, receipt, body.model or call.profile.model_name, usage=usage).run()
    receipt = await transcripts.answered(call, receipt)
    if not receipt.is_final:
        return transcripts.not_yet(call, receipt)
    turns.strict(call, receipt)
    return replies.json_reply(
        _completion(receipt, body.model or call.profile.model_name), 200, transcripts.headers_of(receipt)
    )


async def _take(call: Call, body: CompletionBody, transcript: Transcript) -> Receipt:
    fields = {name: value for name, value in (await call.fields()).items() if name not in _OF_THE_TRANSPORT}
    options = {
        "system": transcript.system,
        "model": body.model if body.provider else None,
        "provider": body.provider,
        "stream": body.stream,
    }
    key = transcripts.header(call, SESSION_KEY)
    session_id = transcripts.header(call, SESSION_ID)
    if not session_id:
        whose = (body.user or "", body.safety_identifier or "", key)
        return await transcripts.take(Order(call, _SCOPE, options, fields), transcript, whose)
    owner = None if call.principal.may(Scope.ADMIN) else call.principal.name
    thread = Thread(history=transcript.encoded(), user=owner)
    return await Order(call, f"{_SCOPE}:{session_id}", options, fields).submit(session_id, transcript.content, thread)


def _id_of(receipt: Receipt) -> str:
    return f"chatcmpl-{receipt.turn_id.removeprefix('turn_')[:29]}"


def _finish_of(receipt: Receipt) -> str:
    if receipt.state is not TurnState.DONE:
        return "error"
    return "stop" if transcripts.is_clean(receipt) else "length"


def _usage_of(receipt: Receipt) -> dict[str, Any]:
    return transcripts.details_of(receipt, "prompt_tokens", "completion_tokens")


def _completion(receipt: Receipt, model: str) -> dict[str, Any]:
    """The whole answer; raises `ApiError` 502 when there is no text in it that says why."""
    if receipt.state is not TurnState.DONE and not receipt.reply:
        raise ApiError(
            502, "agent_incomplete", receipt.error or "The turn ended without an answer.", failure=receipt.reason,
            headers=turns.headers_of(receipt),
        )  # fmt: skip
    message: dict[str, Any] = {"role": "assistant", "content": receipt.reply, "refusal": None}
    if receipt.reasoning:
        message["reasoning_content"] = receipt.reasoning
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_of(receipt)}
    answer: dict[str, Any] = {
        "id": _id_of(receipt),
        "object": "chat.completion",
        "created": int(receipt.accepted_at),
        "model": model,
        "choices": [choice],
        "usage": _usage_of(receipt),
    }
    if not transcripts.is_clean(receipt):
        answer["hermes"] = transcripts.outcome(receipt)
    return answer


class _Stream:
    """One turn as chunks to one client, from its beginning to its end, whenever the client came."""

    def __init__(self, call: Call, receipt: Receipt, model: str, *, usage: bool) -> None:
        self._call = call
        self._receipt = receipt
        self._wants_usage = usage
        self._wants_events = call.request.headers.get("X-Hermes-Events") == "1"
        self._base: dict[str, Any] = {
            "id": _id_of(receipt),
            "object": "chat.completion.chunk",
            "created": int(receipt.accepted_at),
            "model": model,
        }
        self._words = Words()

    async def run(self) -> web.StreamResponse:
        """Send the stream; a client that goes away ends it and nothing else."""
        self._stream = await EventStream.opened(self._call.request, turns.headers_of(self._receipt))
        await self._chunk({"role": "assistant", "content": ""})
        await self._finish(await self._follow())
        return await self._stream.end()

    async def _follow(self) -> Receipt:
        """Tell the turn as it happens; how it ended."""
        async with contextlib.aclosing(work.told(self._call, self._receipt)) as frames:
            async for frame in frames:
                if frame is not None:
                    await self._tell(frame)
                    continue
                await self._stream.comment("keepalive")
                receipt = await transcripts.looked_at(self._call, self._receipt)
                if receipt.is_final:
                    return receipt
        return await transcripts.looked_at(self._call, self._receipt, is_over=True)

    async def _tell(self, frame: Frame) -> None:
        kind, fields = frame.kind, frame.fields
        match kind:
            case "delta":
                await self._say(self._words.say(fields["delta"]))
            case "void":
                self._words.void()
            case "interim":
                await self._say(self._words.settle(fields["text"]))
            case "thinking":
                await self._think(fields["delta"])
            case "reasoning" if not fields["already_streamed"]:
                await self._think(fields["text"])
            case "tool.started":
                told = {"emoji": "\N{WRENCH}", "label": fields["preview"] or fields["tool"], "status": "running"}
                await self._progress(fields, told)
            case "tool.completed" | "tool.failed":
                await self._progress(fields, {"status": "completed"})
            case _ if self._wants_events and kind not in ("reasoning", "end"):
                await self._named(f"hermes.{kind}", fields)
            case _:
                pass

    async def _say(self, text: str) -> None:
        if text:
            await self._chunk({"content": text})

    async def _think(self, text: str) -> None:
        # strict readers want to find content in each delta
        await self._chunk({"content": "", "reasoning_content": text})

    async def _progress(self, fields: dict[str, Any], told: dict[str, Any]) -> None:
        """Tell of a call."""
        if not fields["tool"].startswith("_"):
            called = {"tool": fields["tool"], "toolCallId": fields["tool_call_id"]}
            await self._named("hermes.tool.progress", {**called, **told})

    async def _named(self, name: str, fields: dict[str, Any]) -> None:
        """Send a named event; clients that know nothing of such read it as a chunk without choices."""
        await self._stream.send({**self._base, "choices": [], **fields}, event=name)

    async def _chunk(self, delta: dict[str, Any], finish: str | None = None, **more: Any) -> None:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        await self._stream.send({**self._base, "choices": [choice], **more})

    async def _finish(self, receipt: Receipt) -> None:
        await self._say(self._words.settle(receipt.reply))
        more: dict[str, Any] = {}
        if receipt.state is not TurnState.DONE:
            more["error"] = turns.failure(receipt).body()["error"]
        if not transcripts.is_clean(receipt):
            more["hermes"] = transcripts.outcome(receipt)
        usage = _usage_of(receipt)
        await self._chunk({}, _finish_of(receipt), **more, **({} if self._wants_usage else {"usage": usage}))
        if self._wants_usage:
            await self._stream.send({**self._base, "choices": [], "usage": usage})
        await self._stream.send(b"[DONE]")


_HEADERS = (
    Parameter(SESSION_ID, "Go on in that session; it is made when it is missing.", where="header"),
    Parameter(SESSION_KEY, "Keeps apart conversations that begin alike.", where="header"),
    Parameter("X-Hermes-Events", "`1` for all that happens in the turn, as `hermes.KIND`.", where="header"),
)

ROUTES = (
    Route(
        "POST", "/v1/chat/completions", "createChatCompletion", complete, Scope.RUN,
        "Answer the last message of a chat.", CompletionBody, parameters=starts_work(*_HEADERS), streams=True,
    ),
)  # fmt: skip
