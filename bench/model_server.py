"""A tiny OpenAI-compatible server that plays one turn: N steps of tool calls, then "ok".

It reads the step from the request's last tool call id and never parses the transcript, so
that its cost hardly grows with it. A request for the model `warm` is answered with "ok".
`GET /cpu` tells the CPU seconds that the last whole turn cost here.

    python -m bench.model_server --steps 100 --tool todo      # prints "listening PORT"
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import re
import subprocess
import sys
import time
from typing import Any, Self

from bench.children import ROOT

ARGUMENTS = '{"todos":[{"id":"1","content":"step %d.%d","status":"pending"}]}'
_ID = re.compile(rb'"tool_call_id":\s*"call_(\d+)_')
_JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class ModelServer:
    """The server as a process of its own, for the length of a `with` block."""

    def __init__(self, *, steps: int = 0, calls: int = 1, tool: str = "todo") -> None:
        command = [sys.executable, "-m", "bench.model_server", "--steps", str(steps)]
        self._process = subprocess.Popen(
            [*command, "--calls", str(calls), "--tool", tool], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline().split()[1])
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def turn_cpu(self) -> float:
        """CPU seconds that the server spent on the last whole turn."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request("GET", "/cpu")
        found = json.loads(connection.getresponse().read())
        connection.close()
        return found["turn"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate(timeout=10)


class Script:
    """Which answer a request gets, and what the turn cost."""

    def __init__(self, steps: int, calls: int, tool: str) -> None:
        self.steps, self.calls, self.tool = steps, calls, tool
        self.began = self.turn = 0.0

    def answer(self, body: bytes) -> bytes:
        """The whole HTTP answer to one completion request."""
        head = body[: body.find(b'"messages"')]
        streamed = b'"stream":true' in head
        if b'"model":"warm"' in head:
            return _answer(_text(), "stop", streamed=streamed)
        at = body.rfind(b'"tool_call_id"')
        found = _ID.match(body, at) if at >= 0 else None
        step = int(found[1]) + 1 if found else 0
        if step == 0:
            self.began = time.process_time()
        if step < self.steps:
            return _answer(self._calls(step), "tool_calls", streamed=streamed)
        sent = _answer(_text(), "stop", streamed=streamed)
        self.turn = time.process_time() - self.began
        return sent

    def _calls(self, step: int) -> dict[str, Any]:
        calls: list[dict[str, Any]] = [
            {
                "index": index,
                "id": f"call_{step}_{index}",
                "type": "function",
                "function": {"name": self.tool, "arguments": ARGUMENTS % (step, index)},
            }
            for index in range(self.calls)
        ]
        return {"role": "assistant", "content": None, "tool_calls": calls}


def _text() -> dict[str, Any]:
    return {"role": "assistant", "content": "ok"}


def _answer(message: dict[str, Any], finish: str, *, streamed: bool) -> bytes:
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    common: dict[str, Any] = {"id": "chatcmpl-bench", "created": 1, "model": "bench"}
    if not streamed:
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish}
        body = _dump({**common, "object": "chat.completion", "choices": [choice], "usage": usage})
        return _JSON % len(body) + body
    chunk = {**common, "object": "chat.completion.chunk"}
    pieces: list[dict[str, Any]] = [{"index": 0, "delta": message, "finish_reason": None}]
    end: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": finish}
    events = [
        _dump({**chunk, "choices": pieces}),
        _dump({**chunk, "choices": [end]}),
        _dump({**chunk, "choices": [], "usage": usage}),
        b"[DONE]",
    ]
    frames = (b"data: " + event + b"\n\n" for event in events)
    return _STREAM + b"".join(b"%x\r\n%s\r\n" % (len(frame), frame) for frame in frames) + b"0\r\n\r\n"


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


class _Connection(asyncio.Protocol):
    def __init__(self, script: Script) -> None:
        self._script = script
        self._buffer = bytearray()
        self._head = self._whole = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while self._complete():
            request = bytes(self._buffer[: self._whole])
            del self._buffer[: self._whole]
            body, self._whole = request[self._head :], 0
            if request.startswith(b"GET /cpu"):
                told = _dump({"turn": self._script.turn})
                self._transport.write(_JSON % len(told) + told)
            else:
                self._transport.write(self._script.answer(body))

    def _complete(self) -> bool:
        """Whether a whole request stands in the buffer."""
        if not self._whole:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return False
            length = re.search(rb"(?i)\r\ncontent-length:\s*(\d+)", self._buffer[:end])
            self._head = end + 4
            self._whole = self._head + (int(length[1]) if length else 0)
        return len(self._buffer) >= self._whole


async def _serve(script: Script) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(script), "127.0.0.1", 0)
    print("listening", server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--calls", type=int, default=1)
    parser.add_argument("--tool", default="todo")
    options = parser.parse_args()
    asyncio.run(_serve(Script(options.steps, options.calls, options.tool)))


if __name__ == "__main__":
    main()
