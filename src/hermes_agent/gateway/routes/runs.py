"""`/v1/runs`: work that is begun with one request and looked at with others, for as long as its session is kept."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import Any, cast

from aiohttp import web
from msgspec import Struct

from hermes_agent.gateway import replies, transcripts, turns, work
from hermes_agent.gateway.call import Call
from hermes_agent.gateway.keys import Scope
from hermes_agent.gateway.replies import ApiError
from hermes_agent.gateway.routes import approvals
from hermes_agent.gateway.routes.chat import Author
from hermes_agent.gateway.sse import EventStream, last_seen
from hermes_agent.gateway.story import Frame
from hermes_agent.gateway.table import Parameter, Route, starts_work
from hermes_agent.store.conversations import Thread
from hermes_agent.store.messages import Row
from hermes_agent.store.session_db import encode_row
from hermes_agent.store.turns import TurnState, new_turn_id
from hermes_agent.transcript import rows

_EVENTS = {
    "queued": "run.queued",
    "started": "run.started",
    "retrying": "run.retrying",
    "resumed": "run.resumed",
    "steered": "run.steered",
    "delta": "message.delta",
    "void": "message.void",
    "interim": "message.interim",
    "thinking": "reasoning.delta",
    "reasoning": "reasoning.available",
    "error": "error",
}
"""What the kinds of `story.Frame` are called here; others are called as they are."""


class NewRun(Struct, frozen=True):
    """Work to be done. `input` is a text, a list of content parts, or a list of messages whose last one is new."""

    input: str | list[Any] | None = None
    session_id: str | None = None
    """The session to work in, made if it is missing; by default a new one with the run's own id."""
    instructions: str | None = None
    previous_response_id: str | None = None
    """A response or run of the caller's whose session goes on."""
    conversation_history: list[Any] | None = None
    """Messages with which a new session begins."""
    author: Author | None = None
    model: str | None = None
    provider: str | None = None
    deadline_s: float | None = None
    """Seconds after which the work is not worth doing any more."""
    timeout_s: float | None = None
    """The same."""


class Steer(Struct, frozen=True):
    """A word to a run; the fields are names of the same."""

    input: str | None = None
    message: str | None = None
    text: str | None = None


class RunApproval(Struct, frozen=True):
    """A decision about what a run asks."""

    choice: str = ""
    request_id: str | None = None
    request_hash: str | None = None
    all: bool = False
    resolve_all: bool = False


async def start(call: Call) -> web.StreamResponse:
    """Take the work; it is durable when this answers, and done whether anybody looks or not."""
    body = await call.body(NewRun)
    content, history = _input(body)
    turn = new_turn_id()
    session_id = await _session(call, body) or work.run_id(turn)
    author = body.author
    options = {
        "system": body.instructions,
        "model": body.model,
        "provider": body.provider,
        "author": {"id": author.id, "name": author.name, "is_bot": author.is_bot} if author else None,
        "stream": True,
    }
    receipt = await turns.submit(
        call, session_id, content, "runs", options=options, create={"source": "api_server"},
        body=await call.fields(), conflict=409, turn_id=turn, thread=Thread(history=history) if history else None,
        deadline=turns.deadline_of(body.deadline_s if body.deadline_s is not None else body.timeout_s),
    )  # fmt: skip
    new = "queued" if receipt.state is TurnState.ACCEPTED else "started"
    fields = {
        "object": "hermes.run",
        "run_id": work.run_id(receipt.turn_id),
        "status": new if receipt.is_new else work.status_of(receipt),
        "replayed": not receipt.is_new,
        "session_id": receipt.session_id,
        "delivery_id": receipt.turn_id,
    }
    headers = {**turns.headers_of(receipt), "Location": f"{call.request.path}/{fields['run_id']}"}
    return replies.json_reply(fields, 202, headers)


async def get(call: Call) -> web.StreamResponse:
    """Tell how a run stands."""
    receipt = await work.find_run(call)
    return replies.json_reply(await work.run_fields(call, receipt), 200, turns.headers_of(receipt))


async def events(call: Call) -> web.StreamResponse:
    """Tell what happens in a run, from its beginning or behind the event that the client saw last, until its end."""
    receipt = await work.find_run(call)
    after = last_seen(call.request)
    stream = await EventStream.opened(call.request, turns.headers_of(receipt))
    await stream.comment("open")
    seen = after or 0
    async with aclosing(work.told(call, receipt, after)) as frames:
        async for frame in frames:
            if frame is None:
                await stream.comment("keepalive")
                continue
            seen = seen if frame.number is None else frame.number
            name, fields = await _event(call, receipt.turn_id, frame)
            data = {
                "event": name,
                "run_id": work.run_id(receipt.turn_id),
                "session_id": receipt.session_id,
                "timestamp": frame.at or time.time(),
                "seq": seen,
                **fields,
            }
            await stream.send(data, number=frame.number)
    await stream.comment("stream closed")
    return await stream.end()


async def stop(call: Call) -> web.StreamResponse:
    """Withdraw a run that waits, or ask it to stop; a run that has ended is told as it is."""
    receipt = await work.find_run(call)
    after = await call.profile.read(call.profile.service.cancel, receipt.turn_id)
    return replies.json_reply(await work.run_fields(call, after or receipt))


async def steer(call: Call) -> web.StreamResponse:
    """Give a run a word that reaches the model with its next call."""
    receipt = await work.find_run(call)
    body = await call.body(Steer)
    words = next((text for text in (body.input, body.message, body.text) if text is not None and text.strip()), "")
    if not words:
        raise ApiError(400, "invalid_steer_input", "input must be a text", param="input")
    turns.content_of(words, param="input", code="invalid_steer_input")
    status = work.status_of(receipt)
    if status != "running" or not call.profile.service.steer(receipt.turn_id, words):
        raise ApiError(409, "run_not_accepting_steer", f"The run is {status}; only one that runs can be steered.")
    fields = {"object": "hermes.run.steer", "run_id": work.run_id(receipt.turn_id), "accepted": True}
    return replies.json_reply(fields)


async def approve(call: Call) -> web.StreamResponse:
    """Decide what a run asks: the named question, or the one that is open."""
    receipt = await work.find_run(call)
    body = await call.body(RunApproval)
    choice = approvals.choice_of(body.choice)
    waiting = await work.open_questions(call, receipt)
    everything = body.all or body.resolve_all
    if body.request_id is not None:
        record = await approvals.find(call, body.request_id)
        if (await approvals.turn_of(call, record)).turn.id != receipt.turn_id:
            raise approvals.not_found(body.request_id)
        waiting = [record]
    elif receipt.is_final:
        raise ApiError(409, "approval_not_active", "The run has ended.")
    elif not waiting:
        raise ApiError(409, "approval_not_pending", "The run asks nothing at the moment.")
    elif len(waiting) > 1 and not everything:
        raise ApiError(400, "invalid_approval_request", "The run asks several things; name one with request_id.")
    fields: dict[str, Any] = {
        "object": "hermes.run.approval_response",
        "run_id": work.run_id(receipt.turn_id),
        "choice": choice,
        "resolved": 0,
    }
    for record in waiting:
        decided = await approvals.decide(call, record, choice, body.request_hash)
        if isinstance(decided, web.Response):
            return decided
        fields["resolved"] += 1
        fields["request_id"] = record.id
    return replies.json_reply(fields)


# -- inside -----------------------------------------------------------------------------


def _input(body: NewRun) -> tuple[turns.Content, list[Row]]:
    """The new message, and the rows that stand before it where a session is made."""
    items = list(body.conversation_history or ())
    last: Any = body.input
    parts = cast("list[Any]", last) if isinstance(last, list) else []
    if parts and all(isinstance(part, dict) and "role" in part for part in parts):
        *earlier, newest = cast("list[dict[str, Any]]", parts)
        if newest["role"] != "user":
            raise ApiError(400, "invalid_input", "the last message of input is the user's", param="input")
        items += earlier
        last = newest.get("content")
    content = turns.content_of(last, param="input", code="missing_input")
    return content, [_row(item) for item in items]


def _row(item: Any) -> Row:
    message = cast("dict[str, Any]", item) if isinstance(item, dict) else {}
    role = message.get("role")
    if role not in ("user", "assistant"):
        raise ApiError(400, "invalid_history", "a message has the role user or assistant", param="conversation_history")
    content = turns.content_of(message.get("content"), param="conversation_history", code="invalid_history")
    now = time.time()
    if role == "user":
        return encode_row(rows.user_row(content, timestamp=now))
    return encode_row(rows.assistant_row(content, timestamp=now))


async def _session(call: Call, body: NewRun) -> str:
    """The session that the request names, "" for none."""
    if body.previous_response_id is not None:
        receipt = await work.find(call, work.turn_id(body.previous_response_id))
        if receipt is None or body.session_id not in (None, receipt.session_id):
            raise ApiError(
                404, "response_not_found", f"There is no response {body.previous_response_id!r} in this session.",
                param="previous_response_id",
            )  # fmt: skip
        return receipt.session_id
    if body.session_id is None:
        return ""
    return transcripts.checked_name(body.session_id, "session_id", "invalid_session_id")


async def _event(call: Call, turn_id: str, frame: Frame) -> tuple[str, dict[str, Any]]:
    """A frame in the words of this stream."""
    if frame.kind == "end":
        receipt = await call.profile.read(call.profile.service.get, turn_id)
        if receipt is None:
            return "run.failed", {"error": "the session was deleted"}
        fields = {**work.outcome(receipt), "runtime": work.runtime(call, receipt), "attempts": receipt.attempts}
        done = receipt.state is TurnState.DONE
        return f"run.{work.STATUS[receipt.state]}", {**fields, "completed": done, "partial": False}
    if frame.kind == "tool.failed" and "unknown" not in frame.fields:
        return "tool.completed", frame.fields
    return _EVENTS.get(frame.kind, frame.kind), frame.fields


_AFTER = (
    Parameter("Last-Event-ID", "Go on behind this event; also `after` in the query.", where="header"),
    Parameter("after", "The same.", kind="integer"),
)

ROUTES = (
    Route(
        "POST", "/v1/runs", "startRun", start, Scope.RUN, "Begin work that goes on by itself.", NewRun, 202,
        starts_work(),
    ),
    Route("GET", "/v1/runs/{run_id}", "getRun", get, Scope.DM, "Tell how a run stands."),
    Route(
        "GET", "/v1/runs/{run_id}/events", "runEvents", events, Scope.DM, "Tell what happens in a run.",
        parameters=_AFTER, streams=True, media="text/event-stream",
    ),
    Route("POST", "/v1/runs/{run_id}/stop", "stopRun", stop, Scope.DM, "Stop a run."),
    Route("POST", "/v1/runs/{run_id}/steer", "steerRun", steer, Scope.DM, "Give a running run a word.", Steer),
    Route(
        "POST", "/v1/runs/{run_id}/approval", "approveRun", approve, Scope.APPROVE, "Decide what a run asks.",
        RunApproval,
    ),
)  # fmt: skip
