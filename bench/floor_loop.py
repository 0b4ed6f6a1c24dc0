"""The floor of a turn, as a measured process: http.client, apsw and a loop, each row encoded once.

Same durable steps as ours: one commit for the model's reply before its tools run, one for each result.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench import children, loop_options
from bench.floor_store import FloorStore

SYSTEM = "You are a floor. " + "Do what is asked in small steps and say what you did. " * 14
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "todo",
        "description": "Keep the task list. " * 15,
        "parameters": {
            "type": "object",
            "properties": {"todos": {"type": "array", "items": {"type": "object", "properties": {}}}},
        },
    },
}
_HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer none"}
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Loop:
    """One turn: ask, store, run, store."""

    def __init__(self, options: loop_options.Options) -> None:
        self._store = FloorStore(options.folder / "floor.db", synchronous=options.synchronous)
        self._store.create("s")
        self._connection = http.client.HTTPConnection("127.0.0.1", options.port)
        self._seconds = options.nap
        self._stream = options.stream
        self._pool = ThreadPoolExecutor(8)
        self._parts: list[str] = []
        self.marks: list[float] = []

    @property
    def commits(self) -> int:
        return self._store.commits

    def ask(self, model: str) -> dict[str, Any]:
        streamed = {"stream": True} if self._stream else {}
        head = _encode({"model": model, "tools": [TOOL], **streamed})[:-1]
        body = f'{head},"messages":[{",".join(self._parts)}]}}'.encode()
        self._connection.request("POST", "/v1/chat/completions", body, _HEADERS)
        answer = self._connection.getresponse()
        return _joined(answer) if self._stream else json.loads(answer.read())["choices"][0]["message"]

    def run(self) -> str:
        self._add({"role": "system", "content": SYSTEM})
        self._add({"role": "user", "content": "hi"})
        while True:
            self.marks.append(time.process_time())
            reply = self.ask("bench")
            self._add(reply)
            calls = reply.get("tool_calls")
            if not calls:
                return reply["content"]
            results = self._pool.map(self._tool, calls) if len(calls) > 1 else map(self._tool, calls)
            for call, result in zip(calls, results, strict=True):
                self._add({"role": "tool", "content": result, "tool_call_id": call["id"]})

    def _add(self, message: dict[str, Any]) -> None:
        self._parts.append(_encode(message))
        self._store.append("s", message)

    def _tool(self, call: dict[str, Any]) -> str:
        arguments = json.loads(call["function"]["arguments"])
        if self._seconds:
            time.sleep(self._seconds)
        counts = dict.fromkeys(("pending", "in_progress", "completed", "cancelled"), 0)
        for item in arguments["todos"]:
            counts[item["status"]] += 1
        return json.dumps({"todos": arguments["todos"], "summary": {"total": len(arguments["todos"]), **counts}})


def _joined(lines: Iterable[bytes]) -> dict[str, Any]:
    """The message whose pieces a stream of events holds; every call comes in one piece here."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for line in lines:
        if not line.startswith(b"data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            delta = choice["delta"]
            if delta.get("content"):
                message["content"] = (message["content"] or "") + delta["content"]
            if delta.get("tool_calls"):
                message.setdefault("tool_calls", []).extend(delta["tool_calls"])
    return message


def main() -> None:
    options = loop_options.parse()
    loop = Loop(options)
    loop.ask("warm")
    with loop_options.Measured() as measured:
        before = loop.commits
        text = loop.run()
    children.report(measured.result(text == "ok", commits=loop.commits - before, marks=loop.marks))


if __name__ == "__main__":
    main()
