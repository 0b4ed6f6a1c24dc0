"""Readers of the OpenAI APIs that are as strict as the strictest clients: whatever one of them refuses fails here."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from hermes_agent.testing.replies import Item, error, hold
from tests.integration.gateway.conftest import PATIENT, Site

FINISHES = ("stop", "length", "error")
ITEM_FIELDS = {
    "message": {"role", "content"},
    "reasoning": {"summary"},
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "output"},
    "mcp_call": {"server_label", "name", "arguments", "output", "error"},
}


@dataclass
class Chunks:
    """A chat stream that was read to its end."""

    headers: Any
    frames: list[tuple[str, Any]]
    """Event name ("" for none) and data of each."""
    comments: list[str] = field(default_factory=list[str])

    @property
    def chunks(self) -> list[Any]:
        return [data for name, data in self.frames if not name]

    @property
    def content(self) -> str:
        """What a client that adds up the words has, whether it knows named events or not."""
        choices = [choice for _, data in self.frames for choice in data["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    @property
    def reasoning(self) -> str:
        return "".join(chunk["choices"][0]["delta"].get("reasoning_content", "") for chunk in self.chunks[:-1])

    @property
    def last(self) -> Any:
        """The chunk with the finish reason."""
        return next(chunk for chunk in self.chunks if chunk["choices"] and chunk["choices"][0]["finish_reason"])

    @property
    def progress(self) -> list[tuple[str, str]]:
        return [(data["tool"], data["status"]) for name, data in self.frames if name == "hermes.tool.progress"]


def frames_of(text: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Events and comments of a stream whose framing is right to the byte."""
    assert text.endswith("\n\n")
    events: list[tuple[str, str]] = []
    comments: list[str] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = "", None
        for line in block.split("\n"):
            head, _, value = line.partition(": ")
            assert head in ("", "data", "event", "id"), line
            if head == "":
                comments.append(value)
            elif head == "event":
                name = value
            elif head == "data":
                assert data is None
                data = value
        if data is not None:
            events.append((name, data))
    return events, comments


def read_chunks(text: str, headers: Any, *, usage: bool = False) -> Chunks:
    """A chat stream, checked as the SDKs and the typed clients check it."""
    events, comments = frames_of(text)
    assert events[-1] == ("", "[DONE]")
    frames = [(name, json.loads(data)) for name, data in events[:-1]]
    first = frames[0][1]
    base = {name: first[name] for name in ("id", "object", "created", "model")}
    assert base["object"] == "chat.completion.chunk"
    assert base["id"].startswith("chatcmpl-")
    assert len(base["id"]) == 38
    ended = False
    for number, (name, data) in enumerate(frames):
        assert base.items() <= data.items()
        if name:
            assert data["choices"] == []
            if name == "hermes.tool.progress":
                assert data["tool"]
                assert data["toolCallId"]
                assert data["status"] in ("running", "completed")
            continue
        if not data["choices"]:
            assert usage
            assert ended
            assert number == len(frames) - 1
            assert data["usage"]["total_tokens"] > 0
            continue
        assert not ended, "nothing but the usage follows the finish"
        [choice] = data["choices"]
        assert choice["index"] == 0
        assert "tool_calls" not in choice["delta"]
        if number == 0:
            assert choice["delta"]["role"] == "assistant"
        if choice["finish_reason"] is None:
            assert isinstance(choice["delta"]["content"], str)
            assert "hermes" not in data
        else:
            ended = True
            assert choice["finish_reason"] in FINISHES
            assert choice["delta"] == {}
            check_outcome(choice["finish_reason"], data)
            assert ("usage" in data) is not usage
    assert ended
    return Chunks(headers, frames, comments)


def check_outcome(finish: str, data: Any) -> None:
    """The `hermes` block is what the typed client wants of it."""
    if finish == "stop":
        assert "hermes" not in data
        return
    told = data["hermes"]
    assert told["completed"] is False
    assert isinstance(told["partial"], bool)
    if finish == "length":
        assert (told["failed"], told["partial"], told["error_code"]) == (False, True, "output_truncated")
    else:
        assert told["failed"] is True
        assert told["error"]
        assert told["error_code"]


async def stream_chat(site: Site, body: Any, **more: Any) -> Chunks:
    """Ask for a chat completion as a stream."""
    usage = bool((body.get("stream_options") or {}).get("include_usage"))
    async with site.request("POST", "/v1/chat/completions", {"stream": True, **body}, **more) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.headers["Content-Type"] == "text/event-stream"
        return read_chunks(await answer.text(), answer.headers, usage=usage)


async def taken_back(site: Site, path: str, body: Any, said: str, instead: Item) -> tuple[str, Any]:
    """Text and headers of a stream whose reader heard what the model `said` before the connection to it broke."""
    held = hold(said, error(500))
    site.fake.extend([held, instead])
    async with site.request("POST", path, {"stream": True, **body}) as answer:
        heard = b""
        async with asyncio.timeout(PATIENT):
            while said.encode() not in heard:
                heard += await answer.content.readline()
        held.release()
        return (heard + await answer.read()).decode(), answer.headers


# -- responses --------------------------------------------------------------------------


def check_response(response: Any) -> Any:
    """A response object as the SDKs want it."""
    assert response["object"] == "response"
    assert response["id"].startswith("resp_")
    assert len(response["id"]) == 33
    assert response["status"] in ("completed", "failed", "incomplete", "in_progress", "queued", "cancelled")
    for name in ("error", "incomplete_details", "instructions", "metadata", "model", "previous_response_id", "usage"):
        assert name in response
    assert (response["tools"], response["tool_choice"], response["parallel_tool_calls"]) == ([], "auto", True)
    seen: set[str] = set()
    for item in response["output"]:
        check_item(item)
        assert item["id"] not in seen
        seen.add(item["id"])
    if response["status"] == "completed":
        assert all(item["status"] == "completed" for item in response["output"])
        assert response["usage"]["input_tokens_details"]["cached_tokens"] >= 0
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] >= 0
    return response


def check_item(item: Any) -> None:
    assert item["id"]
    assert item["status"] in ("completed", "in_progress", "incomplete")
    assert ITEM_FIELDS[item["type"]] <= item.keys()
    for part in item.get("content", ()):
        assert part["type"] == "output_text"
        assert (part["annotations"], part["logprobs"]) == ([], [])


@dataclass
class Story:
    """A response stream that was read to its end."""

    events: list[Any]
    response: Any

    @property
    def kinds(self) -> list[str]:
        """Kinds of the events, repeats as one."""
        found: list[str] = []
        for event in self.events:
            if found[-1:] != [event["type"]]:
                found.append(event["type"])
        return found


def read_story(text: str) -> Story:
    """A response stream, put together as the SDKs do it: an event for what was not begun is a fault."""
    frames, _ = frames_of(text)
    events = [json.loads(data) for _, data in frames]
    assert [name for name, _ in frames] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    output: list[Any] = []
    for event in events[2:-1]:
        _put_together(output, event)
    last = events[-1]
    assert last["type"] in ("response.completed", "response.failed", "response.incomplete")
    response = check_response(last["response"])
    assert output == response["output"]
    assert {event["response"]["id"] for event in (*events[:2], last)} == {response["id"]}
    return Story(events, response)


def _put_together(output: list[Any], event: Any) -> None:
    kind, at = event["type"].removeprefix("response."), event["output_index"]
    if kind == "output_item.added":
        assert at == len(output)
        output.append(event["item"])
        return
    item = output[at]
    if kind == "output_item.done":
        assert item["id"] == event["item"]["id"]
        check_item(event["item"])
        for name in ("arguments", "content", "summary"):
            assert item.get(name) == event["item"].get(name)
        output[at] = event["item"]
        return
    assert event["item_id"] == item["id"]
    match kind:
        case "content_part.added":
            assert event["content_index"] == len(item["content"])
            item["content"].append(event["part"])
        case "output_text.delta":
            item["content"][event["content_index"]]["text"] += event["delta"]
        case "output_text.done":
            assert item["content"][event["content_index"]]["text"] == event["text"]
        case "content_part.done":
            assert item["content"][event["content_index"]] == event["part"]
        case "reasoning_summary_part.added":
            assert event["summary_index"] == len(item["summary"])
            item["summary"].append(event["part"])
        case "reasoning_summary_text.delta":
            item["summary"][event["summary_index"]]["text"] += event["delta"]
        case "reasoning_summary_text.done":
            assert item["summary"][event["summary_index"]]["text"] == event["text"]
        case "reasoning_summary_part.done":
            assert item["summary"][event["summary_index"]] == event["part"]
        case "function_call_arguments.delta" | "mcp_call_arguments.delta":
            item["arguments"] += event["delta"]
        case "function_call_arguments.done" | "mcp_call_arguments.done":
            assert item["arguments"] == event["arguments"]
        case "mcp_call.in_progress" | "mcp_call.completed":
            pass
        case _:
            raise AssertionError(f"no client knows {event['type']}")


async def stream_response(site: Site, body: Any, **more: Any) -> Story:
    """Ask for a response as a stream."""
    async with site.request("POST", "/v1/responses", {"stream": True, **body}, **more) as answer:
        assert answer.status == 200, await answer.text()
        return read_story(await answer.text())


def text_of(response: Any) -> str:
    """What the SDKs call `output_text`."""
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts)
