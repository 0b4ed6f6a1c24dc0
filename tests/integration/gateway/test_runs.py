"""Runs: begun once, told to whoever began them, as often as wished and for as long as they are kept."""

from __future__ import annotations

import asyncio
import json

import pytest

from hermes_agent.gateway.keys import Scope
from hermes_agent.testing import replies
from tests.integration.gateway.conftest import Site, reached
from tests.integration.gateway.listening import Ear, listen, names, said


async def begin(site, text="hi", **more):
    headers = {"Idempotency-Key": more.pop("idempotency")} if "idempotency" in more else None
    key = {"key": more.pop("key")} if "key" in more else {}
    return await site.ask("POST", "/v1/runs", {"input": text, **more}, headers=headers, **key)


async def ended(site, run_id):
    await listen(site, "GET", f"/v1/runs/{run_id}/events")
    return (await site.ask("GET", f"/v1/runs/{run_id}")).json


class TestBeginning:
    async def test_a_run_is_taken_and_told_to_its_end(self, site):
        site.fake.extend([replies.text("hello")])
        taken = await begin(site)
        assert taken.status == 202
        fields = taken.json
        assert (fields["status"], fields["replayed"]) == ("started", False)
        assert fields["run_id"] == fields["session_id"]
        run = await ended(site, fields["run_id"])
        assert (run["object"], run["status"], run["output"]) == ("hermes.run", "completed", "hello")
        assert run["usage"] == {
            "input_tokens": 100, "output_tokens": 10, "total_tokens": 110,
            "cache_read_tokens": 0, "cache_write_tokens": 0,
        }  # fmt: skip
        assert run["finished_at"] >= run["created_at"]
        assert (run["completed"], run["interrupted"], run["last_event"]) == (True, False, "run.completed")

    async def test_what_cannot_be_work_is_refused(self, site):
        for body in (
            {}, {"input": ""}, {"input": []}, {"input": [None, None]}, {"input": 5},
            {"input": "x", "session_id": "a/b"}, {"input": "x", "deadline_s": 0},
            {"input": [{"role": "assistant", "content": "x"}]},
            {"input": "x", "conversation_history": [{"role": "tool", "content": "x"}]}, {"input": "x", "author": 1},
        ):  # fmt: skip
            answer = await site.ask("POST", "/v1/runs", body)
            assert answer.status == 400, body
        lost = await begin(site, previous_response_id="resp_" + "0" * 28)
        assert (lost.status, lost.json["error"]["code"]) == (404, "response_not_found")
        assert (await site.ask("GET", "/api/deliveries")).json["data"] == []

    async def test_a_named_session_is_made_and_gone_on_with(self, site):
        site.fake.extend([replies.text("one"), replies.text("two"), replies.text("three")])
        first = (await begin(site, "a", session_id="mine")).json
        await ended(site, first["run_id"])
        second = (await begin(site, "b", session_id="mine")).json
        await ended(site, second["run_id"])
        assert (first["session_id"], second["session_id"]) == ("mine", "mine")
        assert [text for _, text in await site.roles("mine")] == ["a", "one", "b", "two"]
        third = (await begin(site, "c", previous_response_id=first["run_id"].replace("run_", "resp_")[:33])).json
        await ended(site, third["run_id"])
        assert third["session_id"] == "mine"

    async def test_a_new_session_begins_with_the_history_that_came_along(self, site):
        site.fake.extend([replies.text("4")])
        history = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
        run = (await begin(site, [{"role": "user", "content": "2+2"}], conversation_history=history)).json
        await ended(site, run["run_id"])
        assert [text for _, text in await site.roles(run["session_id"])] == ["1+1", "2", "2+2", "4"]
        assert [row["content"] for row in site.fake.wire[1:]] == ["1+1", "2", "2+2"]

    async def test_a_failed_run_says_why_and_whether_to_try_again(self, site):
        site.fake.extend([replies.error(401, "no such key")])
        run = await ended(site, (await begin(site)).json["run_id"])
        assert run["status"] == "failed"
        assert run["failure"]["reason"] == "auth"
        assert run["failure"]["retryable"] is False
        assert run["failure"]["action"]
        assert "output" not in run

    async def test_a_failure_that_passes_is_tried_once_more(self, site):
        site.fake.extend([replies.error(500), replies.text("well again")])
        run = await ended(site, (await begin(site)).json["run_id"])
        assert (run["status"], run["output"], run["attempts"]) == ("completed", "well again", 2)

    async def test_what_is_late_has_failed(self, site):
        held = replies.hold()
        site.fake.extend([held])
        run_id = (await begin(site, deadline_s=0.2)).json["run_id"]
        run = await ended(site, run_id)
        assert (run["status"], run["failure"]["reason"]) == ("failed", "deadline")
        held.release()


class TestRepeating:
    async def test_the_same_key_is_the_same_run_however_many_come_at_once(self, site):
        held = replies.hold(then=replies.text("once"))
        site.fake.extend([held])
        found = await asyncio.gather(*(begin(site, idempotency="k1") for _ in range(5)))
        assert {answer.status for answer in found} == {202}
        assert len({answer.json["run_id"] for answer in found}) == 1
        assert sorted(answer.json["replayed"] for answer in found) == [False, True, True, True, True]
        assert sum(answer.headers.get("Idempotency-Replayed") == "true" for answer in found) == 4
        held.release()
        run = await ended(site, found[0].json["run_id"])
        again = await begin(site, idempotency="k1")
        assert (again.json["run_id"], again.json["status"]) == (run["run_id"], "completed")
        other = await begin(site, "other", idempotency="k1")
        assert (other.status, other.json["error"]["code"]) == (409, "idempotency_key_conflict")
        assert len(site.fake.requests) == 1

    async def test_everything_survives_a_restart_with_a_key_or_without(self, site):
        site.fake.extend([replies.text("one"), replies.text("two")])
        keyed = (await begin(site, idempotency="k1")).json
        before = await ended(site, keyed["run_id"])
        plain = (await begin(site)).json
        told = await listen(site, "GET", f"/v1/runs/{plain['run_id']}/events")
        await site.restart()
        assert (await site.ask("GET", f"/v1/runs/{keyed['run_id']}")).json == before
        assert (await site.ask("GET", f"/v1/runs/{plain['run_id']}")).json["output"] == "two"
        again = await begin(site, idempotency="k1")
        assert (again.json["run_id"], again.json["replayed"]) == (keyed["run_id"], True)
        later = await listen(site, "GET", f"/v1/runs/{plain['run_id']}/events")
        assert names(later) == names(told)
        assert said(later) == said(told) == "two"
        assert len(site.fake.requests) == 2


class TestEvents:
    async def test_the_frames_of_a_run_with_a_tool(self, site):
        (site.home / "note.txt").write_text("seven")
        ask = replies.calls(replies.call("read_file", {"path": str(site.home / "note.txt")}), content="Let me look.")
        site.fake.extend([ask, replies.text("It says seven.", chunks=4, reasoning="easy")])
        run_id = (await begin(site)).json["run_id"]
        heard = await listen(site, "GET", f"/v1/runs/{run_id}/events")
        assert (heard[0].comment, heard[-1].comment) == ("open", "stream closed")
        spoken = [frame for frame in heard if not frame.name.startswith("reasoning.")]
        assert names(spoken) == [
            "run.started", "message.delta", "message.interim", "tool.started", "tool.completed", "message.delta",
            "run.completed",
        ]  # fmt: skip
        assert [frame.data["text"] for frame in heard if frame.name == "reasoning.available"] == ["easy"]
        for frame in heard[1:-1]:
            assert frame.data["run_id"] == run_id
            assert {"event", "timestamp", "seq", "session_id"} <= frame.data.keys()
            assert frame.id in ("", str(frame.data["seq"]))
        numbers = [int(frame.id) for frame in heard if frame.id]
        assert numbers == sorted(set(numbers))
        by_name = {frame.name: frame.data for frame in heard if frame.name}
        assert by_name["tool.started"]["tool"] == "read_file"
        assert by_name["tool.started"]["preview"] == str(site.home / "note.txt")
        assert by_name["tool.completed"]["error"] is False
        assert "seven" in by_name["tool.completed"]["preview"]
        assert by_name["run.completed"]["output"] == said(heard) == "It says seven."

    async def test_who_comes_back_hears_what_follows_at_any_time(self, site):
        held = replies.hold("half of ")
        site.fake.extend([replies.calls(replies.call("todo", {"todos": []})), held])
        run_id = (await begin(site)).json["run_id"]
        path = f"/v1/runs/{run_id}/events"
        async with Ear(site, "GET", path) as ear:
            await ear.until("message.delta")
            seen = [frame.id for frame in ear.heard if frame.id][-1]
        async with Ear(site, "GET", path, headers={"Last-Event-ID": seen}) as back:
            await back.until("message.delta")
            assert names(back.heard) == ["message.void", "message.delta"]
            held.release()
            rest = await back.rest()
        assert said(rest) == "half of released"
        whole = await listen(site, "GET", path)
        for query in ("last_seq", "after"):
            for frame in [frame for frame in whole if frame.id]:
                later = await listen(site, "GET", f"{path}?{query}={frame.id}")
                assert [f.id for f in later if f.id][:-1] == [
                    f.id for f in whole if f.id and int(f.id) > int(frame.id)
                ][:-1]
                assert later[-2].name == "run.completed"

    async def test_every_watcher_hears_the_whole_turn_and_going_away_changes_nothing(self, site):
        held = replies.hold("a")
        site.fake.extend([held])
        run_id = (await begin(site)).json["run_id"]
        path = f"/v1/runs/{run_id}/events"
        async with Ear(site, "GET", path) as early:
            await early.until("message.delta")
            watchers = [asyncio.create_task(listen(site, "GET", path)) for _ in range(5)]
        await reached(held.reached)
        held.release()
        for heard in await asyncio.gather(*watchers):
            assert said(heard) == "areleased"
            assert names(heard)[-1] == "run.completed"

    async def test_words_of_an_attempt_that_failed_are_void(self, site):
        broken = replies.hold("lost words", replies.raw_sse([], cut=True))
        site.fake.extend([broken, replies.text("found")])
        run_id = (await begin(site)).json["run_id"]
        async with Ear(site, "GET", f"/v1/runs/{run_id}/events") as ear:
            await ear.until("message.delta")
            broken.release()
            heard = await ear.rest()
        assert said(heard) == "found"
        assert {frame.data["attempt"] for frame in heard if frame.name == "message.delta"} == {1, 2}
        assert "message.void" in names(heard)
        assert heard[-2].data["attempts"] == 2

    async def test_secrets_in_calls_are_not_shown(self, site):
        secret = "sk-CANARY00112233445566"
        ask = replies.calls(replies.call("read_file", {"path": f"/nowhere/{secret}"}))
        site.fake.extend([ask, replies.text("no")])
        run_id = (await begin(site)).json["run_id"]
        heard = await listen(site, "GET", f"/v1/runs/{run_id}/events")
        tools = [frame.data for frame in heard if frame.name.startswith("tool.")]
        assert len(tools) == 2
        assert secret not in json.dumps(tools)

    async def test_a_silent_run_gives_signs_of_life(self, hermes_home, fake):
        site = Site(hermes_home, fake)
        await site.open("gateway: {heartbeat: 0.05}")
        held = replies.hold()
        fake.extend([held])
        run_id = (await begin(site)).json["run_id"]
        async with Ear(site, "GET", f"/v1/runs/{run_id}/events") as ear:
            await ear.until(lambda frame: frame.comment == "keepalive")
            held.release()
            await ear.rest()
        await site.close()


class TestStopping:
    async def test_a_run_is_stopped_and_stopping_again_is_no_fault(self, site):
        held = replies.hold("so far")
        site.fake.extend([held])
        run_id = (await begin(site)).json["run_id"]
        await reached(held.reached)
        stopped = await site.ask("POST", f"/v1/runs/{run_id}/stop")
        assert (stopped.status, stopped.json["status"] in ("stopping", "cancelled")) == (200, True)
        run = await ended(site, run_id)
        assert (run["status"], run["interrupted"]) == ("cancelled", True)
        again = await site.ask("POST", f"/v1/runs/{run_id}/stop")
        assert (again.status, again.json["status"]) == (200, "cancelled")
        held.release()

    async def test_a_stop_right_after_the_start_is_not_lost(self, site):
        held = replies.hold()
        site.fake.extend([held] * 5)
        for _ in range(5):
            run_id = (await begin(site)).json["run_id"]
            await site.ask("POST", f"/v1/runs/{run_id}/stop")
            assert (await ended(site, run_id))["status"] == "cancelled"
        held.release()

    async def test_a_run_that_waits_is_withdrawn(self, site):
        held = replies.hold()
        site.fake.extend([held])
        first = (await begin(site, session_id="s")).json
        await reached(held.reached)
        second = (await begin(site, "two", session_id="s")).json
        assert second["status"] == "queued"
        assert (await site.ask("GET", f"/v1/runs/{second['run_id']}")).json["status"] == "queued"
        async with Ear(site, "GET", f"/v1/runs/{second['run_id']}/events") as ear:
            await ear.until("run.queued")
            stopped = await site.ask("POST", f"/v1/runs/{second['run_id']}/stop")
            assert stopped.json["status"] == "cancelled"
            heard = await ear.rest()
        assert names(heard) == ["run.queued", "run.cancelled"]
        held.release()
        assert (await ended(site, first["run_id"]))["status"] == "completed"
        assert [text for role, text in await site.roles("s") if role == "user"] == ["hi"]


class TestSteering:
    async def test_a_word_reaches_the_model_with_its_next_call(self, site):
        held = replies.hold(then=replies.calls(replies.call("todo", {"todos": []})))
        site.fake.extend([held, replies.text("ok")])
        run_id = (await begin(site)).json["run_id"]
        async with Ear(site, "GET", f"/v1/runs/{run_id}/events") as ear:
            await reached(held.reached)
            answer = await site.ask("POST", f"/v1/runs/{run_id}/steer", {"input": "be quick"})
            assert (answer.status, answer.json["accepted"]) == (200, True)
            held.release()
            steered = await ear.until("run.steered")
            await ear.rest()
        assert steered.data["text"] == "be quick"
        assert site.fake.wire[-1]["content"] == "be quick"

    async def test_what_does_not_run_cannot_be_steered(self, site):
        site.fake.extend([replies.text("done")])
        run_id = (await begin(site)).json["run_id"]
        await ended(site, run_id)
        late = await site.ask("POST", f"/v1/runs/{run_id}/steer", {"text": "hm"})
        assert (late.status, late.json["error"]["code"]) == (409, "run_not_accepting_steer")
        empty = await site.ask("POST", f"/v1/runs/{run_id}/steer", {})
        assert (empty.status, empty.json["error"]["code"]) == (400, "invalid_steer_input")


class TestWhoMaySee:
    async def test_a_run_is_its_beginners_and_the_overseers_alone(self, site):
        site.fake.extend([replies.text("mine")])
        one = site.gateway.own_keys.issue("one", [Scope.RUN, Scope.APPROVE])
        two = site.gateway.own_keys.issue("two", [Scope.RUN, Scope.APPROVE])
        run_id = (await begin(site, key=one)).json["run_id"]
        await ended(site, run_id)
        paths = [("GET", ""), ("GET", "/events"), ("POST", "/stop"), ("POST", "/steer"), ("POST", "/approval")]
        for method, path in paths:
            body = {"input": "x", "choice": "once"} if method == "POST" else None
            answer = await site.ask(method, f"/v1/runs/{run_id}{path}", body, key=two)
            assert (answer.status, answer.json["error"]["code"]) == (404, "run_not_found"), path
        assert (await site.ask("GET", f"/v1/runs/{run_id}", key=one)).json["output"] == "mine"
        assert (await site.ask("GET", f"/v1/runs/{run_id}")).json["output"] == "mine"

    @pytest.mark.parametrize(
        "name", ["run_0", "run_" + "g" * 32, "run_" + "0" * 32, "x", "turn_' OR 1", "run_" + "0" * 33]
    )
    async def test_an_unknown_id_is_404(self, site, name):
        answer = await site.ask("GET", f"/v1/runs/{name}")
        assert (answer.status, answer.json["error"]["code"]) == (404, "run_not_found")
