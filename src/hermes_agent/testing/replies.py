"""What a fake model server can answer, and how an answer looks on the wire."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hermes_agent.providers.base import ToolCall, Usage
from hermes_agent.providers.scripted import split

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """A good answer; make one with `text` or `calls`."""

    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = "stop"
    chunks: int = 1
    reasoning: str = ""
    usage: Usage = field(default_factory=lambda: Usage(100, 10))


@dataclass(frozen=True, slots=True)
class Failure:
    """An HTTP error; make one with `error`."""

    status: int
    body: Any
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    times: int = 1


@dataclass(frozen=True, slots=True)
class RawStream:
    """Bytes sent as an event stream as they are; make one with `raw_sse`."""

    frames: tuple[bytes, ...]
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Delayed:
    """An item that comes later; make one with `delay`."""

    seconds: float
    item: Item


class Hold:
    """An answer that stops in the middle until `release` is called; make one with `hold`."""

    def __init__(self, begin: str, then: Item) -> None:
        self.begin = begin
        self.then = then
        self.reached = threading.Event()
        """Set once the beginning has been sent."""
        self._released = threading.Event()

    def release(self) -> None:
        """Let the answer go on to its end."""
        self._released.set()

    def wait(self) -> None:
        self.reached.set()
        self._released.wait()


Item = Answer | Failure | RawStream | Delayed | Hold
Reply = Item | Callable[[Json], Item]


def text(content: str, *, chunks: int = 1, finish_reason: str = "stop", reasoning: str = "") -> Answer:
    """Answer with a text; streamed, it comes in `chunks` pieces."""
    return Answer(content=content, chunks=chunks, finish_reason=finish_reason, reasoning=reasoning)


def call(name: str, arguments: Mapping[str, Any] | str, *, id: str = "") -> ToolCall:  # noqa: A002 - the wire's name
    """One tool call for `calls`; arguments given as text are sent as they are."""
    encoded = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id, name, encoded)


def calls(*wanted: ToolCall, content: str = "", finish_reason: str = "tool_calls") -> Answer:
    """Answer with tool calls; a call without an id gets `call_REQUEST_POSITION`."""
    return Answer(content=content, tool_calls=wanted, finish_reason=finish_reason)


def error(
    status: int,
    message: str = "scripted failure",
    *,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
    times: int = 1,
    body: Any = None,
) -> Failure:
    """Answer `times` requests with an HTTP error; `body` replaces the usual error object."""
    usual = {"error": {"message": message, "type": code or "error", "param": None, "code": code}}
    return Failure(status, usual if body is None else body, headers or {}, times)


def raw_sse(frames: Sequence[str | bytes], *, cut: bool = False) -> RawStream:
    """Stream exactly these bytes; with `cut` the connection drops after them, in the middle of the body."""
    return RawStream(tuple(frame.encode() if isinstance(frame, str) else frame for frame in frames), cut)


def delay(seconds: float, item: Item) -> Delayed:
    """Answer with `item` after `seconds`."""
    return Delayed(seconds, item)


def hold(begin: str = "", then: Item | None = None) -> Hold:
    """Begin an answer with the text `begin`, keep the connection open until released, then send `then`."""
    return Hold(begin, then or Answer(content="released"))


def _call_id(wanted: ToolCall, number: int, position: int) -> str:
    return wanted.id or f"call_{number}_{position}"


def completion(item: Answer, number: int, body: Json) -> Json:
    """The whole answer to request `number`."""
    message: Json = {"role": "assistant", "content": item.content or None}
    if item.reasoning:
        message["reasoning_content"] = item.reasoning
    if item.tool_calls:
        message["tool_calls"] = [
            {
                "id": _call_id(wanted, number, position),
                "type": "function",
                "function": {"name": wanted.name, "arguments": wanted.arguments},
            }
            for position, wanted in enumerate(item.tool_calls)
        ]
    choice = {"index": 0, "message": message, "finish_reason": item.finish_reason, "logprobs": None}
    return {**_envelope(number, body, "chat.completion"), "choices": [choice], "usage": usage_json(item.usage)}


def deltas(item: Answer, number: int) -> list[Json]:
    """The answer to request `number` in streamed pieces."""
    found: list[Json] = [{"role": "assistant", "content": ""}]
    if item.reasoning:
        found.append({"reasoning_content": item.reasoning})
    found += [{"content": piece} for piece in split(item.content, item.chunks)]
    for position, wanted in enumerate(item.tool_calls):
        head = {"name": wanted.name, "arguments": ""}
        call_id = _call_id(wanted, number, position)
        found.append({"tool_calls": [{"index": position, "id": call_id, "type": "function", "function": head}]})
        for piece in split(wanted.arguments, max(2, item.chunks)):
            found.append({"tool_calls": [{"index": position, "function": {"arguments": piece}}]})
    return found


def _envelope(number: int, body: Json, kind: str) -> Json:
    return {"id": f"chatcmpl-{number}", "object": kind, "created": 0, "model": body.get("model") or "fake"}


def chunk(number: int, body: Json, delta: Json, *, finish: str | None = None) -> Json:
    """One streamed chunk."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
    return {**_envelope(number, body, "chat.completion.chunk"), "choices": [choice]}


def usage_json(usage: Usage) -> Json:
    """Token counts in the wire's names."""
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cache_read_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
