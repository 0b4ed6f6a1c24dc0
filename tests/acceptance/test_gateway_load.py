"""Clients with keys, a gateway that is killed under them, and the books afterwards.

`make soak` runs the long form.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import time
from collections import Counter
from contextlib import closing
from typing import Any

from hermes_agent.agent.run import MAX_CRASH_RESUMES
from hermes_agent.testing.fake_openai import FakeOpenAI, hold, text
from tests.acceptance import under_load
from tests.acceptance.under_load import KEY, Gateway, Load, Sent
from tests.acceptance.world import World

KILLS = 30 if os.environ.get("HERMES_SOAK") else 4
"""About two seconds each."""
MAX_ATTEMPTS = 2


def test_every_message_is_taken_once_and_answered_once_however_often_the_gateway_is_killed(
    hermes_home, unmeasured: None
):
    with FakeOpenAI(repeat=True) as fake, World(hermes_home, fake) as world, under_load.gateway(world) as gateway:
        load = Load(world, gateway, seed=int(time.time()))
        asyncio.run(load.run(KILLS))
        stopped = gateway.stop()
        assert (stopped.code, stopped.err) == (0, "")
        assert fake.violations == []
        found = under_load.look(world)
        books_are_right(load.sent, found)
        effects_are_single(load, found)
        assert load.faults == []
        print(summary(load, found))


def test_a_turn_that_no_process_survives_is_given_up_and_its_client_told(hermes_home, unmeasured: None):
    held = [hold() for _ in range(1 + MAX_CRASH_RESUMES)]
    with FakeOpenAI() as fake, World(hermes_home, fake) as world, under_load.gateway(world) as gateway:
        fake.extend(held)
        assert chat(gateway, "deadly", "respond-async")[0] == 202
        for answer in held:
            assert answer.reached.wait(30)
            gateway.kill()
            gateway.start()
        for _ in range(2):
            status, told = chat(gateway, "deadly", "wait=30")
            assert (status, told["completed"]) == (200, False)
            assert told["failure"]["reason"] == "poison"
        fake.extend([text("pong")])
        assert chat(gateway, "ping", "wait=30")[1]["message"]["content"] == "pong"
        assert gateway.stop().code == 0
        assert fake.violations == []
        assert [turn["resumes"] for turn in under_load.look(world)["turns"]] == [MAX_CRASH_RESUMES, 0]


def chat(gateway: Gateway, message: str, prefer: str) -> tuple[int, dict[str, Any]]:
    """Send a message under a key of its own, to a session of this test."""
    headers = {
        "Authorization": f"Bearer {KEY}", "Content-Type": "application/json",
        "Idempotency-Key": message, "Prefer": prefer,
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
    with closing(connection):
        connection.request("POST", "/api/sessions", json.dumps({"id": "s"}), headers)
        connection.getresponse().read()
        connection.request("POST", "/api/sessions/s/chat", json.dumps({"message": message}), headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def books_are_right(sent: list[Sent], found: dict[str, Any]) -> None:
    """One turn, one user row and one answer for each message; the answer is the one that its client was shown."""
    assert found["faults"] == []
    assert found["leases"] == 0
    turns = {turn["message_id"]: turn for turn in found["turns"]}
    assert len(turns) == len(found["turns"])
    assert set(turns) == {message.key for message in sent}
    rows = {name: {row["seq"]: row for row in listed} for name, listed in found["rows"].items()}
    for name, by_number in rows.items():
        assert sorted(by_number) == list(range(1, len(by_number) + 1)), name
    every = [row for by_number in rows.values() for row in by_number.values()]
    users = Counter(row["content"] for row in every if row["role"] == "user")
    answers = Counter(row["content"] for row in every if row["role"] == "assistant" and not row.get("tool_calls"))
    for message in sent:
        turn = turns[message.key]
        assert turn["session"] == message.session
        assert users.pop(message.text) == 1, message
        assert rows[message.session][turn["user_seq"]]["content"] == message.text
        assert turn["attempts"] <= MAX_ATTEMPTS, turn
        assert turn["resumes"] <= MAX_CRASH_RESUMES, turn
        assert len({*message.answers, *message.failures}) == 1, message
        if message.answers:
            assert turn["state"] == "done"
            assert rows[message.session][turn["end_seq"]]["content"] == message.answers[0]
            assert message.answers[0].endswith(f" to {message.text}")
            assert answers.pop(message.answers[0]) == 1
        else:
            assert (turn["state"], turn["reason"]) == ("failed", message.failures[0]), (message, turn)
            assert message.failures == ["poison"] * len(message.failures)
    assert not users, "messages that nobody sent"
    assert not [text for text in answers if text.startswith("answer ")], "answers that nobody was shown"


def effects_are_single(load: Load, found: dict[str, Any]) -> None:
    """No command ran twice, and each that is said to have run did."""
    seen = Counter(load.witness.read_text().split())
    assert not [key for key, times in seen.items() if times > 1]
    for key, state in found["calls"]:
        assert state in ("done", "unknown")
        assert seen[key] == 1 or state == "unknown", key


def summary(load: Load, found: dict[str, Any]) -> str:
    ends = Counter(turn["reason"] or turn["state"] for turn in found["turns"])
    resumes = Counter(turn["resumes"] for turn in found["turns"])
    tries = Counter(min(message.tries, 5) for message in load.sent)
    calls = Counter(state for _, state in found["calls"])
    return (
        f"{KILLS} kills, {len(load.sent)} messages: {dict(ends)}; resumed {dict(sorted(resumes.items()))};"
        f" sent {dict(sorted(tries.items()))} times; commands {dict(calls)}"
    )
