"""Responses: what strict clients read, which session a response goes on in, and that it reads the same at any time."""

from __future__ import annotations

import asyncio

import pytest

from hermes_agent.gateway.keys import Scope
from hermes_agent.providers.retry import Retrying
from hermes_agent.testing import replies
from hermes_agent.testing.replies import call, calls, text
from tests.integration.gateway.conftest import reached
from tests.integration.gateway.strict import check_response, read_story, stream_response, taken_back, text_of

PATH = "/v1/responses"


async def ask(site, given, *, key=None, headers=None, **more):
    keyed = {} if key is None else {"key": key}
    return await site.ask("POST", PATH, {"input": given, **more}, headers=headers, **keyed)


async def respond(site, given, **more):
    """A response that was given, checked."""
    answer = await ask(site, given, **more)
    assert answer.status == 200, answer.text
    response = check_response(answer.json)
    response["session"] = answer.headers["X-Hermes-Session-Id"]
    return response


async def get(site, response_id, **more):
    return await site.ask("GET", f"{PATH}/{response_id}", **more)


def kinds(response):
    return [item["type"] for item in response["output"]]


def wire(site):
    return [row["content"] for row in site.fake.wire if row["role"] != "system"]


class TestAResponse:
    async def test_its_fields(self, site):
        site.fake.extend([text("hello", reasoning="hm")])
        found = await respond(site, "hi", model="any", instructions="Be brief.", metadata={"a": "b"}, temperature=1)
        assert (found["status"], found["error"], found["incomplete_details"]) == ("completed", None, None)
        assert (found["model"], found["instructions"], found["metadata"]) == ("any", "Be brief.", {"a": "b"})
        assert found["usage"]["total_tokens"] == 110
        assert kinds(found) == ["reasoning", "message"]
        assert found["output"][0]["summary"] == [{"type": "summary_text", "text": "hm"}]
        assert text_of(found) == "hello"
        assert "Be brief." in site.fake.wire[0]["content"]

    async def test_calls_on_the_server_and_what_is_said_between_them(self, site):
        asked = [call("todo", {"todos": []}, id="c1"), call("read_file", {"path": "/no/such"}, id="c2")]
        site.fake.extend([calls(*asked, content="One moment."), text("done")])
        found = await respond(site, "go")
        assert kinds(found) == [
            "message", "function_call", "function_call", "function_call_output", "function_call_output", "message",
        ]  # fmt: skip
        first, one, two, out, _, last = found["output"]
        assert (first["phase"], first["content"][0]["text"]) == ("commentary", "One moment.")
        assert "phase" not in last
        assert (one["call_id"], one["name"], two["call_id"]) == ("c1", "todo", "c2")
        assert (out["call_id"], isinstance(out["output"], str)) == ("c1", True)

    @pytest.mark.parametrize("tools", [[], [{"type": "function", "name": "mine", "parameters": {}}]])
    async def test_a_client_that_runs_tools_is_not_asked_to_run_ours(self, site, tools):
        site.fake.extend([calls(call("todo", {"todos": []})), text("done")] * 2)
        for found in (
            await respond(site, "go", tools=tools),
            (await stream_response(site, {"input": "go", "tools": tools})).response,
        ):
            assert kinds(found) == ["mcp_call", "message"]
            one = found["output"][0]
            assert (one["name"], one["server_label"], one["error"]) == ("todo", "hermes", None)
            assert one["output"]

    async def test_it_reads_the_same_later_and_after_a_restart(self, site):
        site.fake.extend([calls(call("todo", {"todos": []}), content="One moment."), text("done", reasoning="hm")])
        found = await respond(site, "go", metadata={"a": "b"}, user="u")
        del found["session"]
        assert (await get(site, found["id"])).json == found
        await site.restart()
        assert (await get(site, found["id"])).json == found

    async def test_one_that_is_not_kept_or_was_withdrawn_is_not_there(self, site):
        site.fake.extend([text("a"), text("b"), text("c")])
        unstored = await respond(site, "x", store=False)
        assert unstored["store"] is False
        kept = await respond(site, "x")
        deleted = await site.ask("DELETE", f"{PATH}/{kept['id']}")
        assert (deleted.status, deleted.json) == (200, {"id": kept["id"], "object": "response", "deleted": True})
        for response_id in (unstored["id"], kept["id"], "resp_" + "0" * 28, "resp_nothing", kept["id"][:-1]):
            for answer in (
                await get(site, response_id),
                await site.ask("DELETE", f"{PATH}/{response_id}"),
                await ask(site, "more", previous_response_id=response_id),
            ):
                assert (answer.status, answer.json["error"]["code"]) == (404, "response_not_found")
        assert [content for _, content in await site.roles(kept["session"])] == ["x", "b"]

    async def test_it_belongs_to_the_key_that_asked_for_it(self, site):
        site.fake.extend([text("a")])
        ring = site.gateway.own_keys
        mine = ring.issue("mine", [Scope.RUN, Scope.READ])
        other = ring.issue("other", [Scope.RUN, Scope.READ])
        found = await respond(site, "x", key=mine)
        assert (await get(site, found["id"], key=mine)).status == 200
        assert (await get(site, found["id"])).status == 200
        assert (await get(site, found["id"], key=other)).status == 404
        assert (await ask(site, "y", previous_response_id=found["id"], key=other)).status == 404
        reader = ring.issue("reader", [Scope.READ])
        assert (await ask(site, "y", key=reader)).status == 403
        assert (await site.ask("DELETE", f"{PATH}/{found['id']}", key=reader)).status == 403

    async def test_other_turns_are_no_responses(self, site):
        site.fake.extend([text("a")])
        chat = await site.ask("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
        assert (await get(site, "resp_" + chat.json["id"].removeprefix("chatcmpl-")[:28])).status == 404

    async def test_a_turn_that_failed_is_a_response_that_failed(self, site):
        site.fake.extend([replies.error(401, "no such key")] * 2)
        found = await respond(site, "x")
        assert (found["status"], found["error"]["code"]) == ("failed", "auth")
        assert found["error"]["message"]
        assert text_of(found)
        assert (await get(site, found["id"])).json["status"] == "failed"
        strict = await ask(site, "x", headers={"Prefer": "status=strict"})
        assert (strict.status, strict.json["error"]["failure"]["reason"]) == (502, "auth")

    async def test_a_cut_answer_is_incomplete(self, site):
        site.fake.extend([text("too lo", finish_reason="length")] * 2)
        found = await respond(site, "x")
        assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        streamed = await stream_response(site, {"input": "x"})
        assert streamed.kinds[-1] == "response.incomplete"

    @pytest.mark.parametrize(
        ("more", "status"), [({"background": True}, 200), ({"headers": {"Prefer": "respond-async"}}, 202)]
    )
    async def test_it_can_be_asked_for_without_waiting(self, site, more, status):
        held = replies.hold()
        site.fake.extend([held])
        answer = await ask(site, "x", **more)
        assert answer.status == status
        begun = check_response(answer.json)
        assert begun["status"] in ("queued", "in_progress")
        assert begun["usage"] is None
        await reached(held.reached)
        assert (await get(site, begun["id"])).json["status"] == "in_progress"
        turn = answer.headers["Location"]
        held.release()
        await site.ask("GET", f"{turn}?wait=20")
        assert text_of((await get(site, begun["id"])).json) == "released"


class TestAStream:
    async def test_its_events(self, site):
        site.fake.extend([text("streamed words here", chunks=3, reasoning="hm")])
        found = await stream_response(site, {"input": "x", "model": "any"})
        assert found.kinds == [
            "response.created", "response.in_progress", "response.output_item.added",
            "response.reasoning_summary_part.added", "response.reasoning_summary_text.delta",
            "response.reasoning_summary_text.done", "response.reasoning_summary_part.done",
            "response.output_item.done", "response.output_item.added", "response.content_part.added",
            "response.output_text.delta", "response.output_text.done", "response.content_part.done",
            "response.output_item.done", "response.completed",
        ]  # fmt: skip
        assert text_of(found.response) == "streamed words here"
        assert found.response["model"] == "any"
        assert (await get(site, found.response["id"])).json == found.response

    @pytest.mark.parametrize("tools", [None, []])
    async def test_calls_are_told_as_items(self, site, tools):
        asked = [call("todo", {"todos": []}, id="c1"), call("read_file", {"path": "/no/such"}, id="c2")]
        site.fake.extend([calls(*asked, content="One moment."), text("done", chunks=2)])
        found = await stream_response(site, {"input": "x", "tools": tools})
        kind = "function_call" if tools is None else "mcp_call"
        assert f"response.{kind}_arguments.done" in found.kinds
        assert text_of(found.response) == "One moment.done"
        assert (await get(site, found.response["id"])).json == found.response

    async def test_words_that_are_taken_back_are_not_said_twice(self, site, monkeypatch):
        monkeypatch.setattr(Retrying, "_wait", lambda *_: 0.01)
        path = site.home / "config.yaml"
        path.write_text(path.read_text().replace("api_max_retries: 1", "api_max_retries: 3"))
        await site.restart()
        for instead, whole in (("Hello world", "Hello world"), ("Good morning", "Hello wor\n\nGood morning")):
            heard, _ = await taken_back(site, PATH, {"input": "x"}, "Hello wor", text(instead, chunks=3))
            assert text_of(read_story(heard).response) == whole

    async def test_a_turn_that_fails_in_the_middle(self, site):
        site.fake.extend([calls(call("todo", {"todos": []}), content="First."), replies.error(401, "no such key")])
        found = await stream_response(site, {"input": "x"})
        assert found.kinds[-1] == "response.failed"
        assert (found.response["status"], found.response["error"]["code"]) == ("failed", "auth")
        assert (await get(site, found.response["id"])).json == found.response

    async def test_who_goes_away_changes_nothing(self, site):
        held = replies.hold("so far", text(" and on"))
        site.fake.extend([held])
        async with site.request("POST", PATH, {"input": "x", "stream": True}) as answer:
            await reached(held.reached)
            line = ""
            while not line.startswith("data: "):
                line = (await answer.content.readline()).decode()
            answer.close()
        held.release()
        response_id = line.partition('"id":"')[2].partition('"')[0]
        turn = "turn_" + response_id.removeprefix("resp_")
        await site.ask("GET", f"/api/deliveries/{turn}?wait=20")
        assert text_of((await get(site, response_id)).json) == "so far and on"


class TestTheInput:
    async def test_messages_as_items(self, site):
        site.fake.extend([text("ok")])
        found = await respond(
            site,
            [
                {"role": "developer", "content": "Be kind."},
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
                {"type": "reasoning", "id": "rs_1", "summary": []},
                {"role": "user", "content": [
                    {"type": "input_text", "text": "c"}, {"type": "input_image", "image_url": "https://example.org/x.png"},
                ]},
            ],
            instructions="Be brief.",
            conversation_history=[{"role": "user", "content": "0"}, {"role": "assistant", "content": "1"}],
        )  # fmt: skip
        assert "Be brief.\n\nBe kind." in site.fake.wire[0]["content"]
        assert wire(site)[:4] == ["0", "1", "a", "b"]
        assert wire(site)[4][1] == {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}
        assert found["instructions"] == "Be brief."

    async def test_a_client_that_sends_all_items_again_goes_on_in_its_session(self, site):
        for tools in (None, []):
            asked = [call("todo", {"todos": []}, id="c1"), call("todo", {}, id="c2")]
            site.fake.extend([calls(*asked, content="Wait."), text("b", reasoning="hm"), text("d")])
            first = await respond(site, "a", tools=tools)
            given = [{"role": "user", "content": "a"}, *first["output"], {"role": "user", "content": "c"}]
            second = await respond(site, given, tools=tools)
            assert second["session"] == first["session"]
            assert len(await site.roles(first["session"])) == 7

    async def test_foreign_calls_stay_valid_for_a_strict_provider(self, site):
        site.fake.extend([text("ok")])
        given = [
            {"role": "user", "content": "a"},
            {"type": "function_call", "call_id": "c 1", "name": "my tool", "arguments": "{bad", "id": "fc_1"},
            {"type": "function_call", "call_id": "c2", "name": "t2", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c 1", "output": "one"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
            {"type": "function_call_output", "call_id": "lost", "output": "three"},
            {"type": "mcp_call", "id": "m", "name": "x"},
            {"type": "item_reference", "id": "m"},
            {"role": "user", "content": "go"},
        ]
        found = await respond(site, given)
        assert [role for role, _ in await site.roles(found["session"])] == [
            "user", "assistant", "tool", "tool", "tool", "user", "assistant",
        ]  # fmt: skip
        assert "one" in wire(site)

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({}, "input"),
            ({"input": None}, "input"),
            ({"input": " "}, "input"),
            ({"input": []}, "input"),
            ({"input": [None, None]}, "input[0]"),
            ({"input": 5}, "input"),
            ({"input": {}}, "input"),
            ({"input": [{"role": "user"}]}, "input[0].content"),
            ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
            ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content"),
            ({"input": [{"role": [], "content": "x"}]}, "input[0].role"),
            ({"input": [{"type": {}, "role": "user", "content": "x"}]}, "input[0].type"),
            ({"input": [{"type": "spell"}]}, "input[0].type"),
            ({"input": [{"type": "function_call", "name": 1}]}, "input[0]"),
            ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
            ({"input": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, "input[1]"),
            ({"input": [{"role": "system", "content": "x"}]}, "input[0]"),
            ({"input": "x", "conversation": [None, None]}, "conversation"),
            ({"input": "x", "conversation": {}}, "conversation.id"),
            ({"input": "x", "conversation": ""}, "conversation"),
            ({"input": "x", "conversation": "../x"}, "conversation"),
            ({"input": "x", "conversation": "c", "previous_response_id": "resp_1"}, "conversation"),
            ({"input": "x", "previous_response_id": []}, "previous_response_id"),
            ({"input": "x", "conversation_history": [{"role": "wizard"}]}, "conversation_history[0].role"),
            ({"input": "x", "conversation_history": "x"}, "conversation_history"),
            ({"input": "x", "metadata": "x"}, "metadata"),
            ({"input": "x", "tools": {}}, "tools"),
            ({"input": "x", "stream": 1}, "stream"),
        ],
    )
    async def test_a_body_that_is_no_request_is_a_400_that_names_the_place(self, site, body, param):
        answer = await site.ask("POST", PATH, body)
        assert answer.status == 400, answer.text
        error = answer.json["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert error["message"]
        assert error["code"]


class TestTheSession:
    async def test_a_response_goes_on_where_the_one_before_it_ended(self, site):
        site.fake.extend([text("b"), text("d"), text("f")])
        one = await respond(site, "a")
        two = await respond(site, "c", previous_response_id=one["id"])
        assert two["previous_response_id"] == one["id"]
        await site.restart()
        three = await respond(site, [{"role": "user", "content": "e"}], previous_response_id=two["id"])
        assert one["session"] == two["session"] == three["session"]
        assert wire(site) == list("abcde")

    async def test_two_that_follow_the_same_response_are_branches(self, site):
        site.fake.extend([text("b"), text("left"), text("right"), text("on")])
        one = await respond(site, "a")
        left = await respond(site, "l", previous_response_id=one["id"])
        right = await respond(site, "r", previous_response_id=one["id"])
        assert wire(site) == ["a", "b", "r"]
        assert left["session"] == one["session"] != right["session"]
        on = await respond(site, "s", previous_response_id=right["id"])
        assert on["session"] == right["session"]
        assert wire(site) == ["a", "b", "r", "right", "s"]

    async def test_one_that_follows_a_running_response_waits_for_it(self, site):
        held = replies.hold()
        site.fake.extend([held, text("d")])
        one = (await ask(site, "a", background=True)).json
        await reached(held.reached)
        two = asyncio.create_task(respond(site, "c", previous_response_id=one["id"]))
        held.release()
        assert text_of(await two) == "d"
        assert wire(site) == ["a", "released", "c"]

    async def test_a_conversation_is_one_session_for_its_owner_whatever_happens(self, site):
        site.fake.extend([text(f"r{number}") for number in range(6)])
        other = site.gateway.own_keys.issue("other", [Scope.RUN])
        one = await respond(site, "a", conversation="foo")
        assert one["conversation"] == {"id": "foo"}
        for number in range(3):
            await site.restart()
            found = await respond(site, f"b{number}", conversation={"id": "foo"})
            assert found["session"] == one["session"]
        theirs = await respond(site, "a", conversation="foo", key=other)
        assert theirs["session"] != one["session"]
        assert wire(site) == ["a"]
        assert (await respond(site, "a", conversation="bar"))["session"] != one["session"]

    async def test_of_many_that_begin_a_conversation_at_once_one_makes_the_session(self, site):
        site.fake.extend([text(f"r{number}") for number in range(5)])
        found = await asyncio.gather(*(respond(site, f"m{number}", conversation="foo") for number in range(5)))
        assert len({one["session"] for one in found}) == 1
        assert len(await site.roles(found[0]["session"])) == 10

    async def test_the_name_of_a_deleted_session_is_not_given_away(self, site):
        site.fake.extend([text("b")])
        one = await respond(site, "a", conversation="foo")
        assert (await site.ask("DELETE", f"/api/sessions/{one['session']}")).status == 200
        lost = await ask(site, "c", conversation="foo")
        assert (lost.status, lost.json["error"]["code"]) == (404, "session_not_found")

    async def test_what_a_client_repeats_of_a_named_session_is_not_stored_again(self, site):
        site.fake.extend([text("b"), text("d")])
        await respond(site, "a", conversation="foo")
        again = [
            {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c1"}, {"role": "user", "content": "c2"},
        ]  # fmt: skip
        await respond(site, again, conversation="foo")
        assert wire(site) == ["a", "b", "c1\n\nc2"]

    async def test_a_session_key_names_the_live_session(self, site):
        site.fake.extend([text(f"r{number}") for number in range(4)])
        headers = {"X-Hermes-Session-Key": "k"}
        one = await respond(site, "a", headers=headers)
        assert (await respond(site, "b", headers=headers))["session"] == one["session"]
        assert (await site.ask("PATCH", f"/api/sessions/{one['session']}", {"end_reason": "done"})).status == 200
        two = await respond(site, "c", headers=headers)
        assert two["session"] != one["session"]
        assert (await site.ask("DELETE", f"/api/sessions/{two['session']}")).status == 200
        assert (await respond(site, "d", headers=headers))["session"] not in (one["session"], two["session"])

    async def test_first_messages_never_share_a_session(self, site):
        site.fake.extend([text("hello"), text("hello")])
        assert (await respond(site, "hi"))["session"] != (await respond(site, "hi"))["session"]


class TestRepeats:
    async def test_however_often_it_comes_it_is_answered_once(self, site):
        held = replies.hold(then=text("once"))
        site.fake.extend([held])
        headers = {"Idempotency-Key": "k1"}
        asking = [asyncio.create_task(respond(site, "hi", headers=headers)) for _ in range(5)]
        await reached(held.reached)
        held.release()
        found = await asyncio.gather(*asking)
        streamed = await stream_response(site, {"input": "hi"}, headers=headers)
        assert {one["id"] for one in found} == {streamed.response["id"]}
        assert text_of(streamed.response) == "once"
        assert len(site.fake.requests) == 1
        refused = await ask(site, "else", headers=headers)
        assert (refused.status, refused.json["error"]["code"]) == (422, "idempotency_key_conflict")

    async def test_a_repeat_behind_a_response_begins_no_branch(self, site):
        site.fake.extend([text("b"), text("d")])
        one = await respond(site, "a")
        headers = {"Idempotency-Key": "k1"}
        two = await respond(site, "c", previous_response_id=one["id"], headers=headers)
        assert await respond(site, "c", previous_response_id=one["id"], headers=headers) == two
        assert len((await site.ask("GET", "/api/sessions?include_children=1")).json["data"]) == 1
