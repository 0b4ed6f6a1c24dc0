"""Read a model's answer, whole or in streamed chunks, from any OpenAI-compatible server or client.

Nothing here trusts a shape: values are read from dicts and objects alike, absent and
ill-typed members count as absent, and whether calls are complete decides, not the label.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from hermes_agent.errors import FailureReason, ProviderError
from hermes_agent.providers import classify
from hermes_agent.providers.base import ReasoningDelta, Reply, TextDelta, ToolCall, Usage

_FINISH = {
    "stop": "stop",
    "end": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "eos": "stop",
    "length": "length",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "model_length": "length",
    "tool_calls": "tool_calls",
    "tool_use": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
    "safety": "content_filter",
    "error": "error",
}
_REASONING_KEYS = ("reasoning_content", "reasoning")


def member(value: Any, name: str) -> Any:
    """Return a member of a dict or an attribute of an object; None when it is absent."""
    if isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value).get(name)
    return getattr(value, name, None)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _items(value: Any) -> list[Any]:
    return cast("list[Any]", list(value)) if isinstance(value, list | tuple) else []  # pyright: ignore[reportUnknownArgumentType]


def clean(text: str) -> str:
    """Replace half surrogate pairs, which no UTF-8 can carry; joined halves become their character."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class _Text:
    """Joins pieces of text; half an emoji at the end of a piece waits for its other half."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._held = ""

    def add(self, piece: str) -> str:
        """Take a piece; return what may be shown now."""
        if self._held:
            piece, self._held = self._held + piece, ""
        if piece and "\ud800" <= piece[-1] <= "\udbff":
            piece, self._held = piece[:-1], piece[-1]
        piece = clean(piece)
        if piece:
            self._pieces.append(piece)
        return piece

    def __str__(self) -> str:
        return "".join(self._pieces) + clean(self._held)


class _Call:
    """A tool call while its pieces come in."""

    def __init__(self, call_id: str) -> None:
        self.id = call_id
        self.name = ""
        self.pieces: list[str] = []

    def add_name(self, piece: str) -> None:
        """Join a piece of the name; a server that repeats the whole name adds nothing."""
        if piece == self.name:
            return
        self.name = piece if piece.startswith(self.name) else self.name + piece

    @property
    def arguments(self) -> str:
        return clean("".join(self.pieces))

    @property
    def whole(self) -> bool:
        """Whether the arguments so far are a JSON object."""
        try:
            return isinstance(json.loads("".join(self.pieces)), dict)
        except ValueError:
            return False


class StreamAssembler:
    """Makes one reply out of streamed chunks.

    `feed` every chunk, note in `done` that the server said `[DONE]`, then ask for the `reply`.
    Raises `ProviderError` with the text so far for an error inside the stream and for an
    answer that was cut, so a cut answer never looks like a whole one.
    """

    def __init__(self, *, where: str = "") -> None:
        self.done = False
        self._where = where
        self._content = _Text()
        self._reasoning = _Text()
        self._refusal: list[str] = []
        self._calls: list[_Call] = []
        self._by_index: dict[int, _Call] = {}
        self._finish = ""
        self._model = ""
        self._usage: Usage | None = None
        self._chunks = 0

    @property
    def text(self) -> str:
        """The text that has come so far."""
        return str(self._content)

    @property
    def finished(self) -> bool:
        """Whether the server said why the answer ends and every call is complete."""
        return bool(self._finish) and all(call.whole or not call.pieces for call in self._calls)

    def feed(self, chunk: Any) -> list[TextDelta | ReasoningDelta]:
        """Take one chunk; return what it adds for people to see."""
        if chunk is None:
            return []
        self._refuse_fault(chunk)
        self._chunks += 1
        self._model = _text(member(chunk, "model")) or self._model
        self._usage = read_usage(member(chunk, "usage")) or self._usage
        shown: list[TextDelta | ReasoningDelta] = []
        for choice in _items(member(chunk, "choices")):
            if member(choice, "index") in (0, None):
                shown += self._choice(choice)
        return shown

    def _refuse_fault(self, chunk: Any) -> None:
        if isinstance(chunk, Mapping):
            facts = cast("Mapping[str, Any]", chunk)
        else:
            error: Any = member(chunk, "error")
            facts = dict[str, Any](error=error if isinstance(error, str | dict) else None)
        if classify.is_fault(facts):
            raise self._failed(
                classify.classify_http(200, {}, facts, where=self._where, default=FailureReason.SERVER_ERROR)
            )

    def _failed(self, error: ProviderError) -> ProviderError:
        error.partial = self.text
        return error

    def _choice(self, choice: Any) -> Iterator[TextDelta | ReasoningDelta]:
        finish = member(choice, "finish_reason")
        if isinstance(finish, str) and finish:
            self._finish = _FINISH.get(finish.lower(), "stop")
        # A server that does not stream answers with the whole message in one piece.
        delta = member(choice, "delta") or member(choice, "message")
        if delta is None:
            return
        text, thought = read_content(member(delta, "content"))
        thought = read_reasoning(delta) or thought
        if thought and (piece := self._reasoning.add(thought)):
            yield ReasoningDelta(piece)
        if text and (piece := self._content.add(text)):
            yield TextDelta(piece)
        self._refusal.append(_text(member(delta, "refusal")))
        for call in _items(member(delta, "tool_calls")):
            self._call(call)
        old = member(delta, "function_call")
        if old is not None and (_text(member(old, "name")) or _text(member(old, "arguments"))):
            self._call({"index": 0, "function": old})

    def _call(self, delta: Any) -> None:
        function = member(delta, "function")
        name = _text(member(function, "name"))
        arguments = _arguments(member(function, "arguments"))
        slot = self._slot(member(delta, "index"), _text(member(delta, "id")), name, arguments)
        if name:
            slot.add_name(name)
        if arguments:
            slot.pieces.append(arguments)

    def _slot(self, index: Any, call_id: str, name: str, arguments: str) -> _Call:
        """Find the call that a delta goes on with, or begin a new one."""
        known = None
        if isinstance(index, int):
            known = self._by_index.get(index)
        elif call_id:
            known = next((call for call in self._calls if call.id == call_id), None)
        elif self._calls:
            known = self._calls[-1]
        if known is not None and call_id and known.id and known.id != call_id:
            # An index used again. Some gateways send a fresh id with every piece of one call:
            # a piece that only has arguments goes on with the call.
            known = known if not name and arguments else None
        elif known is not None and not call_id and name and arguments and known.name == name and known.whole:
            known = None  # the next call of a server that sends no ids
        if known is None:
            known = _Call(call_id)
            self._calls.append(known)
        known.id = known.id or call_id
        if isinstance(index, int):
            self._by_index[index] = known
        return known

    def reply(self, *, broken: ProviderError | None = None) -> Reply:
        """Return the whole answer; `broken` is what the transport said if it ended with an error."""
        if broken is not None and not self.finished:
            raise self._failed(broken)
        if broken is None and not self._chunks:
            text = "the provider sent an empty stream"
            raise self._failed(self._error(FailureReason.EMPTY_RESPONSE, text))
        calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in self._calls)
        if not self._finish and not self._ended_whole():
            text = "the answer was cut: the stream ended without a finish reason"
            raise self._failed(self._error(FailureReason.CONNECTION, text))
        content = self.text or "".join(self._refusal)
        return finish_reply(
            Reply(
                content=content,
                tool_calls=calls,
                finish_reason=self._finish,
                reasoning=str(self._reasoning),
                model=self._model,
                usage=self._usage,
            ),
            self._where,
        )

    def _ended_whole(self) -> bool:
        return self.done and all(call.whole for call in self._calls)

    def _error(self, reason: FailureReason, text: str) -> ProviderError:
        return ProviderError(f"{self._where}: {text}" if self._where else text, reason=reason)


def read_reply(response: Any, *, where: str = "") -> Reply:
    """Read a whole answer that was not streamed."""
    if isinstance(response, Mapping) and classify.is_fault(cast("Mapping[str, Any]", response)):
        raise classify.classify_http(200, {}, response, where=where, default=FailureReason.SERVER_ERROR)
    choice = next(iter(_items(member(response, "choices"))), None)
    message = member(choice, "message")
    if message is None:
        text = "the answer has no message"
        raise ProviderError(f"{where}: {text}" if where else text, reason=FailureReason.INVALID_RESPONSE)
    text, thought = read_content(member(message, "content"))
    calls = [_whole_call(call) for call in _items(member(message, "tool_calls"))]
    old = member(message, "function_call")
    if not calls and _text(member(old, "name")):
        calls = [_whole_call({"function": old})]
    finish = _text(member(choice, "finish_reason"))
    return finish_reply(
        Reply(
            content=clean(text or _text(member(message, "refusal"))),
            tool_calls=tuple(calls),
            finish_reason=_FINISH.get(finish.lower(), "stop") if finish else "",
            reasoning=clean(read_reasoning(message) or thought),
            model=_text(member(response, "model")),
            usage=read_usage(member(response, "usage")),
        ),
        where,
    )


def finish_reply(reply: Reply, where: str) -> Reply:
    """Return `reply` with its label made true; raise for an answer that holds nothing."""
    label = reply.finish_reason
    prefix = f"{where}: " if where else ""
    if label == "error":
        text = f"{prefix}the provider ended the answer with an error"
        raise ProviderError(text, reason=FailureReason.SERVER_ERROR, partial=reply.content)
    if not reply.tool_calls and not reply.content.strip():
        if label == "length":
            text = f"{prefix}the output limit was reached before the answer began"
            raise ProviderError(text, reason=FailureReason.TRUNCATED)
        if label == "content_filter":
            text = f"{prefix}the provider's content filter blocked the answer"
            raise ProviderError(text, reason=FailureReason.CONTENT_BLOCKED)
        raise ProviderError(f"{prefix}the model returned nothing", reason=FailureReason.EMPTY_RESPONSE)
    if label not in ("length", "content_filter"):
        label = "tool_calls" if reply.tool_calls else "stop"
    return Reply(reply.content, reply.tool_calls, label, reply.reasoning, reply.model, reply.usage)


def _whole_call(call: Any) -> ToolCall:
    function = member(call, "function")
    arguments = _arguments(member(function, "arguments"))
    return ToolCall(_text(member(call, "id")), _text(member(function, "name")), clean(arguments))


def _arguments(value: Any) -> str:
    """The JSON text of a call's arguments; some servers send the object itself."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else ""


def read_content(content: Any) -> tuple[str, str]:
    """Return the text and the reasoning of a message's content: text, null or a list of parts."""
    if isinstance(content, str):
        return content, ""
    text: list[str] = []
    thought: list[str] = []
    for part in _items(content):
        if isinstance(part, str):
            text.append(part)
            continue
        kind = _text(member(part, "type"))
        if kind in ("thinking", "reasoning"):
            inner = member(part, "thinking") or member(part, "text")
            thought.append(inner if isinstance(inner, str) else read_content(inner)[0])
        else:
            text.append(_text(member(part, "text")) or _text(member(part, "refusal")))
    return "".join(text), "".join(thought)


def read_reasoning(message: Any) -> str:
    """Return the reasoning text of a message or delta, under whichever name it comes."""
    for key in _REASONING_KEYS:
        if text := _text(member(message, key)):
            return text
    details = _items(member(message, "reasoning_details"))
    return "".join(_text(member(part, "text")) or _text(member(part, "summary")) for part in details)


def read_usage(usage: Any) -> Usage | None:
    """Return the token counts, or None when there are none."""
    if usage is None:
        return None
    into = member(usage, "prompt_tokens_details")
    out = member(usage, "completion_tokens_details")
    counts = Usage(
        input_tokens=_count(usage, "prompt_tokens", "input_tokens"),
        output_tokens=_count(usage, "completion_tokens", "output_tokens"),
        cache_read_tokens=_count(into, "cached_tokens")
        or _count(usage, "prompt_cache_hit_tokens", "cache_read_input_tokens"),
        cache_write_tokens=_count(into, "cache_write_tokens") or _count(usage, "cache_creation_input_tokens"),
        reasoning_tokens=_count(out, "reasoning_tokens"),
    )
    return counts if counts != Usage() else None


def _count(usage: Any, *names: str) -> int:
    for name in names:
        value = member(usage, name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0
