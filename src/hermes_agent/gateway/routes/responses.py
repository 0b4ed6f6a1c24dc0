"""`/v1/responses`: OpenAI's Responses API; a response is a turn, read from the store at any time.

The session of a response is that of `previous_response_id`, else the one that `conversation` names, else the
newest live one of `X-Hermes-Session-Key`, else the one that goes on with the client's input (see
`transcripts`). A response that follows one behind which the session went on already begins a branch of it. Names
belong to the key that gave them.

A client that sends `tools`, if only an empty list, runs its own tools and would take a `function_call` for one
of them; it is told of the server's calls by `mcp_call` items. All others get `function_call` and
`function_call_output`.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any, cast

from aiohttp import web
from msgspec import Struct

from hermes_agent.delivery.events import Event
from hermes_agent.delivery.service import Receipt
from hermes_agent.errors import FailureReason, UnknownSession
from hermes_agent.gateway import items, replies, transcripts, turns, work
from hermes_agent.gateway.call import Call
from hermes_agent.gateway.following import follow_turn
from hermes_agent.gateway.items import Item, Output, Told
from hermes_agent.gateway.keys import Scope
from hermes_agent.gateway.replies import ApiError
from hermes_agent.gateway.sse import EventStream
from hermes_agent.gateway.table import Parameter, Route, starts_work
from hermes_agent.gateway.transcripts import SESSION_KEY, ChatMessage, Order, Transcript
from hermes_agent.store.conversations import Conversations, Name, Thread
from hermes_agent.store.intake import TurnView
from hermes_agent.store.turns import TurnState

_SCOPE = "responses"
_ID = re.compile(r"resp_([0-9a-f]{28})")
_OF_THE_TRANSPORT = frozenset(("stream", "stream_options", "background"))
"""Fields that do not make another message of a request."""
_STATUS = {
    TurnState.ACCEPTED: "queued",
    TurnState.DONE: "completed",
    TurnState.FAILED: "failed",
    TurnState.EXPIRED: "failed",
    TurnState.CANCELLED: "cancelled",
}


class Conversation(Struct, frozen=True):
    """A conversation by the client's name for it."""

    id: str


class ResponseBody(Struct, frozen=True):
    """What to respond to; what is not named here has no effect."""

    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | Conversation | None = None
    conversation_history: list[ChatMessage] | None = None
    model: str | None = None
    provider: str | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, Any] | None = None
    tools: list[Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None


async def respond(call: Call) -> web.StreamResponse:
    """Take the last message of the input, run its turn and answer with its output."""
    body = await call.body(ResponseBody)
    record = _record(call, body)
    transcript = items.from_input(body.input, body.instructions or "", body.conversation_history or ())
    fields = {name: value for name, value in (await call.fields()).items() if name not in _OF_THE_TRANSPORT}
    options = {
        "system": transcript.system,
        "model": body.model if body.provider else None,
        "provider": body.provider,
        "stream": body.stream,
        "response": record,
    }
    receipt = await _take(Order(call, _SCOPE, options, fields), body, transcript)
    if body.stream:
        return await _Stream(call, receipt, record).run()
    if not body.background:
        receipt = await transcripts.answered(call, receipt)
        turns.strict(call, receipt)
    elsewhere = {} if receipt.is_final else {"Location": turns.location(call, receipt)}
    return replies.json_reply(
        await _response(call, receipt, record),
        200 if receipt.is_final or body.background else 202,
        {**transcripts.headers_of(receipt), **elsewhere},
    )


async def read(call: Call) -> web.StreamResponse:
    """Read a response, finished or not."""
    view = await _stored(call, call.path("response_id"), "response_id")
    receipt = await call.profile.read(call.profile.service.get, view.turn.id)
    if receipt is None:
        raise _unknown(call.path("response_id"), "response_id")
    return replies.json_reply(await _response(call, receipt, view.turn.options["response"]))


async def remove(call: Call) -> web.StreamResponse:
    """Withdraw a response from its readers; the turn and what it did stay in the session."""
    response_id = call.path("response_id")
    view = await _stored(call, response_id, "response_id")
    await call.profile.read(Conversations(call.profile.db).hide, view.turn.key)
    return replies.json_reply({"id": response_id, "object": "response", "deleted": True})


# -- where it runs ----------------------------------------------------------------------


async def _take(order: Order, body: ResponseBody, transcript: Transcript) -> Receipt:
    call, owner = order.call, order.call.principal.name
    key = transcripts.header(call, SESSION_KEY)
    if body.previous_response_id is not None:
        if body.conversation is not None:
            raise ApiError(
                400, "invalid_conversation", "conversation and previous_response_id exclude each other",
                param="conversation",
            )  # fmt: skip
        view = await _stored(call, body.previous_response_id, "previous_response_id")
        return await _take_behind(order, view, transcript)
    if body.conversation is not None:
        name = Name(owner, "conversation", _name_of(body.conversation))
        return await transcripts.take_named(order, transcript, name, only_live=False)
    if key:
        return await transcripts.take_named(order, transcript, Name(owner, "key", key), only_live=True)
    return await transcripts.take(order, transcript, (body.user or "", body.safety_identifier or ""))


async def _take_behind(order: Order, view: TurnView, transcript: Transcript) -> Receipt:
    """Take a message behind a turn: in its session, or in a branch of it when that went on already."""
    call, turn = order.call, view.turn
    content = transcript.newest()

    async def look(looked: int) -> transcripts.Place:
        if looked == 0:
            return view.session_id, content, Thread(follows=turn.key if turn.state.is_end else None)
        if turn.end_seq is None:  # it never began
            return view.session_id, content, Thread()
        branch = transcripts.new_session_id()
        await call.profile.read(call.profile.db.fork_session, view.session_id, branch, at_seq=turn.end_seq)
        return branch, content, Thread()

    return await transcripts.in_place(order, look)


def _name_of(conversation: str | Conversation) -> str:
    text = conversation if isinstance(conversation, str) else conversation.id
    return transcripts.checked_name(text, "conversation", "invalid_conversation")


async def _stored(call: Call, response_id: str, param: str) -> TurnView:
    """The turn of a response that the caller may read; raises `ApiError` 404."""
    found = _ID.fullmatch(response_id)
    view = None
    if found is not None:
        with contextlib.suppress(UnknownSession):
            view = await call.profile.read(call.profile.service.intake.find, f"turn_{found[1]}")
    if view is None or "response" not in view.turn.options or view.turn.options.get("hidden"):
        raise _unknown(response_id, param)
    if not work.may_see(call, view.sender):
        raise _unknown(response_id, param)
    if view.turn.options["response"].get("unstored"):
        raise _unknown(response_id, param)
    return view


def _unknown(response_id: str, param: str) -> ApiError:
    return ApiError(404, "response_not_found", f"There is no response {response_id[:100]!r}", param=param)


# -- what it looks like -----------------------------------------------------------------


def _record(call: Call, body: ResponseBody) -> dict[str, Any]:
    """What of a request is kept to show its response again."""
    return {
        "model": body.model or call.profile.model_name,
        "previous": body.previous_response_id,
        "conversation": None if body.conversation is None else _name_of(body.conversation),
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "user": body.user,
        "background": bool(body.background),
        "hosted": body.tools is not None,
        "unstored": body.store is False,
    }


async def _response(call: Call, receipt: Receipt, record: dict[str, Any]) -> dict[str, Any]:
    """The response as it stands, with the output of the rows that its turn has by now."""
    view = await call.profile.read(call.profile.service.intake.find, receipt.turn_id)
    said = [] if view is None else await call.profile.read(Conversations(call.profile.db).said, view.turn)
    prose = receipt.reply if receipt.is_final and receipt.state is not TurnState.DONE else ""
    return _object(receipt, record, Output.of(receipt.turn_id, said, prose, hosted=bool(record.get("hosted"))))


def _id_of(receipt: Receipt) -> str:
    return f"resp_{receipt.turn_id.removeprefix('turn_')[:28]}"


def _object(receipt: Receipt, record: dict[str, Any], output: list[Item]) -> dict[str, Any]:
    cut = receipt.state is TurnState.DONE and not transcripts.is_clean(receipt)
    error = None
    if receipt.is_final and receipt.state is not TurnState.DONE:
        error = turns.failure(receipt).body()["error"]
        error["code"] = str(receipt.reason or FailureReason.UNKNOWN)
    conversation = record.get("conversation")
    return {
        "id": _id_of(receipt),
        "object": "response",
        "created_at": int(receipt.accepted_at),
        "status": "incomplete" if cut else _STATUS.get(receipt.state, "in_progress"),
        "background": bool(record.get("background")),
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": record.get("instructions"),
        "max_output_tokens": None,
        "model": record["model"],
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": record.get("previous"),
        "conversation": None if conversation is None else {"id": conversation},
        "reasoning": {"effort": None, "summary": None},
        "store": not record.get("unstored"),
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": transcripts.details_of(receipt, "input_tokens", "output_tokens") if receipt.is_final else None,
        "user": record.get("user"),
        "metadata": record.get("metadata") or {},
    }


class _Stream:
    """One turn as the events of a response to one client, from its beginning to its end."""

    def __init__(self, call: Call, receipt: Receipt, record: dict[str, Any]) -> None:
        self._call = call
        self._receipt = receipt
        self._record = record
        self._output = Output(receipt.turn_id, hosted=bool(record.get("hosted")))
        self._number = 0

    async def run(self) -> web.StreamResponse:
        """Send the stream; a client that goes away ends it and nothing else."""
        self._stream = await EventStream.opened(self._call.request, turns.headers_of(self._receipt))
        running = transcripts.as_running(self._receipt)
        for kind in ("response.created", "response.in_progress"):
            await self._tell({"type": kind, "response": _object(running, self._record, [])})
        await self._finish(await self._follow())
        return await self._stream.end()

    async def _follow(self) -> Receipt:
        """Tell the turn as it happens; how it ended."""
        async with contextlib.aclosing(follow_turn(self._call.profile, self._receipt.turn_id)) as events:
            async for event in events:
                if event is not None:
                    for told in self._told(event):
                        await self._tell(told)
                    continue
                await self._stream.comment("keepalive")
                receipt = await transcripts.looked_at(self._call, self._receipt)
                if receipt.is_final:
                    return receipt
        return await transcripts.looked_at(self._call, self._receipt, is_over=True)

    def _told(self, event: Event) -> list[Told]:
        match event.kind:
            case "delta":
                return self._output.say(event.data["text"])
            case "reasoning":
                return self._output.reason(event.data["text"])
            case "message":
                return self._output.row(event.data)
            case "void":
                self._output.void()
            case _:
                pass
        return []

    async def _finish(self, receipt: Receipt) -> None:
        if receipt.state is not TurnState.DONE and receipt.reply:
            for told in self._output.text(receipt.reply):
                await self._tell(told)
        response = _object(receipt, self._record, self._output.items)
        status = cast("str", response["status"])
        kind = status if status in ("completed", "incomplete") else "failed"
        await self._tell({"type": f"response.{kind}", "response": response})

    async def _tell(self, told: Told) -> None:
        await self._stream.send({**told, "sequence_number": self._number}, event=told["type"])
        self._number += 1


_HEADERS = (Parameter(SESSION_KEY, "Names the session to go on in.", where="header"),)

ROUTES = (
    Route(
        "POST", "/v1/responses", "createResponse", respond, Scope.RUN,
        "Respond to a message.", ResponseBody, parameters=starts_work(*_HEADERS), streams=True,
    ),
    Route("GET", "/v1/responses/{response_id}", "getResponse", read, Scope.READ, "Read a response."),
    Route("DELETE", "/v1/responses/{response_id}", "deleteResponse", remove, Scope.RUN, "Withdraw a response."),
)  # fmt: skip
