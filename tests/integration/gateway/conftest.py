"""A gateway in this process, over HTTP on the loopback: a real store, real agents, a strict fake model server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from hermes_agent import settings
from hermes_agent.gateway import app
from hermes_agent.testing.fake_openai import FakeOpenAI

KEY = "owner-key-4f8a1c97d2e35b60"
PATIENT = 30.0


@dataclass
class Answered:
    """An answer whose body was read."""

    status: int
    headers: Any
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


class Site:
    """A gateway that listens, and a client of it."""

    def __init__(self, home: Path, fake: FakeOpenAI) -> None:
        self.home = home
        self.fake = fake
        self.gateway: app.Gateway
        self.url = ""
        self._runner: web.AppRunner
        self._http: aiohttp.ClientSession

    async def open(self, more: str = "") -> None:
        """Start on the home; `more` is appended to its config.yaml."""
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "config.yaml").write_text(
            f"model: {{default: fake, provider: custom, base_url: '{self.fake.base_url}', api_key: sk-test-model}}\n"
            f"platforms: {{api_server: {{key: {KEY}}}}}\n"
            f"{more or 'agent: {api_max_retries: 1}'}\n",
            encoding="utf-8",
        )
        chosen = settings.load(self.home)
        self.gateway = app.Gateway(self.home, chosen)
        await self.gateway.start()
        self._runner = web.AppRunner(app.build(self.gateway), handle_signals=False)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"
        self._http = aiohttp.ClientSession(auto_decompress=False)

    async def close(self) -> None:
        await self._http.close()
        self.fake.close()
        assert await self.gateway.drain(PATIENT)
        await self._runner.cleanup()
        await self.gateway.close()

    async def restart(self) -> None:
        """Stop in good order and start again on the same home, with the same settings."""
        await self._http.close()
        assert await self.gateway.drain(PATIENT)
        await self._runner.cleanup()
        await self.gateway.close()
        await self.open((self.home / "config.yaml").read_text(encoding="utf-8").split("\n", 2)[2])

    async def ask(
        self, method: str, path: str, body: Any = None, *, key: str | None = KEY, headers: dict[str, str] | None = None
    ) -> Answered:
        """Send a request and read its answer whole."""
        async with self.request(method, path, body, key=key, headers=headers) as answer:
            return Answered(answer.status, answer.headers, await answer.text())

    def request(
        self, method: str, path: str, body: Any = None, *, key: str | None = KEY, headers: dict[str, str] | None = None
    ) -> Any:
        """Send a request; an async context manager of aiohttp's response, for streams."""
        sent = dict(headers or {})
        if key is not None:
            sent["Authorization"] = f"Bearer {key}"
        data = None
        if body is not None:
            sent.setdefault("Content-Type", "application/json")
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._http.request(method, self.url + path, data=data, headers=sent)

    async def session(self, **fields: Any) -> str:
        """Make a session; returns its id."""
        answer = await self.ask("POST", "/api/sessions", fields)
        assert answer.status == 201, answer.text
        return answer.json["session"]["id"]

    async def chat(self, session_id: str, message: Any, **more: Any) -> Answered:
        """Send a message to a session and wait for the answer."""
        return await self.ask("POST", f"/api/sessions/{session_id}/chat", {"message": message}, **more)

    async def roles(self, session_id: str) -> list[tuple[str, Any]]:
        """What the session holds."""
        answer = await self.ask("GET", f"/api/sessions/{session_id}/messages")
        return [(row["role"], row["content"]) for row in answer.json["data"]]


@pytest.fixture
def fake():
    """A strict fake model server; no request may be refused."""
    with FakeOpenAI() as server:
        yield server
        assert server.violations == []


@pytest.fixture
async def site(hermes_home: Path, fake: FakeOpenAI) -> AsyncIterator[Site]:
    """A gateway in an empty home."""
    made = Site(hermes_home, fake)
    await made.open()
    yield made
    await made.close()


async def reached(event: Any) -> None:
    """Wait, without stopping the loop, until a held answer of the fake server has begun."""
    assert await asyncio.to_thread(event.wait, PATIENT)
