"""Chat completions: what strict clients read, which session a chat goes on in, and what a retry does."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from hermes_agent.delivery.events import Hub
from hermes_agent.gateway.keys import Scope
from hermes_agent.providers.retry import Retrying
from hermes_agent.testing import replies
from hermes_agent.testing.replies import call, calls, text
from tests.integration.gateway.conftest import reached
from tests.integration.gateway.strict import check_outcome, read_chunks, stream_chat, taken_back

PATH = "/v1/chat/completions"


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


async def ask(site, *messages, key=None, headers=None, **more):
    body = {"messages": [user(one) if isinstance(one, str) else one for one in messages], **more}
    return await site.ask("POST", PATH, body, headers=headers, **({} if key is None else {"key": key}))


async def said(site, *messages, **more):
    """The answer, and the session that it was given in."""
    answer = await ask(site, *messages, **more)
    assert answer.status == 200, answer.text
    return answer.json["choices"][0]["message"]["content"], answer.headers["X-Hermes-Session-Id"]


async def configured(site, more):
    """Start the gateway again with other settings."""
    path = site.home / "config.yaml"
    first = path.read_text(encoding="utf-8").split("\n")[:2]
    path.write_text("\n".join([*first, more, ""]), encoding="utf-8")
    await site.restart()


def wire(site):
    """What the model was sent last, without the system prompt."""
    return [row["content"] for row in site.fake.wire if row["role"] != "system"]


class TestAnAnswer:
    async def test_its_fields(self, site):
        site.fake.extend([text("hello", reasoning="hm")])
        answer = await ask(site, {"role": "system", "content": "Be brief."}, "hi", model="any-name")
        assert answer.status == 200
        body = answer.json
        assert body["id"].startswith("chatcmpl-")
        assert len(body["id"]) == 38
        assert (body["object"], body["model"]) == ("chat.completion", "any-name")
        [choice] = body["choices"]
        assert (choice["index"], choice["finish_reason"]) == (0, "stop")
        assert choice["message"]["role"] == "assistant"
        assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("hello", "hm")
        assert body["usage"] == {
            "prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110,
            "prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 0},
        }  # fmt: skip
        assert "hermes" not in body
        assert "X-Hermes-Completed" not in answer.headers
        assert "Be brief." in site.fake.wire[0]["content"]
        assert site.fake.requests[-1].body["model"] == "fake"

    async def test_system_messages_anywhere_hold_for_the_turn_and_are_no_rows(self, site):
        site.fake.extend([text("ok"), text("ok")])
        system = [
            {"role": "system", "content": "One."},
            {"role": "developer", "content": [{"type": "text", "text": "Two."}]},
        ]
        _, session = await said(site, system[0], "a", assistant("b"), system[1], "c")
        assert "One.\n\nTwo." in site.fake.wire[0]["content"]
        assert await site.roles(session) == [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "ok")]
        await said(site, "a", assistant("b"), "c", assistant("ok"), "d")
        assert "One." not in site.fake.wire[0]["content"]

    async def test_fields_that_say_how_to_answer_are_accepted_and_have_no_effect(self, site):
        site.fake.extend([text("fine")])
        found, _ = await said(
            site, "hi", temperature=0.2, top_p=0.9, n=3, max_tokens=5, seed=1, stop=["x"], logit_bias={}, user="u",
            tools=[{"type": "function", "function": {"name": "mine", "parameters": {}}}], tool_choice="required",
            response_format={"type": "json_object"}, metadata={"a": "b"}, store=False, whatever=[1],
        )  # fmt: skip
        assert found == "fine"
        assert "temperature" not in site.fake.requests[-1].body
        assert "mine" not in json.dumps(site.fake.requests[-1].body["tools"])

    async def test_parts_of_a_message_reach_the_model(self, site):
        site.fake.extend([text("seen")])
        parts = [
            {"type": "text", "text": "look"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        ]
        await said(site, user(parts))
        assert site.fake.wire[-1]["content"] == parts

    async def test_only_the_last_text_is_the_answer(self, site):
        site.fake.extend([calls(call("todo", {"todos": []}), content="One moment."), text("done")])
        assert (await said(site, "go"))[0] == "done"

    async def test_a_cut_answer_says_so(self, site):
        site.fake.extend([text("too lo", finish_reason="length")])
        answer = await ask(site, "go")
        assert answer.status == 200
        assert answer.json["choices"][0]["finish_reason"] == "length"
        check_outcome("length", answer.json)
        assert (answer.headers["X-Hermes-Completed"], answer.headers["X-Hermes-Partial"]) == ("false", "true")


class TestRefusal:
    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({}, "messages"),
            ({"messages": []}, "messages"),
            ({"messages": None}, "messages"),
            ({"messages": "hi"}, "messages"),
            ({"messages": ["hi"]}, "messages[0]"),
            ({"messages": [{"role": {}, "content": ""}]}, "messages[0].role"),
            ({"messages": [{"content": "x"}]}, "messages[0].role"),
            ({"messages": [{"role": "user", "content": {}}]}, "messages[0].content"),
            ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
            ({"messages": [{"role": "user", "content": " "}]}, "messages[0].content"),
            ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
            ({"messages": [{"role": "user", "content": [None, None]}]}, "messages[0].content"),
            ({"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}, "messages[0].content"),
            ({"messages": [user("x"), assistant("y")]}, "messages[1].role"),
            ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
            ({"messages": [{"role": "wizard", "content": "x"}, user("y")]}, "messages[0].role"),
            ({"messages": [{"role": "assistant", "tool_calls": [None]}, user("y")]}, "messages[0].tool_calls"),
            ({"messages": [{"role": "assistant", "tool_calls": [{"name": 1}]}, user("y")]}, "messages[0].tool_calls"),
            ({"messages": [user("x")] * 5001}, "messages"),
            ({"messages": [user("x")], "stream": "yes"}, "stream"),
            ({"messages": [user("x")], "stream_options": []}, "stream_options"),
            ({"messages": [user("x")], "model": 5}, "model"),
            ({"messages": [user("x")], "user": ["u"]}, "user"),
        ],
    )  # fmt: skip
    async def test_a_body_that_is_no_chat_is_a_400_that_names_the_place(self, site, body, param):
        answer = await site.ask("POST", PATH, body)
        assert answer.status == 400, answer.text
        error = answer.json["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert error["message"]
        assert error["code"]

    @pytest.mark.parametrize("name", ["a/b", "..", "a\\b", "x" * 257, "a\tb"])
    @pytest.mark.parametrize("header", ["X-Hermes-Session-Id", "X-Hermes-Session-Key"])
    async def test_a_name_that_is_a_path_or_too_long_is_refused(self, site, header, name):
        answer = await ask(site, "hi", headers={header: name})
        assert answer.status == 400
        assert answer.json["error"]["param"] == header

    async def test_a_key_that_may_only_read_or_talk_begins_nothing(self, site):
        for scope in (Scope.READ, Scope.DM):
            key = site.gateway.own_keys.issue(f"only-{scope}", [scope])
            assert (await ask(site, "hi", key=key)).status == 403


class TestAStream:
    async def test_its_chunks_are_what_every_client_reads(self, site):
        site.fake.extend([text("the quick brown fox", chunks=5, reasoning="hm")])
        found = await stream_chat(site, {"messages": [user("hi")], "model": "any"})
        assert found.content == "the quick brown fox"
        assert found.reasoning == "hm"
        assert found.last["choices"][0]["finish_reason"] == "stop"
        assert found.last["usage"]["total_tokens"] == 110
        assert found.last["model"] == "any"
        assert not [name for name, _ in found.frames if name]
        assert found.headers["X-Hermes-Session-Id"]

    async def test_the_usage_comes_by_itself_for_those_who_ask_for_it(self, site):
        site.fake.extend([text("x")])
        found = await stream_chat(site, {"messages": [user("hi")], "stream_options": {"include_usage": True}})
        assert found.chunks[-1]["usage"]["prompt_tokens"] == 100

    async def test_words_come_while_the_model_speaks(self, site):
        held = replies.hold("begin", text(" and end"))
        site.fake.extend([held])
        async with site.request("POST", PATH, {"messages": [user("hi")], "stream": True}) as answer:
            heard = b""
            async with asyncio.timeout(10):
                while b"begin" not in heard:
                    heard += await answer.content.readline()
            held.release()
            heard += await answer.read()
        found = read_chunks(heard.decode(), answer.headers)
        assert found.content == "begin and end"

    async def test_calls_are_told_beside_the_text_and_hidden_from_those_who_know_no_events(self, site):
        site.fake.extend(
            [
                calls(call("todo", {"todos": []}, id="c1"), content="One moment."),
                calls(call("read_file", {"path": "/no/such"}, id="c2"), content="And a look."),
                text("done", chunks=2),
            ]
        )
        found = await stream_chat(site, {"messages": [user("go")]})
        assert found.progress == [
            ("todo", "running"), ("todo", "completed"), ("read_file", "running"), ("read_file", "completed"),
        ]  # fmt: skip
        assert {name for name, _ in found.frames} == {"", "hermes.tool.progress"}
        assert found.content == "One moment.\n\nAnd a look.\n\ndone"
        label = next(data["label"] for name, data in found.frames if name)
        assert isinstance(label, str)

    async def test_other_events_are_named_for_those_who_ask_only(self, site):
        site.fake.extend([calls(call("todo", {"todos": []})), text("done")] * 2)
        body = {"messages": [user("go")]}
        plain = await stream_chat(site, body)
        more = await stream_chat(site, body, headers={"X-Hermes-Events": "1"})
        assert {name for name, _ in more.frames} - {name for name, _ in plain.frames} == {"hermes.started"}
        assert more.content == plain.content == "done"

    async def test_what_the_model_takes_back_is_not_said_twice(self, site, monkeypatch):
        monkeypatch.setattr(Retrying, "_wait", lambda *_: 0.01)
        await configured(site, "agent: {api_max_retries: 3}")
        for instead, whole in (
            ("Hello world", "Hello world"),
            ("Good morning", "Hello wor\n\nGood morning"),
            ("Hello", "Hello wor\n\nHello"),
        ):
            body = {"messages": [user("hi")]}
            found = await taken_back(site, PATH, body, "Hello wor", text(instead, chunks=3))
            assert read_chunks(*found).content == whole

    async def test_words_that_are_a_row_already_are_not_heard_again(self, site, monkeypatch):
        """A reader may see the row before the turn says that its words are settled."""

        def late(hub, session_id):
            hub.touch(session_id)
            time.sleep(0.03)
            hub.touch(session_id)
            time.sleep(0.03)
            settle(hub, session_id)

        def unheard(hub, session_id, kind, piece):
            hub.speech(session_id).words.pieces.append((kind, piece))

        settle = Hub.settle
        monkeypatch.setattr(Hub, "settle", late)
        monkeypatch.setattr(Hub, "say", unheard)
        asked = [calls(call("todo", {"todos": []}), content=f"Wait {number}.") for number in range(3)]
        site.fake.extend([*asked, text("Answer.", chunks=2, reasoning="hm")])
        found = await stream_chat(site, {"messages": [user("go")]})
        assert found.content == "Wait 0.\n\nWait 1.\n\nWait 2.\n\nAnswer."
        assert found.reasoning == "hm"

    async def test_a_turn_that_fails_in_the_middle_ends_the_stream_in_good_order(self, site):
        site.fake.extend([calls(call("todo", {"todos": []}), content="First."), replies.error(401, "no such key")])
        found = await stream_chat(site, {"messages": [user("go")]})
        assert found.last["choices"][0]["finish_reason"] == "error"
        assert found.content.startswith("First.\n\n")
        error = found.last["error"]
        assert error["message"]
        assert error["type"]
        assert error["code"] == "auth"
        assert found.last["hermes"]["error_code"] == "auth"

    async def test_a_cut_answer_says_so(self, site):
        site.fake.extend([text("too lo", finish_reason="length")])
        found = await stream_chat(site, {"messages": [user("go")]})
        assert found.last["choices"][0]["finish_reason"] == "length"

    async def test_a_comment_shows_that_it_lives(self, site):
        await configured(site, "gateway: {heartbeat: 0.05}")
        held = replies.hold()
        site.fake.extend([held])
        async with site.request("POST", PATH, {"messages": [user("hi")], "stream": True}) as answer:
            heard = b""
            while b": keepalive\n\n: keepalive\n\n" not in heard:
                heard += await answer.content.readline()
            held.release()
            heard += await answer.read()
        assert read_chunks(heard.decode(), answer.headers).content == "released"

    async def test_who_goes_away_changes_nothing(self, site):
        held = replies.hold("so far", calls(call("todo", {"todos": []}, id="c1")))
        site.fake.extend([held, text("whole"), text("fine")])
        headers = {"X-Hermes-Session-Id": "mine"}
        async with site.request("POST", PATH, {"messages": [user("go")], "stream": True}, headers=headers) as answer:
            await reached(held.reached)
            answer.close()
        held.release()
        assert await said(site, "status?", headers=headers) == ("fine", "mine")
        assert [role for role, _ in await site.roles("mine")] == [
            "user", "assistant", "tool", "assistant", "user", "assistant",
        ]  # fmt: skip
        assert wire(site)[-2:] == ["whole", "status?"]

    async def test_its_text_as_history_does_not_change_over_time(self, site):
        """The client sends back what it was told, fifteen times: one session, no row twice, no trace of calls in it."""
        history, session = [], ""
        for turn in range(15):
            asked = [call("todo", {"todos": []}), call("todo", {}), call("todo", {"merge": True})]
            site.fake.extend([calls(*asked, content=f"Wait {turn}."), text(f"Answer {turn}.", chunks=2)])
            history.append(user(f"go {turn}"))
            found = await stream_chat(site, {"messages": history})
            assert found.content == f"Wait {turn}.\n\nAnswer {turn}."
            assert found.headers["X-Hermes-Session-Id"] == session or turn == 0
            session = found.headers["X-Hermes-Session-Id"]
            history.append(assistant(found.content))
        rows = await site.roles(session)
        assert [content for role, content in rows if role == "user"] == [f"go {turn}" for turn in range(15)]
        assert len(rows) == 15 * 6


class TestTheSession:
    async def test_a_transcript_that_goes_on_stores_the_new_message_alone(self, site):
        site.fake.extend([text("b"), text("d"), text("f")])
        _, session = await said(site, "a")
        assert await said(site, "a", assistant("b"), "c") == ("d", session)
        assert await said(site, " a ", assistant("b\n"), "c", assistant("d"), "e") == ("f", session)
        assert [content for _, content in await site.roles(session)] == list("abcdef")
        before, after = (request.body["messages"] for request in site.fake.requests[-2:])
        assert after[: len(before)] == before

    async def test_first_messages_never_share_a_session(self, site):
        site.fake.extend([text("hello"), text("hello")])
        _, one = await said(site, "hi")
        _, two = await said(site, "hi")
        assert one != two
        assert wire(site) == ["hi"]

    async def test_conversations_that_began_alike_stay_apart(self, site):
        site.fake.extend([text("hello"), text("hello"), text("a2"), text("b2"), text("a3"), text("b3")])
        begun = [(await said(site, "hi"))[1], (await said(site, "hi"))[1]]
        start = ("hi", assistant("hello"))
        _, one = await said(site, *start, "mine is red")
        _, two = await said(site, *start, "mine is blue")
        assert len({one, two, *begun}) == 4, "nobody knows which of the two it was"
        assert wire(site) == ["hi", "hello", "mine is blue"]
        assert await said(site, *start, "mine is red", assistant("a2"), "?") == ("a3", one)
        assert wire(site) == ["hi", "hello", "mine is red", "a2", "?"]
        assert await said(site, *start, "mine is blue", assistant("b2"), "?") == ("b3", two)
        assert wire(site) == ["hi", "hello", "mine is blue", "b2", "?"]

    async def test_of_very_many_none_is_certain(self, site):
        answers = ["same", *(f"r{number}" for number in range(8)), "same"]
        site.fake.extend([text(one) for one in (*answers, "end")])
        begun = [(await said(site, "hi"))[1] for _ in answers]
        assert (await said(site, "hi", assistant("same"), "x"))[1] not in begun

    async def test_at_the_same_time_too(self, site):
        site.fake.extend([text("hello")])
        _, session = await said(site, "hi")
        held = [replies.hold(then=text("x")) for _ in range(4)]
        site.fake.extend(held)
        start = ("hi", assistant("hello"))
        asking = [asyncio.create_task(said(site, *start, f"I am {number}")) for number in range(4)]
        for one in held:
            await reached(one.reached)
        for one in held:
            one.release()
        sessions = [found[1] for found in await asyncio.gather(*asking)]
        assert len(set(sessions)) == 4
        assert session in sessions
        for one in sessions:
            assert len(await site.roles(one)) == 4

    async def test_other_keys_and_other_users_have_other_sessions(self, site):
        site.fake.extend([text("hello")] * 2 + [text(f"r{number}") for number in range(4)])
        other = site.gateway.own_keys.issue("other", [Scope.RUN, Scope.READ])
        _, one = await said(site, "hi", user="ann")
        _, two = await said(site, "hi", key=other)
        start = ("hi", assistant("hello"))
        _, three = await said(site, *start, "secret word", user="bob")
        assert wire(site) == ["hi", "hello", "secret word"]
        _, four = await said(site, *start, "c", headers={"X-Hermes-Session-Key": "k"}, user="ann")
        assert len({one, two, three, four}) == 4
        assert (await said(site, *start, "c", user="ann"))[1] == one
        assert (await said(site, *start, "c", key=other))[1] == two

    async def test_an_edited_or_repeated_message_begins_a_session_of_its_own(self, site):
        site.fake.extend([text(f"r{number}") for number in range(5)])
        _, session = await said(site, "a")
        await said(site, "a", assistant("r0"), "b")
        _, again = await said(site, "a", assistant("r0"), "b")
        _, edited = await said(site, "A", assistant("r0"), "b")
        _, retold = await said(site, "a", assistant("else"), "b")
        assert len({session, again, edited, retold}) == 4
        assert [content for _, content in await site.roles(session)] == ["a", "r0", "b", "r1"]
        assert [content for _, content in await site.roles(again)] == ["a", "r0", "b", "r2"]
        assert [content for _, content in await site.roles(retold)] == ["a", "else", "b", "r4"]

    async def test_another_answer_than_the_one_that_was_given_is_another_conversation(self, site):
        site.fake.extend([text("b"), text("d"), text("f")])
        _, session = await said(site, "a")
        assert (await said(site, "a", assistant("never said"), "c"))[1] != session
        assert wire(site) == ["a", "never said", "c"]
        assert (await said(site, "a", assistant("b"), "c"))[1] == session

    async def test_a_session_that_went_on_elsewhere_is_not_gone_on_with(self, site):
        site.fake.extend([text("b"), text("x"), text("d")])
        _, session = await said(site, "a")
        await site.chat(session, "from elsewhere")
        assert (await said(site, "a", assistant("b"), "c"))[1] != session
        assert wire(site) == ["a", "b", "c"]

    async def test_it_is_found_again_after_a_restart(self, site):
        site.fake.extend([text("b"), text("d")])
        _, session = await said(site, "a")
        await site.restart()
        assert await said(site, "a", assistant("b"), "c") == ("d", session)

    async def test_a_turn_that_failed_is_gone_on_from_by_its_prose(self, site):
        site.fake.extend([replies.error(401, "no such key"), text("d")])
        prose, session = await said(site, "a")
        assert await said(site, "a", assistant(prose), "c") == ("d", session)
        assert [content for _, content in await site.roles(session)] == ["a", "c", "d"]

    async def test_a_foreign_history_with_calls_stays_valid_for_a_strict_provider(self, site):
        site.fake.extend([text("ok"), text("ok2")])
        asked = {
            "role": "assistant", "content": None,
            "tool_calls": [
                {"id": "call 1!", "type": "function", "function": {"name": "my tool", "arguments": "{bad"}},
                {"id": "c2", "type": "function", "function": {"name": "t2", "arguments": {"x": 1}}},
            ],
        }  # fmt: skip
        history = [
            assistant("Greetings."), {"role": "tool", "content": "lost", "tool_call_id": "nowhere"},
            user("a"), asked, {"role": "tool", "content": "one", "tool_call_id": "call 1!"},
            assistant(""), user("b"), user("c"), {"role": "function", "name": "f", "content": None},
        ]  # fmt: skip
        _, session = await said(site, *history, "go")
        assert [role for role, _ in await site.roles(session)] == [
            "assistant", "tool", "user", "assistant", "tool", "assistant", "user", "user", "tool", "user", "assistant",
        ]  # fmt: skip
        assert await said(site, *history, "go", assistant("ok"), "more") == ("ok2", session)

    async def test_a_named_session_has_the_history_of_the_store(self, site):
        site.fake.extend([text("one"), text("two")])
        headers = {"X-Hermes-Session-Id": "mine"}
        assert await said(site, "first", headers=headers) == ("one", "mine")
        assert await said(site, "nothing", assistant("of this"), "second", headers=headers) == ("two", "mine")
        assert wire(site) == ["first", "one", "second"]

    async def test_a_named_session_that_is_made_begins_with_what_came_along(self, site):
        site.fake.extend([text("ok")])
        await said(site, "a", assistant("b"), "c", headers={"X-Hermes-Session-Id": "mine"})
        assert [content for _, content in await site.roles("mine")] == ["a", "b", "c", "ok"]

    async def test_somebody_elses_session_is_not_there(self, site):
        site.fake.extend([text("one"), text("two")])
        other = site.gateway.own_keys.issue("other", [Scope.RUN])
        headers = {"X-Hermes-Session-Id": "mine"}
        await said(site, "first", headers=headers, key=site.gateway.own_keys.issue("me", [Scope.RUN]))
        refused = await ask(site, "hi", headers=headers, key=other)
        assert (refused.status, refused.json["error"]["code"]) == (404, "session_not_found")
        assert (await said(site, "the owner may", headers=headers))[1] == "mine"


class TestRepeats:
    async def test_however_often_it_comes_it_is_answered_once(self, site):
        held = replies.hold(then=text("once"))
        site.fake.extend([held])
        headers = {"Idempotency-Key": "k1"}
        asking = [asyncio.create_task(ask(site, "hi", headers=headers)) for _ in range(5)]
        await reached(held.reached)
        held.release()
        answers = await asyncio.gather(*asking)
        later = await ask(site, "hi", headers=headers)
        await site.restart()
        last = await ask(site, "hi", headers=headers)
        assert {answer.status for answer in (*answers, later, last)} == {200}
        assert len({answer.text for answer in (*answers, later, last)}) == 1
        assert [answer.headers.get("Idempotency-Replayed") for answer in answers].count("true") == 4
        assert len(site.fake.requests) == 1
        assert len((await site.ask("GET", "/api/sessions")).json["data"]) == 1

    async def test_another_message_under_its_key_is_refused(self, site):
        site.fake.extend([text("a")])
        headers = {"Idempotency-Key": "k1"}
        await said(site, "hi", headers=headers)
        refused = await ask(site, "else", headers=headers)
        assert (refused.status, refused.json["error"]["code"]) == (422, "idempotency_key_conflict")

    async def test_a_stream_is_joined_and_told_again(self, site):
        held = replies.hold("first ", text("and last"))
        site.fake.extend([held])
        headers = {"Idempotency-Key": "k1"}
        body = {"messages": [user("hi")]}
        one = asyncio.create_task(stream_chat(site, body, headers=headers))
        await reached(held.reached)
        two = asyncio.create_task(stream_chat(site, body, headers=headers))
        held.release()
        found = [await one, await two, await stream_chat(site, body, headers=headers)]
        assert len({chunks.last["id"] for chunks in found}) == 1
        assert [chunks.content for chunks in found] == ["first and last"] * 3
        assert (await said(site, "hi", headers=headers))[0] == "first and last"
        assert len(site.fake.requests) == 1

    async def test_the_repeat_of_a_message_that_went_on_from_a_transcript_is_that_message(self, site):
        site.fake.extend([text("b"), text("d")])
        await said(site, "a")
        headers = {"Idempotency-Key": "k1"}
        first = await said(site, "a", assistant("b"), "c", headers=headers)
        assert await said(site, "a", assistant("b"), "c", headers=headers) == first
        assert len(await site.roles(first[1])) == 4

    async def test_a_failure_that_did_nothing_does_not_hold_the_key(self, site):
        site.fake.extend([replies.error(401, "no such key"), text("now")])
        headers = {"Idempotency-Key": "k1"}
        assert (await ask(site, "hi", headers=headers)).json["choices"][0]["finish_reason"] == "error"
        assert (await said(site, "hi", headers=headers))[0] == "now"
        assert (await said(site, "hi", headers=headers))[0] == "now"
        assert len(site.fake.requests) == 2

    async def test_a_failure_after_a_call_is_the_answer_for_ever(self, site):
        site.fake.extend([calls(call("todo", {"todos": []})), replies.error(401, "no such key")])
        headers = {"Idempotency-Key": "k1"}
        first = await ask(site, "hi", headers=headers)
        again = await ask(site, "hi", headers=headers)
        assert first.json == again.json
        assert len(site.fake.requests) == 2


class TestFailures:
    async def test_a_failed_turn_is_prose_for_old_clients(self, site):
        site.fake.extend([replies.error(401, "no such key")])
        answer = await ask(site, "hi")
        assert answer.status == 200
        [choice] = answer.json["choices"]
        assert choice["finish_reason"] == "error"
        assert choice["message"]["content"]
        check_outcome("error", answer.json)
        assert answer.json["hermes"]["error_code"] == "auth"
        assert (answer.headers["X-Hermes-Error"], answer.headers["X-Hermes-Completed"]) == ("auth", "false")

    async def test_and_a_status_for_those_who_prefer_one(self, site):
        site.fake.extend([replies.error(401, "no such key")])
        answer = await ask(site, "hi", headers={"Prefer": "status=strict"})
        assert answer.status == 502
        assert answer.json["error"]["failure"]["reason"] == "auth"

    async def test_a_client_that_does_not_want_to_wait_is_told_where_to_ask(self, site):
        held = replies.hold()
        site.fake.extend([held])
        for wish in ("respond-async", "wait=0"):
            answer = await ask(site, "hi", headers={"Prefer": wish, "Idempotency-Key": "k1"})
            assert answer.status == 202
            assert answer.headers["Location"].startswith("/api/deliveries/turn_")
        held.release()
        assert (await said(site, "hi", headers={"Idempotency-Key": "k1"}))[0] == "released"

    async def test_a_turn_that_takes_too_long_goes_on_and_is_not_sent_again(self, site):
        await configured(site, "gateway: {turn_timeout: 0.2}")
        held = replies.hold()
        site.fake.extend([held])
        answer = await ask(site, "hi")
        assert (answer.status, answer.json["error"]["code"]) == (504, "answer_pending")
        assert answer.headers["X-Should-Retry"] == "false"
        held.release()
        turn = answer.headers["Location"]
        for _ in range(500):
            delivery = (await site.ask("GET", turn)).json
            if delivery.get("status") in ("completed", "done", "replied"):
                break
            await asyncio.sleep(0.01)
        assert "released" in json.dumps(delivery)
