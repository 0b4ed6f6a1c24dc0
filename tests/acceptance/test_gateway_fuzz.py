"""Requests made from our own OpenAPI document, most of them nearly right, against the gateway as a process.

None may be answered with a server error, none may hang, and the process may not grow. `make soak` runs the long form.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

import psutil
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hermes_agent.testing.fake_openai import FakeOpenAI, text
from tests.acceptance import under_load
from tests.acceptance.under_load import KEY, Gateway
from tests.acceptance.world import World

SOAK = bool(os.environ.get("HERMES_SOAK"))
REQUESTS = 5000 if SOAK else 500
WARM_UP = 100
HANGS = 1.0
"""Seconds; whoever took longer is asked again, since a machine that is busy is no hang."""
TRIES = 3
GROWTH = 50e6
GIVES_UP = 20.0

Json = dict[str, Any]

words = st.text(st.characters(codec="utf-8"), max_size=30) | st.sampled_from(
    ["", " ", "s1", "s2", "0", "-1", "null", "user", "assistant", "once", "a" * 5000, "../../etc/passwd", "\x00", "😀"]
)
numbers = (
    st.integers(-5, 300) | st.integers() | st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**400]) | st.floats(width=32)
)
anything = st.recursive(
    st.none() | st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4),
    max_leaves=8,
)
preferences = st.sampled_from(
    ["wait=0", "wait=0.1", "respond-async", "status=strict", "wait=-1", "wait=nan", "handling=strict, wait=0", ","]
)


_KINDS = {"integer": numbers, "number": numbers, "boolean": st.sampled_from(["true", "false", "2"])}


@dataclass
class Request:
    """One request, as it is sent."""

    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytes | None = None


class Document:
    """The OpenAPI document as a source of requests."""

    def __init__(self, document: Json, ids: dict[str, list[str]]) -> None:
        self._schemas = document["components"]["schemas"]
        self._ids = ids
        self._operations = [
            (path, method, operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        ]

    def request(self, draw: st.DrawFn) -> Request:
        path, method, operation = draw(st.sampled_from(self._operations))
        if _rarely(draw):
            method = draw(st.sampled_from(["get", "put", "delete", "options", "head", "patch", "post"]))
        headers = {"Authorization": f"Bearer {KEY}"}
        query: dict[str, str] = {}
        for parameter in operation["parameters"]:
            name = parameter["name"]
            if parameter["in"] == "path":
                path = path.replace(f"{{{name}}}", quote(self._id(draw, name, method), safe="") or "-")
            elif draw(st.booleans()):
                value = str(draw(_KINDS.get(parameter["schema"]["type"], words)))
                if parameter["in"] == "query":
                    query[name] = value
                elif name == "Prefer":
                    headers[name] = draw(preferences)
                else:
                    headers[name] = "".join(char for char in value if " " <= char <= "ÿ" and char != "\x7f")
        body = self._body(draw, operation, headers)
        return Request(method.upper(), path + (f"?{urlencode(query)}" if query else ""), headers, body)

    def _id(self, draw: st.DrawFn, name: str, method: str) -> str:
        """Mostly of something that is there; what is removed is not asked for again."""
        known = self._ids.get(f"removed {name}" if method == "delete" else name, [])
        return draw(words if not known or _rarely(draw) else st.sampled_from(known))

    def _body(self, draw: st.DrawFn, operation: Json, headers: dict[str, str]) -> bytes | None:
        """A body that mostly fits the schema, has one thing wrong in it, or is no JSON at all."""
        content = operation.get("requestBody", {}).get("content", {})
        if not content:
            return None
        headers["Content-Type"] = "application/json"
        if _rarely(draw):
            return draw(st.binary(max_size=50))
        value = draw(anything if _rarely(draw) else self._valid(content["application/json"]["schema"]))
        if isinstance(value, dict) and value and _rarely(draw):
            value[draw(st.sampled_from(sorted(value)))] = draw(anything)
        if _rarely(draw):
            headers["Content-Type"] = draw(st.sampled_from(["text/plain", "application/x-www-form-urlencoded", "/"]))
        return _encoded(value)

    def _valid(self, schema: Json) -> st.SearchStrategy[Any]:
        """What the schema allows, and now and then what only its words allow."""
        if "$ref" in schema:
            return self._valid(self._schemas[schema["$ref"].rpartition("/")[2]])
        if "anyOf" in schema:
            return st.one_of([self._valid(each) for each in schema["anyOf"]])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        match schema.get("type"):
            case "object" if "properties" in schema:
                required = schema.get("required", [])
                fields = {name: self._valid(each) for name, each in schema["properties"].items()}
                return st.fixed_dictionaries(
                    {name: fields[name] for name in required},
                    optional={name: each for name, each in fields.items() if name not in required},
                )
            case "object":
                return st.dictionaries(words, anything, max_size=3)
            case "array":
                return st.lists(self._valid(schema.get("items", {})), max_size=3)
            case "string":
                return words
            case "integer":
                return st.integers(-5, 300)
            case "number":
                return st.floats(0, 1)
            case "boolean":
                return st.booleans()
            case "null":
                return st.none()
            case _:
                return anything


def _rarely(draw: st.DrawFn) -> bool:
    """True about once in ten; the ends of a range are drawn more often."""
    return draw(st.integers(0, 9)) == 6


def _encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


class Sender:
    """Sends requests and remembers what came of them."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._connection = self._connect()
        self.statuses: Counter[int] = Counter()
        self.grown = 0.0
        self._memory = 0.0

    def _connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self._gateway.port, timeout=GIVES_UP)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def send(self, request: Request) -> http.client.HTTPResponse:
        """The head of the answer; its body is read, of a stream only what comes at once."""
        self._connection.request(request.method, request.path, request.body, request.headers)
        return self._connection.getresponse()

    def check(self, request: Request) -> None:
        for number in range(TRIES):
            began = time.monotonic()
            status, body = self._answer(request)
            if time.monotonic() - began < HANGS:
                break
            assert number < TRIES - 1, f"hangs: {request}"
        self.statuses[status] += 1
        assert status < 500 or _is_typed(request, body), f"{status} {body[:500]!r} to {request}"
        memory = psutil.Process(self._gateway.pid).memory_info().rss
        if self.statuses.total() == WARM_UP:
            self._memory = memory
        if self._memory:
            self.grown = memory - self._memory

    def _answer(self, request: Request) -> tuple[int, bytes]:
        try:
            answer = self.send(request)
        except (http.client.RemoteDisconnected, ConnectionError):  # it was idle for too long
            self.close()
            self._connection = self._connect()
            answer = self.send(request)
        if answer.headers.get_content_type() == "text/event-stream":
            self.close()
            self._connection = self._connect()
            return answer.status, b""
        return answer.status, answer.read()

    def close(self) -> None:
        self._connection.close()


def _is_typed(request: Request, body: bytes) -> bool:
    """The client asked to be told of a failed turn in the status, and is told why it failed."""
    strict = "status=strict" in request.headers.get("Prefer", "")
    return strict and "failure" in json.loads(body)["error"]


def test_no_request_breaks_it(hermes_home, unmeasured: None):
    with (
        FakeOpenAI([text("pong")], repeat=True, strict=False) as fake,
        World(hermes_home, fake) as world,
        under_load.gateway(world) as gateway,
    ):
        sender = Sender(gateway)
        try:
            document = Document(*_learn(sender))

            @settings(
                max_examples=REQUESTS,
                derandomize=not SOAK,
                database=None,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            )
            @given(st.data())
            def fuzz(data: st.DataObject) -> None:
                sender.check(document.request(data.draw))

            fuzz()
        finally:
            sender.close()
        assert sender.statuses.total() >= REQUESTS
        assert sum(sender.statuses[status] for status in (200, 201, 202)) > REQUESTS / 10
        assert sender.grown < GROWTH
        stopped = gateway.stop()
        assert (stopped.code, stopped.err) == (0, "")
        assert under_load.look(world)["faults"] == []
        print(dict(sorted(sender.statuses.items())), f"grown by {sender.grown / 1e6:.1f} MB")


def _learn(sender: Sender) -> tuple[Json, dict[str, list[str]]]:
    """The document, and ids of things that are there."""

    def ask(method: str, path: str, body: Json | None = None) -> Json:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        answer = sender.send(Request(method, path, headers, None if body is None else _encoded(body)))
        read = answer.read()
        assert answer.status < 300, read
        return json.loads(read)

    sessions = [f"s{number}" for number in range(20)]
    for session in sessions:
        ask("POST", "/api/sessions", {"id": session})
    ids = {
        "session_id": sessions[:5],
        "removed session_id": sessions[5:],
        "delivery_id": [ask("POST", "/api/sessions/s1/chat", {"message": "ping"})["delivery_id"]],
        "run_id": [ask("POST", "/v1/runs", {"input": "ping"})["run_id"]],
        "response_id": [ask("POST", "/v1/responses", {"input": "ping"})["id"]],
        "removed response_id": [ask("POST", "/v1/responses", {"input": "ping"})["id"]],
    }
    return ask("GET", "/openapi.json"), ids
