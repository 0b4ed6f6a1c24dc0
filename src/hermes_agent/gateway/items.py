"""The items of OpenAI's Responses API: what a client sends as input, and what a turn gives as output.

Output items are made from the rows of a turn, so that a response reads the same at any time. The
tools run on the server. A call of one is a `function_call` item with its `function_call_output`, or,
towards clients that would take that for a call which they have to run (`hosted`), one `mcp_call` item.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, cast

from hermes_agent.gateway import transcripts, turns
from hermes_agent.gateway.replies import ApiError
from hermes_agent.gateway.transcripts import UNSAID, ChatMessage, Transcript
from hermes_agent.gateway.words import Words
from hermes_agent.transcript import rows
from hermes_agent.transcript.rows import Row

Item = dict[str, Any]
Told = dict[str, Any]
"""One event of a stream of items: its `type` and fields."""

_SERVER_LABEL = "hermes"
_LEFT_OUT = frozenset(("reasoning", "item_reference", "compaction"))
"""Kinds of input items that say nothing of the conversation; calls of hosted tools are left out too."""


# -- input ------------------------------------------------------------------------------


def from_input(given: str | Sequence[Any] | None, instructions: str, earlier: Sequence[ChatMessage]) -> Transcript:
    """The input of a response as a transcript; raises `ApiError` 400 that names the item which does not fit."""
    history = _history(earlier)
    if isinstance(given, str) or given is None:
        content = turns.content_of(given, param="input", code="missing_input")
        return Transcript(instructions, history, content)
    if not given:
        raise ApiError(400, "missing_input", "input must not be empty", param="input")
    transcripts.check_count(given, "input")
    system = [instructions]
    found: list[tuple[int, Row]] = []
    for at, item in enumerate(given):
        row = _input_row(item, f"input[{at}]")
        if row is not None and row["role"] in ("system", "developer"):
            system.append(transcripts.text_of(row["content"]))
        elif row is not None:
            found.append((at, row))
    if not found or found[-1][1]["role"] != "user":
        at = found[-1][0] if found else len(given) - 1
        raise ApiError(400, "invalid_input", "the last item must be a message of the user", param=f"input[{at}]")
    at, last = found[-1]
    content = turns.content_of(last["content"], param=f"input[{at}].content", code="missing_input")
    return Transcript("\n\n".join(filter(None, system)), [*history, *_paired(row for _, row in found[:-1])], content)


def _history(earlier: Sequence[ChatMessage]) -> list[Row]:
    """`conversation_history`: messages of a chat before the input."""
    if not earlier:
        return []
    return transcripts.from_messages([*earlier, ChatMessage("user", "-")], param="conversation_history").history


def _input_row(item: Any, where: str) -> Row | None:
    """One input item as a row, None for one that says nothing of the conversation."""
    if not isinstance(item, dict):
        raise ApiError(400, "invalid_input", "an input item is an object", param=where)
    fields, now = cast("dict[str, Any]", item), time.time()
    kind = fields.get("type", "message")
    if not isinstance(kind, str):
        raise ApiError(400, "invalid_input", "type is a text", param=f"{where}.type")
    if kind == "function_call":
        call = transcripts.tool_call({**fields, "function": fields}, where)
        return {**rows.assistant_row("", [call], timestamp=now), UNSAID: True}
    if kind == "function_call_output":
        return {**rows.tool_row("", fields.get("output"), _call_id(fields, where), timestamp=now), UNSAID: True}
    if kind in _LEFT_OUT or kind.endswith(("_call", "_call_output", "_list_tools", "_approval_request")):
        return None
    if kind != "message":
        raise ApiError(400, "invalid_input", "type is none that an input item can have", param=f"{where}.type")
    return _message_row(fields, where, now)


def _message_row(fields: dict[str, Any], where: str, now: float) -> Row:
    role, content = fields.get("role"), fields.get("content")
    if role not in ("user", "assistant", "system", "developer"):
        raise ApiError(400, "invalid_input", "role is none that a message can have", param=f"{where}.role")
    if content is not None and not isinstance(content, str | list):
        raise ApiError(400, "invalid_input", "content is a text or a list of parts", param=f"{where}.content")
    if role == "user":
        return {"role": role, "content": turns.content_of(content, param=f"{where}.content", code="missing_input")}
    if role == "assistant":
        return rows.assistant_row(transcripts.text_of(content), timestamp=now)
    return {"role": role, "content": content}


def _call_id(fields: dict[str, Any], where: str) -> str:
    call_id = fields.get("call_id")
    if not isinstance(call_id, str):
        raise ApiError(400, "invalid_input", "call_id is a text", param=f"{where}.call_id")
    return call_id


def _paired(found: Iterable[Row]) -> list[Row]:
    """Rows in which the calls of one reply stand in one row: items have each call by itself."""
    out: list[Row] = []
    for row in found:
        before = out[-1] if out else None
        if row.get("tool_calls") and before is not None and before.get("tool_calls"):
            out[-1] = {**before, "tool_calls": [*before["tool_calls"], *row["tool_calls"]]}
        else:
            out.append(row)
    return out


# -- output -----------------------------------------------------------------------------


class Output:
    """The output of one turn as it grows; what each method returns is to be told to who follows it."""

    def __init__(self, turn_id: str, *, hosted: bool) -> None:
        self.items: list[Item] = []
        self._hex = turn_id.removeprefix("turn_")[:24]
        self._hosted = hosted
        self._counts: dict[str, int] = {}
        self._words = Words()
        self._message: int | None = None
        """Index of the message that grows."""
        self._reasoning: int | None = None
        self._calls: dict[str, int] = {}
        """Index of each call that runs on the server, by its id."""

    @classmethod
    def of(cls, turn_id: str, said: Iterable[Row], prose: str, *, hosted: bool) -> list[Item]:
        """The output that rows of a turn make, with what is said when it failed."""
        output = cls(turn_id, hosted=hosted)
        for row in said:
            output.row(row)
        if prose:
            output.text(prose)
        return output.items

    # -- as it is said ------------------------------------------------------------------

    def reason(self, text: str) -> list[Told]:
        """A provisional piece of reasoning."""
        if self._message is not None:
            return []
        found: list[Told] = []
        if self._reasoning is None:
            item: Item = {"type": "reasoning", "id": self._id("rs"), "status": "in_progress", "summary": []}
            self._reasoning, found = self._add(item)
            item["summary"] = [{"type": "summary_text", "text": ""}]
            found.append(self._part("reasoning_summary_part.added", self._reasoning, item["summary"][0]))
        item = self.items[self._reasoning]
        item["summary"][0]["text"] += text
        where = {"item_id": item["id"], "output_index": self._reasoning, "summary_index": 0}
        return [*found, {"type": "response.reasoning_summary_text.delta", **where, "delta": text}]

    def say(self, piece: str) -> list[Told]:
        """A provisional piece of a text."""
        return self._deltas(self._words.say(piece))

    def void(self) -> None:
        """What was said since the last row does not count."""
        self._words.void()

    # -- as it is stored ----------------------------------------------------------------

    def row(self, row: Row) -> list[Told]:
        """A row of the transcript."""
        if row["role"] == "tool":
            return self._result(row)
        if row["role"] != "assistant":
            return []
        found: list[Told] = []
        if row.get("reasoning") and self._reasoning is None and self._message is None:
            found += self.reason(str(row["reasoning"]))
        calls = row.get("tool_calls") or ()
        text = str(row.get("content") or "")
        if text.strip() or not calls:
            found += self.text(text, is_interim=bool(calls), is_cut=row.get("finish_reason") == "length")
        found += self._end_reasoning()
        for call in calls:
            if not str(call["function"]["name"]).startswith("_"):
                found += self._call(call)
        return found

    def text(self, text: str, *, is_interim: bool = False, is_cut: bool = False) -> list[Told]:
        """A whole text, of which pieces may have been said."""
        found = self._deltas(self._words.settle(text))
        if self._message is None:
            found += self._begin_message()
        at = self._message
        assert at is not None
        item = self.items[at]
        part = item["content"][0]
        item["status"] = "incomplete" if is_cut else "completed"
        if is_interim:
            item["phase"] = "commentary"
        where = {"item_id": item["id"], "output_index": at, "content_index": 0}
        found.append({"type": "response.output_text.done", **where, "text": part["text"], "logprobs": []})
        found.append({"type": "response.content_part.done", **where, "part": part})
        found.append(self._done(at))
        self._message, self._words = None, Words()
        return found

    # -- inside -------------------------------------------------------------------------

    def _begin_message(self) -> list[Told]:
        found = self._end_reasoning()
        item: Item = {
            "type": "message", "id": self._id("msg"), "status": "in_progress", "role": "assistant", "content": [],
        }  # fmt: skip
        self._message, added = self._add(item)
        part: Item = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"] = [part]
        where = {"item_id": item["id"], "output_index": self._message, "content_index": 0}
        return [*found, *added, {"type": "response.content_part.added", **where, "part": dict(part)}]

    def _deltas(self, text: str) -> list[Told]:
        if not text:
            return []
        found = self._begin_message() if self._message is None else []
        at = self._message
        assert at is not None
        item = self.items[at]
        item["content"][0]["text"] += text
        where = {"item_id": item["id"], "output_index": at, "content_index": 0}
        return [*found, {"type": "response.output_text.delta", **where, "delta": text, "logprobs": []}]

    def _end_reasoning(self) -> list[Told]:
        at, self._reasoning = self._reasoning, None
        if at is None:
            return []
        item = self.items[at]
        item["status"] = "completed"
        part = item["summary"][0]
        where = {"item_id": item["id"], "output_index": at, "summary_index": 0}
        return [
            {"type": "response.reasoning_summary_text.done", **where, "text": part["text"]},
            self._part("reasoning_summary_part.done", at, part),
            self._done(at),
        ]

    def _call(self, call: Row) -> list[Told]:
        function = call["function"]
        name, arguments = str(function["name"]), str(function["arguments"])
        item: Item = {"type": "function_call", "id": self._id("fc"), "call_id": call["id"]}
        if self._hosted:
            item = {
                "type": "mcp_call",
                "id": self._id("mcp"),
                "server_label": _SERVER_LABEL,
                "output": None,
                "error": None,
            }
        item |= {"name": name, "arguments": "", "status": "in_progress"}
        at, found = self._add(item)
        item["arguments"] = arguments
        where = {"item_id": item["id"], "output_index": at}
        kind = f"response.{item['type']}_arguments"
        told: list[Told] = [
            {"type": f"{kind}.delta", **where, "delta": arguments},
            {"type": f"{kind}.done", **where, "arguments": arguments, "name": name},
        ]
        if self._hosted:
            self._calls[call["id"]] = at
            return [*found, {"type": "response.mcp_call.in_progress", **where}, *told]
        self._calls[call["id"]] = at
        item["status"] = "completed"
        return [*found, *told, self._done(at)]

    def _result(self, row: Row) -> list[Told]:
        call_id, content = row.get("tool_call_id"), row.get("content")
        at = self._calls.pop(str(call_id), None)
        if at is None:
            return []
        output = content if isinstance(content, str) else rows.json_text(content)
        if self._hosted:
            item = self.items[at]
            item |= {"output": output, "status": "completed"}
            where = {"item_id": item["id"], "output_index": at}
            return [{"type": "response.mcp_call.completed", **where}, self._done(at)]
        item = {
            "type": "function_call_output", "id": self._id("fco"), "call_id": call_id, "output": output,
            "status": "completed",
        }  # fmt: skip
        at, found = self._add(item)
        return [*found, self._done(at)]

    def _id(self, kind: str) -> str:
        number = self._counts[kind] = self._counts.get(kind, -1) + 1
        return f"{kind}_{self._hex}{number:04x}"

    def _add(self, item: Item) -> tuple[int, list[Told]]:
        self.items.append(item)
        at = len(self.items) - 1
        return at, [{"type": "response.output_item.added", "output_index": at, "item": dict(item)}]

    def _done(self, at: int) -> Told:
        return {"type": "response.output_item.done", "output_index": at, "item": dict(self.items[at])}

    def _part(self, kind: str, at: int, part: Item) -> Told:
        where = {"item_id": self.items[at]["id"], "output_index": at, "summary_index": 0}
        return {"type": f"response.{kind}", **where, "part": dict(part)}
