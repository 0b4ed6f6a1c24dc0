"""A disk that fills up: said at once, nothing half done, and all goes on when there is room again."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_agent.testing import replies
from hermes_agent.testing.fake_openai import FakeOpenAI
from tests import faults
from tests.integration.gateway.conftest import KEY, PATIENT

SERVE = """
import asyncio
from pathlib import Path
from aiohttp import web
from hermes_agent import settings
from hermes_agent.gateway import app

async def main():
    home = Path(sys.argv[1])
    gateway = app.Gateway(home, settings.load(home))
    await gateway.start()
    runner = web.AppRunner(app.build(gateway), handle_signals=False)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    say(runner.addresses[0][1])
    while True:
        word = await asyncio.to_thread(hear)
        full = word == "fill"
        arm("state.db", WRITE, times=10**6 if full else 0, code=errno.ENOSPC)
        say(word)

asyncio.run(main())
"""


class Server:
    """A gateway in a process of its own whose disk can be filled."""

    def __init__(self, child: faults.Child) -> None:
        self._child = child
        self._url = f"http://127.0.0.1:{child.hear()}"

    def turn(self, word: str) -> None:
        self._child.say(word)
        assert self._child.hear() == word

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENT) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faults.build_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def fake() -> Iterator[FakeOpenAI]:
    with FakeOpenAI() as server:
        yield server
        assert server.violations == []


@pytest.fixture
def server(hermes_home: Path, fake: FakeOpenAI, shim: Path) -> Iterator[Server]:
    hermes_home.mkdir()
    (hermes_home / "config.yaml").write_text(
        f"model: {{default: fake, provider: custom, base_url: '{fake.base_url}', api_key: sk-test-model}}\n"
        f"platforms: {{api_server: {{key: {KEY}}}}}\n"
    )
    with faults.Child(SERVE, hermes_home, shim=shim) as child:
        yield Server(child)


def rows(home: Path) -> list[tuple[str, Any]]:
    code = 'db = SessionDB(sys.argv[1])\nfor row in db.get_messages("s"):\n    say(row["role"], row["content"])\n'
    return [tuple(line.split(" ", 1)) for line in faults.run(code, home / "state.db")]


def test_a_message_that_cannot_be_stored_is_refused_and_can_be_sent_again(server, fake, hermes_home):
    fake.extend([replies.text("fine")])
    assert server.ask("POST", "/api/sessions", {"id": "s"})[0] == 201
    server.turn("fill")
    status, body = server.ask("POST", "/api/sessions/s/chat", {"message": "hi"})
    assert (status, body["error"]["failure"]["reason"]) == (507, "store_full")
    assert "disk" in body["error"]["failure"]["action"]
    assert server.ask("GET", "/health")[0] == 200
    server.turn("free")
    status, body = server.ask("POST", "/api/sessions/s/chat", {"message": "hi"})
    assert (status, body["message"]["content"]) == (200, "fine")
    assert rows(hermes_home) == [("user", "hi"), ("assistant", "fine")]


def test_a_turn_whose_answer_cannot_be_stored_says_so_and_is_answered_when_there_is_room(server, fake, hermes_home):
    held = replies.hold()
    fake.extend([held, replies.text("fine")])
    assert server.ask("POST", "/api/sessions", {"id": "s"})[0] == 201
    told: list[tuple[int, Any]] = []
    chat = threading.Thread(target=lambda: told.append(server.ask("POST", "/api/sessions/s/chat", {"message": "hi"})))
    chat.start()
    assert held.reached.wait(PATIENT)
    server.turn("fill")
    held.release()
    chat.join(PATIENT)
    status, body = told[0]
    assert (status, body["error"]["failure"]["reason"]) == (507, "store_full")
    server.turn("free")
    deadline = threading.Event()
    for _ in range(300):
        found = rows(hermes_home)
        if len(found) > 1:
            break
        deadline.wait(0.1)
    assert found == [("user", "hi"), ("assistant", "fine")]


def test_the_store_is_sound_after_it(server, fake, hermes_home):
    server.ask("POST", "/api/sessions", {"id": "s"})
    server.turn("fill")
    for number in range(5):
        assert server.ask("POST", "/api/sessions/s/chat", {"message": f"m{number}"})[0] == 507
    server.turn("free")
    assert faults.look(hermes_home / "state.db", "PRAGMA integrity_check") == [["ok"]]
