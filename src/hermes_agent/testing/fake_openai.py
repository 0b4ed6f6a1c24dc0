"""A fake OpenAI-compatible server for tests of tools, plugins and whole agents.

In a test:

    from hermes_agent.testing.fake_openai import FakeOpenAI, call, calls, text

    with FakeOpenAI([calls(call("my_tool", {"x": 1})), text("done")]) as fake:
        ...  # point the agent at fake.base_url with any key
        assert fake.wire[-1]["role"] == "tool"

As a process, which prints `listening 127.0.0.1:PORT` and plays a script of the form that
`hermes_agent.providers.scripted` describes:

    python -m hermes_agent.testing.fake_openai --script FILE --port 0 --log requests.jsonl

Each request takes the next reply, streamed or whole as it asks. With `strict` (the default) a
request that a strict provider would refuse gets its 400, and `violations` tells why.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self, cast

from hermes_agent.errors import FailureReason
from hermes_agent.providers.base import Usage
from hermes_agent.providers.scripted import Script, ScriptedError, fill, load_script
from hermes_agent.testing import replies as forms
from hermes_agent.testing.replies import (
    Answer,
    Delayed,
    Failure,
    Hold,
    Item,
    Json,
    RawStream,
    Reply,
    call,
    calls,
    delay,
    error,
    hold,
    raw_sse,
    text,
)
from hermes_agent.transcript import rules

__all__ = ["FakeOpenAI", "Recorded", "call", "calls", "delay", "error", "hold", "raw_sse", "text"]

_STATUS = {
    FailureReason.RATE_LIMIT: 429,
    FailureReason.OVERLOADED: 503,
    FailureReason.TIMEOUT: 408,
    FailureReason.AUTH: 401,
    FailureReason.BILLING: 402,
    FailureReason.MODEL_NOT_FOUND: 404,
    FailureReason.CONTEXT_OVERFLOW: 413,
    FailureReason.BAD_REQUEST: 400,
    FailureReason.CONTENT_BLOCKED: 400,
}
MAX_BODY = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request as it came; header names are in lower case."""

    path: str
    headers: dict[str, str]
    body: Json
    time: float
    """Seconds on the monotonic clock."""
    refused: str = ""
    """What a strict provider would not accept in it."""


class FakeOpenAI:
    """A fake OpenAI-compatible server on 127.0.0.1; use it as a context manager.

    `replies` are played in order; when they are used up the server answers 500, or with
    `repeat` the last one again. `alternation` also refuses two user messages in a row.
    """

    def __init__(
        self,
        replies: Sequence[Reply] = (),
        *,
        strict: bool = True,
        alternation: bool = True,
        repeat: bool = False,
        model: str = "fake",
        port: int = 0,
        on_request: Callable[[Recorded], None] | None = None,
    ) -> None:
        self.requests: list[Recorded] = []
        self.violations: list[str] = []
        self.connections = 0
        """How many connections were opened."""
        self.model = model
        self._strict = strict
        self._alternation = alternation
        self._repeat = repeat
        self._on_request = on_request
        self._lock = threading.Lock()
        self._replies: list[Reply] = []
        self._played = 0
        self._holds: list[Hold] = []
        self._sockets: set[socket.socket] = set()
        self.extend(replies)
        self._server = _Server(self, port)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), name="fake-openai", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def wire(self) -> list[Json]:
        """The messages of the last completion request."""
        return self.requests[-1].body["messages"]

    def extend(self, replies: Sequence[Reply]) -> None:
        """Add replies behind those that are still to come."""
        with self._lock:
            for item in replies:
                times = item.times if isinstance(item, Failure) else 1
                self._replies += [item] * times
                if isinstance(item, Hold):
                    self._holds.append(item)

    def drop_connections(self) -> None:
        """Close every open connection, as a server does that restarts."""
        with self._lock:
            sockets = list(self._sockets)
        for sock in sockets:
            _shut(sock)

    def close(self) -> None:
        """Release what is held, drop the connections and stop."""
        for held in self._holds:
            held.release()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        self.drop_connections()

    def opened(self, sock: socket.socket) -> None:
        with self._lock:
            self.connections += 1
            self._sockets.add(sock)

    def closed(self, sock: socket.socket) -> None:
        with self._lock:
            self._sockets.discard(sock)

    def answer(self, request: Recorded) -> tuple[int, Item]:
        """Record a completion request; return its number and what it gets."""
        fault = self._fault(request.body) if self._strict else None
        if fault:
            request = replace(request, refused=fault)
        with self._lock:
            self.requests.append(request)
            number = len(self.requests) - 1
            if fault:
                self.violations.append(fault)
            item = error(400, fault, code="invalid_request_error") if fault else self._take()
        if self._on_request is not None:
            self._on_request(request)
        return number, item(request.body) if callable(item) else item

    def _take(self) -> Reply:
        if self._played < len(self._replies):
            self._played += 1
        elif not (self._repeat and self._replies):
            return error(500, "script used up")
        return self._replies[self._played - 1]

    def _fault(self, body: Json) -> str | None:
        messages: Any = body.get("messages")
        if not isinstance(messages, list) or not messages:
            return "'messages' must be a list that is not empty."
        if "tool_choice" in body and not body.get("tools"):
            return "'tool_choice' is only allowed when 'tools' are specified."
        if "tools" in body and not body["tools"]:
            return "[] is too short - 'tools'"
        return rules.check_strict(cast("list[Any]", messages), alternation=self._alternation)


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, fake: FakeOpenAI, port: int) -> None:
        self.fake = fake
        super().__init__(("127.0.0.1", port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that goes away in the middle is what many tests are about.
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def setup(self) -> None:
        super().setup()
        self._fake = cast("_Server", self.server).fake
        self._fake.opened(self.connection)

    def finish(self) -> None:
        self._fake.closed(self.connection)
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Say nothing."""

    def do_GET(self) -> None:
        fake = self._fake
        if self.path.split("?")[0].endswith("/models"):
            model = {"id": fake.model, "object": "model", "created": 0, "owned_by": "fake"}
            self._json(200, {"object": "list", "data": [model]})
        else:
            self._failure(error(404, f"no such path: {self.path}"))

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY:
            self.close_connection = True
            self._failure(error(411, "a Content-Length is needed"))
            return
        raw = self.rfile.read(int(length))
        if not self.path.split("?")[0].endswith("/chat/completions"):
            self._failure(error(404, f"no such path: {self.path}"))
            return
        fake = self._fake
        try:
            body = json.loads(raw.decode("utf-8"))
        except ValueError as exc:
            fault = f"the body is not JSON in UTF-8: {exc}"
            fake.violations.append(fault)
            self._failure(error(400, fault))
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        number, item = fake.answer(Recorded(self.path, headers, body, time.monotonic()))
        self._play(item, number, body)

    def _play(self, item: Item, number: int, body: Json) -> None:
        while isinstance(item, Delayed):
            time.sleep(item.seconds)
            item = item.item
        if isinstance(item, Failure):
            self._failure(item)
        elif isinstance(item, RawStream):
            self._raw(item)
        elif isinstance(item, Hold):
            self._hold(item, number, body)
        elif body.get("stream"):
            self._begin_stream()
            self._stream(item, number, body)
        else:
            self._json(200, forms.completion(item, number, body))

    def _hold(self, item: Hold, number: int, body: Json) -> None:
        if not body.get("stream"):
            item.wait()
            self._play(item.then, number, body)
            return
        self._begin_stream()
        self._event(forms.chunk(number, body, {"role": "assistant", "content": item.begin}))
        item.wait()
        if isinstance(item.then, Answer):
            self._stream(item.then, number, body)
        else:
            self._drop()

    def _failure(self, item: Failure) -> None:
        self._json(item.status, item.body, item.headers)

    def _json(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()

    def _begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _raw(self, item: RawStream) -> None:
        self._begin_stream()
        for frame in item.frames:
            self._piece(frame)
        if item.cut:
            self._drop()
        else:
            self._end_stream()

    def _stream(self, item: Answer, number: int, body: Json) -> None:
        for delta in forms.deltas(item, number):
            self._event(forms.chunk(number, body, delta))
        self._event(forms.chunk(number, body, {}, finish=item.finish_reason))
        options: Any = body.get("stream_options")
        if isinstance(options, dict) and cast("Json", options).get("include_usage"):
            self._event({**forms.chunk(number, body, {}), "choices": [], "usage": forms.usage_json(item.usage)})
        self._piece(b"data: [DONE]\n\n")
        self._end_stream()

    def _event(self, chunk: Json) -> None:
        self._piece(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def _piece(self, data: bytes) -> None:
        if data:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

    def _end_stream(self) -> None:
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()

    def _drop(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        _shut(self.connection)


class Player:
    """Answers requests from a script of the scripted provider; which reply comes follows from the request."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._failed: dict[int, int] = {}
        self._lock = threading.Lock()

    def __call__(self, body: Json) -> Item:
        messages = body["messages"]
        index = self._script.choose(messages)
        if index is None:
            return error(500, "script used up")
        entry = self._script.replies[index]
        item: Item
        if entry.error is not None and self._fails(index, entry.error):
            item = _scripted_error(entry.error)
        else:
            item = Answer(
                content=fill(entry.text, messages),
                tool_calls=entry.tool_calls,
                finish_reason=entry.finish_reason or ("tool_calls" if entry.tool_calls else "stop"),
                chunks=entry.stream,
                usage=entry.usage or Usage(100, 10),
            )
        return Delayed(entry.delay, item) if entry.delay else item

    def _fails(self, index: int, wanted: ScriptedError) -> bool:
        with self._lock:
            failed = self._failed.get(index, 0)
            self._failed[index] = failed + 1
        return wanted.times is None or failed < wanted.times


def _scripted_error(wanted: ScriptedError) -> Failure:
    status = wanted.status or _STATUS.get(wanted.reason, 500)
    headers = {} if wanted.retry_after is None else {"Retry-After": f"{wanted.retry_after:g}"}
    return error(status, wanted.message, code=wanted.reason.value, headers=headers)


class _Log:
    """Appends each request as one JSON line; the key is left out."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def __call__(self, request: Recorded) -> None:
        headers = {**request.headers, **({"authorization": "***"} if "authorization" in request.headers else {})}
        line = {**asdict(request), "headers": headers}
        with self._lock:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve a script until the process is ended."""
    parser = argparse.ArgumentParser(description="a fake OpenAI-compatible server that plays a script")
    parser.add_argument("--script", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log", type=Path, help="append each request to this file, one JSON object a line")
    parser.add_argument("--lenient", action="store_true", help="accept requests that a strict provider refuses")
    options = parser.parse_args(arguments)
    script = load_script(options.script)
    log = _Log(options.log) if options.log else None
    fake = FakeOpenAI(
        [Player(script)], repeat=True, strict=not options.lenient, model=script.model, port=options.port, on_request=log
    )
    with fake:
        sys.stdout.write(f"listening 127.0.0.1:{fake.port}\n")
        sys.stdout.flush()
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            return 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
