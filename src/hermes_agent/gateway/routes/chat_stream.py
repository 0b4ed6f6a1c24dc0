"""`/api/sessions/{session_id}`, as it happens: a message and its answer, the session's own events, and a stop."""

from __future__ import annotations

import itertools
import time
from contextlib import aclosing
from typing import Any

from aiohttp import web

from hermes_agent.delivery.events import Event
from hermes_agent.delivery.service import Receipt
from hermes_agent.gateway import replies, turns, work
from hermes_agent.gateway.call import Call
from hermes_agent.gateway.following import follow_session
from hermes_agent.gateway.keys import Scope
from hermes_agent.gateway.routes import chat
from hermes_agent.gateway.sse import EventStream, last_seen
from hermes_agent.gateway.story import Frame
from hermes_agent.gateway.table import Parameter, Route, starts_work
from hermes_agent.store.turns import TurnState

Fields = dict[str, Any]
Said = tuple[str, Fields]
"""Name and data of an event."""


async def stream(call: Call) -> web.StreamResponse:
    """Take a message and tell how it is answered, until it is; who goes away changes nothing."""
    body, receipt = await chat.take(call, "chat", streams=True)
    teller = _Teller(call, receipt, body.message if body.message is not None else body.input)
    out = await EventStream.opened(call.request, turns.headers_of(receipt))
    async with aclosing(work.told(call, receipt)) as frames:
        async for frame in frames:
            if frame is None:
                await out.comment("keepalive")
                continue
            *first, last = await teller.tell(frame)
            for name, data in first:
                await out.send(data, event=name)
            await out.send(last[1], event=last[0], number=frame.number)
    name, data = teller.say("done", {})
    await out.send(data, event=name)
    return await out.end()


class _Teller:
    """Says the frames of one turn in the words of this stream."""

    def __init__(self, call: Call, receipt: Receipt, content: Any) -> None:
        self._call = call
        self._receipt = receipt
        self._content = content
        self._count = itertools.count(1)
        self._message_id = "msg_" + receipt.turn_id.removeprefix("turn_")
        self._texts: list[str] = []
        """What the model said in messages that are stored."""
        self._text = ""
        self._began = False

    def say(self, name: str, fields: Fields) -> Said:
        """An event with what all of them carry."""
        return name, {
            "session_id": self._receipt.session_id,
            "run_id": work.run_id(self._receipt.turn_id),
            "seq": next(self._count),
            "ts": time.time(),
            **fields,
        }

    async def tell(self, frame: Frame) -> list[Said]:
        """At least one event for a frame."""
        kind, fields = frame.kind, frame.fields
        message: Fields = {"message_id": self._message_id}
        match kind:
            case "queued":
                return [self.say("run.queued", fields)]
            case "started":
                return self._begin()
            case "end":
                return await self._end()
            case "error":
                return [self.say("error", fields)]
            case "delta":
                return [self.say("assistant.delta", {**message, **fields})]
            case "void":
                return [self.say("assistant.void", {**message, **fields})]
            case "thinking":
                return [self.say("tool.progress", {**message, "tool_name": "_thinking", **fields})]
            case "interim":
                self._texts.append(fields["text"])
                return [self.say("assistant.commentary", {**message, **fields})]
            case "tool.started" | "tool.completed" | "tool.failed":
                more = {name: value for name, value in fields.items() if name != "tool"}
                return [self.say(kind, {**message, "tool_name": fields["tool"], **more})]
            case "reasoning":
                return [self.say("reasoning.available", {**message, **fields})]
            case "approval.request" | "approval.responded":
                return [self.say(kind, {**message, **fields})]
            case _:
                return [self.say(f"run.{kind}", fields)]

    def _begin(self) -> list[Said]:
        self._began = True
        runtime = work.runtime(self._call, self._receipt)
        user = {"role": "user", "content": self._content}
        return [
            self.say("run.started", {"user_message": user, "runtime": runtime, "delivery_id": self._receipt.turn_id}),
            self.say("message.started", {"message": {"id": self._message_id, "role": "assistant"}}),
        ]

    async def _end(self) -> list[Said]:
        """The whole answer, and how the turn ended."""
        found = await work.find(self._call, self._receipt.turn_id)
        receipt = self._receipt if found is None else found
        facts: Fields = {
            "message_id": self._message_id,
            "completed": receipt.state is TurnState.DONE,
            "partial": False,
            "interrupted": receipt.state is TurnState.CANCELLED,
            "runtime": work.runtime(self._call, receipt),
        }
        texts = [*self._texts, receipt.reply]
        ended = {
            **facts,
            "messages": [{"role": "assistant", "content": text} for text in texts if text],
            "attempts": receipt.attempts,
            **work.outcome(receipt),
        }
        return [
            *([] if self._began else self._begin()),
            self.say("assistant.completed", {**facts, "content": receipt.reply}),
            self.say(f"run.{work.STATUS[receipt.state]}", ended),
        ]


async def events(call: Call) -> web.StreamResponse:
    """Tell every event of a session behind the one that the client saw last; by default what happens from now on."""
    session_id = call.path("session_id")
    after = last_seen(call.request)
    await call.profile.read(call.profile.service.intake.place, session_id, 0)  # it is there
    out = await EventStream.opened(call.request, {"X-Hermes-Session-Id": turns.header_text(session_id)})
    await out.comment("open")
    async with aclosing(follow_session(call.profile, session_id, after)) as found:
        async for event in found:
            if event is None:
                await out.comment("keepalive")
            elif event.number is not None:
                await out.send(_event(session_id, event), event=event.kind, number=event.number)
    return await out.end()


def _event(session_id: str, event: Event) -> Fields:
    return {
        "seq": event.number,
        "kind": event.kind,
        "session_id": session_id,
        "run_id": work.run_id(event.turn_id) if event.turn_id else None,
        "ts": event.at,
        "data": event.data,
    }


async def stop(call: Call) -> web.StreamResponse:
    """Stop what the caller has running in a session; messages that wait stay."""
    profile, session_id = call.profile, call.path("session_id")
    await profile.read(profile.service.intake.place, session_id, 0)  # it is there
    stopped: list[Fields] = []
    for turn in await profile.read(profile.service.intake.waiting, session_id):
        if turn.state is TurnState.ACCEPTED or await work.find(call, turn.id) is None:
            continue
        receipt = await profile.read(profile.service.cancel, turn.id)
        if receipt is not None:
            run_id, status = work.run_id(turn.id), work.status_of(receipt)
            stopped.append({"run_id": run_id, "delivery_id": turn.id, "status": status})
    return replies.json_reply({"object": "hermes.session.stop", "session_id": session_id, "stopped": stopped})


ROUTES = (
    Route(
        "POST", "/api/sessions/{session_id}/chat/stream", "sessionChatStream", stream, Scope.DM,
        "Send a message to a session and hear the answer as it comes.", chat.ChatBody, parameters=starts_work(),
        streams=True, media="text/event-stream",
    ),
    Route("POST", "/api/sessions/{session_id}/stop", "stopSession", stop, Scope.DM, "Stop what runs in a session."),
    Route(
        "GET", "/api/sessions/{session_id}/events", "sessionEvents", events, Scope.READ,
        "Tell what happens in a session.", streams=True, media="text/event-stream",
        parameters=(
            Parameter("Last-Event-ID", "Go on behind this event; also `after` in the query.", where="header"),
            Parameter("after", "The same; 0 tells all from the beginning.", kind="integer"),
        ),
    ),
)  # fmt: skip
