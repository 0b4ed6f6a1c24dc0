"""The adapter as embedders use it: a handler mounted on their own application, a store of theirs, nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from hermes_agent.gateway.config import PlatformConfig
from hermes_agent.gateway.platforms.api_server import APIServerAdapter
from hermes_agent.store.session_db import SessionDB
from hermes_agent.testing import replies
from hermes_agent.testing.fake_openai import FakeOpenAI

DM = "disk status?"


@pytest.fixture
def adapter(hermes_home: Path):
    """An adapter over a store in which a message waits that nobody answered."""
    with FakeOpenAI() as fake, SessionDB(hermes_home.parent / "own.db") as db:
        hermes_home.mkdir()
        (hermes_home / "config.yaml").write_text(
            f"model: {{default: fake, provider: custom, base_url: '{fake.base_url}', api_key: sk-test}}\n"
            "agent: {api_max_retries: 1}\n"
        )
        db.create_session("s", "api_server")
        db.append_message("s", "user", content=DM)
        made = APIServerAdapter(PlatformConfig(enabled=True))
        made._session_db = db
        yield made, fake, db
        made.close()
        assert fake.violations == []


async def ask(adapter: APIServerAdapter, body: object, session: str = "s") -> tuple[int, dict]:
    app = web.Application()
    app.router.add_post("/api/sessions/{session_id}/chat", adapter._handle_session_chat)
    async with TestClient(TestServer(app)) as client:
        answer = await client.post(f"/api/sessions/{session}/chat", json=body)
        return answer.status, await answer.json()


async def test_a_real_turn_that_fails_once_stores_the_message_once(adapter):
    """The retry goes on from the row that stands there; neither attempt stores it again."""
    made, fake, db = adapter
    fake.extend([replies.error(429, "slow down"), replies.text("2+2 is 4")])
    status, body = await ask(made, {"message": DM})
    assert (status, body["message"]["content"], body["attempts"]) == (200, "2+2 is 4", 2)
    assert [(row["role"], row["content"]) for row in db.get_messages("s")] == [("user", DM), ("assistant", "2+2 is 4")]


async def test_a_wall_is_prose_and_typed_fields(adapter):
    made, fake, db = adapter
    fake.extend([replies.error(401, "no such key")])
    status, body = await ask(made, {"message": DM})
    assert (status, body["completed"], body["failure"]["reason"]) == (200, False, "auth")
    assert not body["failure"]["retryable"]
    assert "key" in body["message"]["content"]
    assert len(fake.requests) == 1
    assert [row["role"] for row in db.get_messages("s")] == ["user"]


async def test_what_cannot_be_answered_is_an_error_object(adapter):
    made, _, _ = adapter
    assert (await ask(made, {"message": DM}, "nowhere"))[1]["error"]["code"] == "session_not_found"
    assert (await ask(made, {}))[1]["error"]["code"] == "missing_message"
    assert (await ask(made, {"message": [None]}))[0] == 400


async def test_without_a_model_the_turn_says_so_and_asks_nobody(adapter, hermes_home):
    made, fake, _ = adapter
    (hermes_home / "config.yaml").write_text("model: {}\n")
    status, body = await ask(made, {"message": DM})
    assert (status, body["failure"]["reason"], fake.requests) == (200, "missing_config", [])
    assert "no model is configured" in body["message"]["content"]
