"""A guarded application on a port of this machine, and requests to it byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass

from aiohttp import web

from hermes_agent.errors import StoreFull
from hermes_agent.gateway import bodies, replies
from hermes_agent.gateway.guard import Guard, principal
from hermes_agent.gateway.keys import KeyRing, Scope
from hermes_agent.settings import Secret

KEY = "k-CANARY-5dJ2mZq8Xw1TfLr9"
RIGHT = f"Authorization: Bearer {KEY}"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self):
        return json.loads(self.body)

    @property
    def code(self):
        return self.json()["error"]["code"]


class Clock:
    """Time that stands still until it is moved."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def routes(app, expect):
    async def health(request):
        return replies.json_reply({"ok": True})

    async def echo(request):
        return replies.json_reply({"fields": await bodies.read_json(request, limit=100_000, seconds=0.5)})

    async def who(request):
        return replies.json_reply({"name": principal(request).name}, headers={"X-Hermes-Run-Id": "r1"})

    async def crash(request):
        raise RuntimeError(f"a bug with {KEY} in it")

    async def full(request):
        raise StoreFull

    async def stream(request):
        response = web.StreamResponse(headers={"X-Hermes-Session-Id": "s1", "Content-Type": "text/event-stream"})
        await response.prepare(request)
        if "early" not in request.query:
            await response.write(b"data: 1\n\n")
        if request.query:
            raise RuntimeError("a bug in the middle")
        return response

    app.router.add_get("/health", health)
    app.router.add_get("/who", who)
    app.router.add_post("/echo", echo, expect_handler=expect)
    app.router.add_patch("/who", who)
    app.router.add_get("/crash", crash)
    app.router.add_get("/full", full)
    app.router.add_get("/stream", stream)
    app.router.add_post("/approve", who)


SCOPES = {"/health": None, "/approve": Scope.APPROVE, "/echo": Scope.DM}


def scope_of(request):
    return SCOPES.get(request.match_info.route.resource.canonical, Scope.READ)


@contextlib.asynccontextmanager
async def guarded(home, *, keys=True, listen="127.0.0.1", **options):
    """The port of an application behind a guard; yields it and the ring of its keys."""
    ring = KeyRing(home, Secret(KEY)) if keys is True else keys
    app = web.Application()
    guard = Guard(ring, scope_of=scope_of, **options)
    guard.install(app)
    routes(app, guard.expect)
    async with serving(app, listen) as port:
        yield port, ring


@contextlib.asynccontextmanager
async def serving(app, host="127.0.0.1"):
    runner = web.AppRunner(
        app, access_log=None, max_line_size=8190, max_field_size=16_384, lingering_time=2, auto_decompress=False
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, 0)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def ask(port, path="/who", *lines, method="GET", host="localhost", body=b""):
    """Send one request with these header lines (bytes or text); the answer."""
    head = [f"{method} {path} HTTP/1.1"] + ([f"Host: {host}"] if host is not None else []) + ["Connection: close"]
    if body:
        head.append(f"Content-Length: {len(body)}")
    raw = b"\r\n".join(line if isinstance(line, bytes) else line.encode() for line in [*head, *lines])
    return await send(port, raw + b"\r\n\r\n" + body)


async def send(port, raw, *, host="127.0.0.1"):
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(raw)
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            length = parsed(head).headers.get("content-length")
            rest = (
                b"" if length and raw.startswith(b"HEAD") else await reader.read(-1 if length is None else int(length))
            )
            return parsed(head + rest)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


def parsed(raw):
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return Answer(int(first.split(" ")[1]), headers, body)
