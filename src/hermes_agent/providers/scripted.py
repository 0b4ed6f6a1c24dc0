"""An offline model that plays a script: for the demo, for tests, and for users who test their own tools.

A script is one JSON file:

    {"model": "scripted",
     "replies": [
       {"tool_calls": [{"name": "terminal", "arguments": {"command": "date"}}]},
       {"text": "The command said: {{last_result}}", "stream": 3, "delay": 0.5},
       {"error": {"reason": "rate_limit", "message": "slow down", "times": 1}, "text": "Here I am."}
     ]}

Fields of a reply, all optional, but it needs `text`, `tool_calls` or `error`:

    text           the answer; {{last_result}} and {{last_user}} become the last tool result
                   and the last user text of the request, cut to 2,000 characters
    tool_calls     list of {"name", "arguments" (an object, or text sent as it is), "id"}
    finish_reason  default: "tool_calls" with calls, else "stop"
    delay          seconds to wait before the answer
    stream         number of pieces in which the text is streamed (default 1)
    usage          {"input_tokens": 10, "output_tokens": 5, ...}
    error          {"reason", "message", "times", "status", "retry_after"}: fails that many times
                   (counted in this process) before the reply is given; without `times`, always
    match          regular expression: the reply is passed over unless it is found in the last
                   user or tool text

Which reply is next follows from the request alone, so a conversation that was killed and resumed
goes on at the right place: the replies are laid along the request's assistant messages, each
taking the next reply whose `match` fits. An assistant message that has no calls and is one
bracketed note ("[...]") was not written by the model and is not counted; a script may not
hold such a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from hermes_agent.cancellation import Cancellation
from hermes_agent.errors import FailureReason, ProviderError, SettingsError, TurnInterrupted
from hermes_agent.providers.base import Message, OnEvent, Reply, Request, TextDelta, ToolCall, Usage

MAX_INSERTED = 2000
_USAGE_FIELDS = tuple(field.name for field in fields(Usage))


@dataclass(frozen=True, slots=True)
class ScriptedError:
    """A failure that comes instead of, or before, a scripted reply."""

    reason: FailureReason
    message: str
    times: int | None = None
    status: int = 0
    retry_after: float | None = None


@dataclass(frozen=True, slots=True)
class ScriptedReply:
    """One reply of a script."""

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = ""
    delay: float = 0.0
    stream: int = 1
    usage: Usage | None = None
    error: ScriptedError | None = None
    match: re.Pattern[str] | None = None

    def fits(self, said: str) -> bool:
        return self.match is None or self.match.search(said) is not None


@dataclass(frozen=True, slots=True)
class Script:
    """A checked script; `source` names it in messages."""

    replies: tuple[ScriptedReply, ...]
    model: str = "scripted"
    source: str = "script"

    def choose(self, messages: Sequence[Message]) -> int | None:
        """Return the index of the reply that answers `messages`, or None when none is left."""
        at: int | None = 0
        said = ""
        for message in messages:
            role = message.get("role")
            if role in ("user", "tool"):
                said = content_text(message.get("content"))
            elif role == "assistant" and not _is_note(message) and at is not None:
                chosen = self._next(at, said)
                at = None if chosen is None else chosen + 1
        return None if at is None else self._next(at, said)

    def _next(self, at: int, said: str) -> int | None:
        return next((index for index in range(at, len(self.replies)) if self.replies[index].fits(said)), None)


class Scripted:
    """A provider that plays a script; see the module for its format."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._failed: dict[int, int] = {}

    @classmethod
    def load(cls, path: Path) -> Scripted:
        """Read a script file; raises `SettingsError` that names the line or the field."""
        return cls(load_script(path))

    def complete(self, request: Request, on_event: OnEvent | None, cancellation: Cancellation) -> Reply:
        """Return the reply that the script has for this request; see `Provider.complete`."""
        script = self._script
        index = script.choose(request.messages)
        if cancellation.requested:
            raise TurnInterrupted(cancellation.reason)
        if index is None:
            text = f"the script {script.source} is used up: no reply is left of its {len(script.replies)}"
            raise ProviderError(text, reason=FailureReason.BAD_REQUEST)
        entry = script.replies[index]
        if entry.delay and cancellation.wait(entry.delay):
            raise TurnInterrupted(cancellation.reason)
        self._fail(index, entry)
        text = fill(entry.text, request.messages)
        if on_event is not None:
            for piece in split(text, entry.stream):
                on_event(TextDelta(piece))
        calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in entry.tool_calls)
        finish = entry.finish_reason or ("tool_calls" if calls else "stop")
        return Reply(content=text, tool_calls=calls, finish_reason=finish, model=script.model, usage=entry.usage)

    def _fail(self, index: int, entry: ScriptedReply) -> None:
        error = entry.error
        if error is None:
            return
        failed = self._failed.get(index, 0)
        if error.times is None or failed < error.times:
            self._failed[index] = failed + 1
            raise ProviderError(error.message, reason=error.reason, status=error.status, retry_after=error.retry_after)


def content_text(content: Any) -> str:
    """Return the text of a message's content."""
    if isinstance(content, list):
        parts = cast("list[Any]", content)
        return "\n".join(
            content_text(cast("dict[str, Any]", part).get("text")) for part in parts if isinstance(part, dict)
        )
    return content if isinstance(content, str) else ""


def _is_note(message: Message) -> bool:
    text = content_text(message.get("content")).strip()
    return not message.get("tool_calls") and text.startswith("[") and text.endswith("]")


def fill(text: str, messages: Sequence[Message]) -> str:
    """Replace {{last_result}} and {{last_user}} in a scripted text."""
    for mark, role in (("{{last_result}}", "tool"), ("{{last_user}}", "user")):
        if mark in text:
            last = next((message.get("content") for message in reversed(messages) if message.get("role") == role), None)
            text = text.replace(mark, content_text(last)[:MAX_INSERTED])
    return text


def split(text: str, pieces: int) -> list[str]:
    """Cut `text` into at most `pieces` pieces of nearly the same length."""
    if not text:
        return []
    size = -(-len(text) // max(1, pieces))
    return [text[at : at + size] for at in range(0, len(text), size)]


def load_script(path: Path) -> Script:
    """Read and check a script file; raises `SettingsError` that names the line or the field."""
    try:
        raw = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise SettingsError(f"cannot read the script {path}: {exc}") from exc
    try:
        data = json.loads(raw)
    except json.JSONDecodeError as exc:
        raise SettingsError(f"the script {path} is not JSON: line {exc.lineno}: {exc.msg}") from exc
    return parse_script(data, source=str(path))


def parse_script(data: Any, *, source: str = "script") -> Script:
    """Check a decoded script; raises `SettingsError` that names the field."""
    reader = _Reader(source)
    top = reader.object(data, "", ("model", "replies"))
    replies = top.get("replies")
    if not isinstance(replies, list) or not replies:
        raise reader.wrong("replies", "must be a list with at least one reply")
    model = reader.text(top, "model", "", default="scripted")
    parsed = tuple(reader.reply(entry, index) for index, entry in enumerate(cast("list[Any]", replies)))
    return Script(parsed, model, source)


class _Reader:
    """Checks the fields of one script and names the wrong one."""

    def __init__(self, source: str) -> None:
        self._source = source

    def wrong(self, field: str, what: str) -> SettingsError:
        return SettingsError(f"the script {self._source}: {field} {what}")

    def object(self, value: Any, field: str, known: tuple[str, ...]) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise self.wrong(field or "the whole", "must be a JSON object")
        found = cast("dict[str, Any]", value)
        for key in found:
            if key not in known:
                name = f"{field}.{key}" if field else key
                raise self.wrong(name, f"is not a known field; known are {', '.join(known)}")
        return found

    def text(self, entry: Mapping[str, Any], key: str, field: str, *, default: str = "") -> str:
        value = entry.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(f"{field}.{key}" if field else key, "must be a text")
        return value

    def number(self, entry: Mapping[str, Any], key: str, field: str, *, default: float | None = 0.0) -> float | None:
        value = entry.get(key, default)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool) or value < 0):
            raise self.wrong(f"{field}.{key}", "must be a number that is not negative")
        return value

    def reply(self, value: Any, index: int) -> ScriptedReply:
        field = f"replies[{index}]"
        names = ("text", "tool_calls", "finish_reason", "delay", "stream", "usage", "error", "match")
        entry = self.object(value, field, names)
        if not any(entry.get(key) for key in ("text", "tool_calls", "error")):
            raise self.wrong(field, "needs text, tool_calls or error")
        text = self.text(entry, "text", field)
        calls = self._calls(entry.get("tool_calls"), index)
        if _is_note({"content": text, "tool_calls": calls}):
            raise self.wrong(f"{field}.text", "must not be one bracketed note")
        pattern = self.text(entry, "match", field)
        try:
            match = re.compile(pattern) if pattern else None
        except re.error as exc:
            raise self.wrong(f"{field}.match", f"is not a regular expression: {exc}") from exc
        return ScriptedReply(
            text=text,
            tool_calls=calls,
            finish_reason=self.text(entry, "finish_reason", field),
            delay=self.number(entry, "delay", field) or 0.0,
            stream=int(self.number(entry, "stream", field, default=1) or 1),
            usage=self._usage(entry.get("usage"), f"{field}.usage"),
            error=self._error(entry.get("error"), f"{field}.error"),
            match=match,
        )

    def _calls(self, value: Any, index: int) -> tuple[ToolCall, ...]:
        field = f"replies[{index}].tool_calls"
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self.wrong(field, "must be a list")
        calls: list[ToolCall] = []
        for position, item in enumerate(cast("list[Any]", value)):
            where = f"{field}[{position}]"
            call = self.object(item, where, ("name", "arguments", "id"))
            if not self.text(call, "name", where):
                raise self.wrong(f"{where}.name", "must be a text that is not empty")
            arguments = call.get("arguments", {})
            if not isinstance(arguments, dict | str):
                raise self.wrong(f"{where}.arguments", "must be an object or a text")
            encoded = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            call_id = self.text(call, "id", where, default=f"call_{index}_{position}")
            calls.append(ToolCall(call_id, call["name"], encoded))
        return tuple(calls)

    def _usage(self, value: Any, field: str) -> Usage | None:
        if value is None:
            return None
        counts = self.object(value, field, _USAGE_FIELDS)
        return Usage(**{key: int(self.number(counts, key, field) or 0) for key in counts})

    def _error(self, value: Any, field: str) -> ScriptedError | None:
        if value is None:
            return None
        entry = self.object(value, field, ("reason", "message", "times", "status", "retry_after"))
        name = self.text(entry, "reason", field, default="server_error")
        try:
            reason = FailureReason(name)
        except ValueError:
            raise self.wrong(f"{field}.reason", f"{name!r} is not one of {', '.join(FailureReason)}") from None
        times = self.number(entry, "times", field, default=None)
        return ScriptedError(
            reason=reason,
            message=self.text(entry, "message", field, default=f"scripted failure: {name}"),
            times=None if times is None else int(times),
            status=int(self.number(entry, "status", field) or 0),
            retry_after=self.number(entry, "retry_after", field, default=None),
        )
