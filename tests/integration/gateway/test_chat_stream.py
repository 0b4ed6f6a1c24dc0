"""A session's chat as a stream, its own events, and its stop."""

from __future__ import annotations

import asyncio

import pytest

from hermes_agent.gateway.keys import Scope
from hermes_agent.testing import replies
from tests.integration.gateway.conftest import reached
from tests.integration.gateway.listening import Ear, listen, names, said


@pytest.fixture
async def session(site):
    return await site.session(id="s")


async def talk(site, message="hi", **more):
    body = {"message": message, **more.pop("body", {})}
    return await listen(site, "POST", "/api/sessions/s/chat/stream", body, **more)


class TestAnAnswer:
    async def test_the_frames_of_an_answer(self, site, session):
        site.fake.extend([replies.text("hello there", chunks=3, reasoning="hm")])
        heard = await talk(site)
        told = [name for name in names(heard) if name != "reasoning.available"]
        assert [name for name in told if name != "tool.progress"] == [
            "run.started", "message.started", "assistant.delta", "assistant.completed", "run.completed", "done",
        ]  # fmt: skip
        assert "tool.progress" in told
        assert [frame.data["seq"] for frame in heard] == list(range(1, len(heard) + 1))
        for frame in heard:
            assert {"session_id", "run_id", "seq", "ts"} <= frame.data.keys()
        by_name = {frame.name: frame.data for frame in heard}
        assert by_name["run.started"]["user_message"] == {"role": "user", "content": "hi"}
        assert by_name["assistant.completed"]["content"] == said(heard) == "hello there"
        assert by_name["assistant.completed"]["completed"] is True
        assert by_name["run.completed"]["usage"]["total_tokens"] == 110
        assert by_name["run.completed"]["messages"] == [{"role": "assistant", "content": "hello there"}]
        assert by_name["tool.progress"]["tool_name"] == "_thinking"
        run = await site.ask("GET", f"/v1/runs/{by_name['run.started']['run_id']}")
        assert run.json["output"] == "hello there"

    async def test_tools_and_what_is_said_between_them(self, site, session):
        ask = replies.calls(replies.call("todo", {"todos": []}), content="One moment.")
        site.fake.extend([ask, replies.calls(replies.call("read_file", {"path": "/no/such"})), replies.text("done")])
        heard = await talk(site)
        assert names(heard) == [
            "run.started", "message.started", "assistant.delta", "assistant.commentary", "tool.started",
            "tool.completed", "tool.started", "tool.failed", "assistant.delta", "assistant.completed", "run.completed",
            "done",
        ]  # fmt: skip
        commentary = next(frame.data for frame in heard if frame.name == "assistant.commentary")
        assert commentary["text"] == "One moment."

    async def test_a_failed_turn_is_prose_and_a_typed_failure(self, site, session):
        site.fake.extend([replies.error(401, "no such key")])
        heard = await talk(site)
        assert names(heard)[-3:] == ["assistant.completed", "run.failed", "done"]
        by_name = {frame.name: frame.data for frame in heard}
        assert by_name["assistant.completed"]["completed"] is False
        assert by_name["assistant.completed"]["content"]
        assert by_name["run.failed"]["failure"]["reason"] == "auth"

    async def test_a_failure_that_passes_is_tried_once_more_and_its_words_are_void(self, site, session):
        broken = replies.hold("lost", replies.raw_sse([], cut=True))
        site.fake.extend([broken, replies.text("found")])
        async with Ear(site, "POST", "/api/sessions/s/chat/stream", {"message": "hi"}) as ear:
            await ear.until("assistant.delta")
            broken.release()
            heard = await ear.rest()
        assert "assistant.void" in names(heard)
        assert said(heard) == "found"
        assert heard[-2].data["attempts"] == 2
        assert [text for _, text in await site.roles("s")] == ["hi", "found"]

    async def test_who_hangs_up_changes_nothing_and_can_listen_again(self, site, session):
        held = replies.hold("half ", replies.text("whole"))
        site.fake.extend([held])
        async with Ear(site, "POST", "/api/sessions/s/chat/stream", {"message": "hi"}) as ear:
            run_id = (await ear.until("assistant.delta")).data["run_id"]
            seen = [frame.id for frame in ear.heard if frame.id][-1]
        held.release()
        heard = await listen(site, "GET", f"/v1/runs/{run_id}/events", headers={"Last-Event-ID": seen})
        assert names(heard) == ["message.void", "message.delta", "run.completed"]
        assert said(heard) == "half whole"
        assert [text for _, text in await site.roles("s")] == ["hi", "half whole"]

    async def test_a_repeat_hears_the_whole_stream_again(self, site, session):
        site.fake.extend([replies.text("once")])
        key = {"Idempotency-Key": "k"}
        first = await talk(site, headers=key)
        await site.restart()
        again = await talk(site, headers=key)
        assert (names(again), said(again)) == (names(first), "once")
        assert [frame.id for frame in again if frame.id][-1] == [frame.id for frame in first if frame.id][-1]
        async with Ear(site, "POST", "/api/sessions/s/chat/stream", {"message": "other"}, headers=key) as ear:
            assert ear.answer.status in (409, 422)
        assert len(site.fake.requests) == 1

    async def test_a_message_that_waits_says_so_first(self, site, session):
        held = replies.hold()
        site.fake.extend([held, replies.text("two")])
        first = asyncio.create_task(talk(site, "a"))
        await reached(held.reached)
        async with Ear(site, "POST", "/api/sessions/s/chat/stream", {"message": "b"}) as ear:
            assert (await ear.next()).name == "run.queued"
            held.release()
            heard = await ear.rest()
        await first
        assert names(heard)[:3] == ["run.queued", "run.started", "message.started"]
        assert said(heard) == "two"

    async def test_a_session_that_is_not_there_is_404(self, site):
        async with Ear(site, "POST", "/api/sessions/none/chat/stream", {"message": "hi"}) as ear:
            assert ear.answer.status == 404


class TestStopping:
    async def test_a_session_stops_what_runs_and_keeps_what_waits(self, site, session):
        held = replies.hold("so far")
        site.fake.extend([held, replies.text("next")])
        running = asyncio.create_task(talk(site, "a"))
        await reached(held.reached)
        waiting = asyncio.create_task(talk(site, "b"))
        async with asyncio.timeout(20):
            while len((await site.ask("GET", "/api/deliveries")).json["data"]) < 2:
                pass
        stopped = (await site.ask("POST", "/api/sessions/s/stop")).json["stopped"]
        assert len(stopped) == 1
        heard = await running
        assert names(heard)[-3:] == ["assistant.completed", "run.cancelled", "done"]
        assert heard[-3].data["interrupted"] is True
        assert heard[-2].data["run_id"] == stopped[0]["run_id"]
        held.release()
        assert said(await waiting) == "next"
        assert (await site.ask("POST", "/api/sessions/s/stop")).json["stopped"] == []
        assert (await site.ask("POST", "/api/sessions/none/stop")).status == 404

    async def test_others_work_is_not_stopped(self, site, session):
        one = site.gateway.own_keys.issue("one", [Scope.DM])
        held = replies.hold()
        site.fake.extend([held])
        running = asyncio.create_task(talk(site, "a"))
        await reached(held.reached)
        assert (await site.ask("POST", "/api/sessions/s/stop", key=one)).json["stopped"] == []
        held.release()
        assert names(await running)[-2] == "run.completed"


class TestEvents:
    async def test_the_events_of_a_session_are_numbered_without_gaps_and_kept(self, site, session):
        site.fake.extend([replies.calls(replies.call("todo", {"todos": []})), replies.text("ok"), replies.text("2")])
        await site.chat("s", "a")
        await site.restart()
        async with Ear(site, "GET", "/api/sessions/s/events?after=0") as ear:
            await ear.until("turn.done")
            await site.chat("s", "b")
            await ear.until("turn.done")
            heard = [frame for frame in ear.heard if frame.id]
        assert [int(frame.id) for frame in heard] == list(range(1, len(heard) + 1))
        kinds = [frame.event for frame in heard]
        assert kinds[:2] == ["turn.running", "message"]
        rows = [frame.data["data"] for frame in heard if frame.event == "message"]
        assert [row["role"] for row in rows] == ["user", "assistant", "tool", "assistant", "user", "assistant"]
        async with Ear(site, "GET", "/api/sessions/s/events", headers={"Last-Event-ID": heard[-2].id}) as ear:
            assert (await ear.until("turn.done")).id == heard[-1].id

    async def test_without_a_place_it_tells_what_happens_from_now_on(self, site, session):
        site.fake.extend([replies.text("1"), replies.text("2")])
        await site.chat("s", "a")
        async with Ear(site, "GET", "/api/sessions/s/events") as ear:
            await ear.until(lambda frame: frame.comment == "open")
            await site.chat("s", "b")
            first = await ear.until("message")
        assert first.data["data"]["content"] == "b"
        assert (await site.ask("GET", "/api/sessions/none/events")).status == 404
