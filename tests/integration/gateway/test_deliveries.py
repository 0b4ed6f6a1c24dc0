"""Deliveries: who sent a message and did not wait can ask what became of it."""

from __future__ import annotations

import asyncio

import pytest

from hermes_agent.gateway.keys import Scope
from hermes_agent.testing import replies
from tests.integration.gateway.conftest import reached

LATER = {"Prefer": "respond-async"}


async def send(site, message="hi", session="s", **more):
    body = {"message": message, **more.pop("body", {})}
    answer = await site.ask("POST", f"/api/sessions/{session}/chat", body, headers=LATER, **more)
    assert answer.status in (200, 202), answer.text  # a quick model may be done with it already
    return answer.json["delivery_id"]


async def look(site, name, wait=None, **more):
    query = "" if wait is None else f"?wait={wait}"
    return await site.ask("GET", f"/api/deliveries/{name}{query}", **more)


@pytest.fixture
async def session(site):
    return await site.session(id="s")


async def test_a_message_is_followed_from_queue_to_answer_by_either_id(site, session):
    held = replies.hold(then=replies.text("one"))
    site.fake.extend([held, replies.text("two")])
    first = await send(site, "a", body={"message_id": "m1"})
    await reached(held.reached)
    second = await send(site, "b", body={"message_id": "m2"})
    assert (await look(site, first)).json["status"] == "running"
    waiting = (await look(site, "m2")).json
    assert (waiting["delivery_id"], waiting["status"], waiting["final"]) == (second, "queued", False)
    held.release()
    answered = (await look(site, "m2", wait=20)).json
    assert (answered["status"], answered["reply"], answered["message_id"]) == ("completed", "two", "m2")
    assert answered["usage"]["input_tokens"] == 100
    assert answered["finished_at"] >= answered["created_at"]
    done = (await look(site, first)).json
    assert (done["reply"], done["attempts"], done["completed"]) == ("one", 1, True)
    await site.restart()
    assert (await look(site, first)).json == done


async def test_waiting_ends_with_the_time_that_was_given(site, session):
    held = replies.hold()
    site.fake.extend([held])
    delivery = await send(site)
    answer = await look(site, delivery, wait="0.05")
    assert (answer.status, answer.json["final"], answer.headers["Retry-After"]) == (200, False, "1")
    for wrong in ("x", "-1", "1e9", "nan"):
        assert (await look(site, delivery, wait=wrong)).json["error"]["code"] == "invalid_wait"
    waiting = [asyncio.create_task(look(site, delivery, wait=20)) for _ in range(4)]
    held.release()
    assert {(await answer).json["reply"] for answer in waiting} == {"released"}


async def test_a_failure_is_told_with_its_reason(site, session):
    site.fake.extend([replies.error(402, "no money")])
    answer = (await look(site, await send(site), wait=20)).json
    assert (answer["status"], answer["failure"]["reason"], answer["failure"]["retryable"]) == (
        "failed", "billing", False,
    )  # fmt: skip
    assert answer["reply"]


async def test_a_waiting_message_is_withdrawn_and_a_running_one_stopped(site, session):
    held = replies.hold()
    site.fake.extend([held])
    first = await send(site, "a")
    await reached(held.reached)
    second = await send(site, "b")
    gone = await site.ask("POST", f"/api/deliveries/{second}/cancel")
    assert (gone.status, gone.json["status"], gone.json["failure"]["reason"]) == (200, "cancelled", "interrupted")
    stopped = await site.ask("POST", f"/api/deliveries/{first}/cancel")
    assert stopped.json["status"] in ("stopping", "cancelled")
    assert (await look(site, first, wait=20)).json["state"] == "cancelled"
    again = await site.ask("POST", f"/api/deliveries/{first}/cancel")
    assert (again.status, again.json["status"]) == (200, "cancelled")
    held.release()
    assert [text for role, text in await site.roles("s") if role == "user"] == ["a"]


async def test_a_message_that_is_late_is_not_answered(site, session):
    held = replies.hold()
    site.fake.extend([held])
    first = await send(site, "a")
    await reached(held.reached)
    late = await send(site, "b", body={"deadline_s": 0.1})
    answer = (await look(site, late, wait=20)).json
    assert (answer["status"], answer["state"], answer["failure"]["reason"]) == ("failed", "expired", "deadline")
    held.release()
    await look(site, first, wait=20)
    assert len(site.fake.requests) == 1


async def test_open_ones_are_listed_to_their_sender(site, session):
    ring = site.gateway.own_keys
    one, two = ring.issue("one", [Scope.DM]), ring.issue("two", [Scope.DM])
    held = replies.hold()
    site.fake.extend([held, replies.text("b"), replies.text("c")])
    mine = [await send(site, "a", key=one), await send(site, "b", key=one)]
    other = await send(site, "c", key=two)
    listed = await site.ask("GET", "/api/deliveries", key=one)
    assert [row["delivery_id"] for row in listed.json["data"]] == mine
    assert [row["delivery_id"] for row in (await site.ask("GET", "/api/deliveries")).json["data"]] == [*mine, other]
    assert len((await site.ask("GET", "/api/deliveries?limit=1", key=one)).json["data"]) == 1
    for method, path in (("GET", f"/{other}"), ("POST", f"/{other}/cancel"), ("GET", "/m1"), ("GET", "/turn_0")):
        answer = await site.ask(method, f"/api/deliveries{path}", key=one)
        assert (answer.status, answer.json["error"]["code"]) == (404, "delivery_not_found")
    held.release()
    await look(site, other, wait=20)
    assert (await site.ask("GET", "/api/deliveries", key=one)).json["data"] == []


async def test_the_same_id_of_two_senders_is_two_messages(site, session):
    ring = site.gateway.own_keys
    one, two = ring.issue("one", [Scope.DM]), ring.issue("two", [Scope.DM])
    site.fake.extend([replies.text("to one"), replies.text("to two")])
    await send(site, "a", key=one, body={"message_id": "m"})
    assert (await look(site, "m", wait=20, key=one)).json["reply"] == "to one"
    await send(site, "b", key=two, body={"message_id": "m"})
    assert (await look(site, "m", wait=20, key=two)).json["reply"] == "to two"
    assert (await look(site, "m", key=one)).json["reply"] == "to one"
