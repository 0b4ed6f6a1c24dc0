"""The floor of the session API: an event loop, one thread that writes, and the same durable steps as ours.

A turn reads its session, commits the message, asks the model on a kept connection and commits the
answer; whatever waits for the thread shares a commit. Nothing is checked, queued or recovered.

    python -m bench.floor_gateway --model PORT --store FILE      # prints "listening on http://127.0.0.1:PORT"
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import floor_loop, wire
from bench.floor_store import FloorStore

SYSTEM = {"role": "system", "content": "You are a floor. " + "Answer the person in a few words. " * 120}
"""About as long as our system prompt and tools together."""
MOST = 256
"""Pieces of work that share a commit."""

Work = Callable[[FloorStore], object]


class Writer(threading.Thread):
    """Does what is put to it in the order in which it came, whatever waits in one commit."""

    def __init__(self, path: Path, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(daemon=True)
        self._path, self._loop = path, loop
        self._todo: queue.SimpleQueue[tuple[Work, asyncio.Future[None]]] = queue.SimpleQueue()

    async def write(self, work: Work) -> None:
        """Return when it is durable."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._todo.put((work, done))
        await done

    def run(self) -> None:
        store = FloorStore(self._path)
        while True:
            batch = [self._todo.get()]
            while len(batch) < MOST and not self._todo.empty():
                batch.append(self._todo.get())
            store.execute("BEGIN IMMEDIATE")
            for work, _ in batch:
                work(store)
            store.execute("COMMIT")
            self._loop.call_soon_threadsafe(_set, [done for _, done in batch])


def _set(waiting: list[asyncio.Future[None]]) -> None:
    for done in waiting:
        done.set_result(None)


class Gateway:
    """The routes."""

    def __init__(self, path: Path, model: int) -> None:
        self._store = FloorStore(path)
        self._writer = Writer(path, asyncio.get_running_loop())
        self._writer.start()
        self._model = model
        self._idle: list[wire.Connection] = []

    async def answer(self, asked: wire.Message) -> bytes:
        method, path = asked.place
        if path == "/v1/models":
            return wire.reply(200, {"object": "list", "data": [{"id": "floor", "object": "model"}]})
        if (method, path) == ("POST", "/api/sessions"):
            session = os.urandom(8).hex()
            await self._writer.write(lambda store: store.insert(session))
            return wire.reply(201, {"session": {"id": session}})
        session = path.removeprefix("/api/sessions/").removesuffix("/chat")
        if not self._store.execute("SELECT 1 FROM sessions WHERE id = ?", (session,)).fetchall():
            return wire.reply(404, {"error": "no such session"})
        text = await self._turn(session, json.loads(asked.body)["message"])
        return wire.reply(200, {"session_id": session, "message": {"role": "assistant", "content": text}})

    async def _turn(self, session: str, message: str) -> str:
        user: dict[str, Any] = {"role": "user", "content": message}
        messages = [SYSTEM, *self._store.read(session), user]
        await self._writer.write(lambda store: store.add(session, user))
        body = {"model": "bench", "tools": [floor_loop.TOOL], "messages": messages}
        connection = self._idle.pop() if self._idle else await wire.Connection.open(self._model)
        told = await connection.ask(wire.request("POST", "/v1/chat/completions", body))
        self._idle.append(connection)
        answer = json.loads(told.body)["choices"][0]["message"]
        await self._writer.write(lambda store: store.add(session, answer))
        return answer["content"]


class _Client(asyncio.Protocol):
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._frames = wire.Frames()
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for asked in self._frames.feed(data):
            task = asyncio.get_running_loop().create_task(self._answer(asked))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, asked: wire.Message) -> None:
        self._transport.write(await self._gateway.answer(asked))


async def _serve(path: Path, model: int) -> None:
    gateway = Gateway(path, model)
    server = await asyncio.get_running_loop().create_server(lambda: _Client(gateway), "127.0.0.1", 0)
    print(f"listening on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=int, required=True)
    parser.add_argument("--store", type=Path, required=True)
    options = parser.parse_args()
    asyncio.run(_serve(options.store, options.model))


if __name__ == "__main__":
    main()
