"""Reading replies of every shape, and the provider over foreign clients."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from hermes_agent.cancellation import Cancellation
from hermes_agent.errors import FailureReason, ProviderError, TurnInterrupted
from hermes_agent.providers import assembly
from hermes_agent.providers.base import ReasoningDelta, Reply, Request, TextDelta, ToolCall, Usage
from hermes_agent.providers.openai_chat import OpenAIChat, StreamAssembler

ASK = Request(model="m", messages=[{"role": "user", "content": "hi"}])


def chunk(finish=None, **delta):
    return {"model": "m1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def piece(arguments=None, *, name=None, **rest):
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return chunk(tool_calls=[{**rest, "function": function}])


def assemble(*chunks, done=True):
    assembler = StreamAssembler(where="h (m)")
    for item in chunks:
        assembler.feed(item)
    assembler.done = done
    return assembler.reply()


def made(*chunks, finish="tool_calls"):
    reply = assemble(*chunks, chunk(finish))
    return [(call.id, call.name, call.arguments) for call in reply.tool_calls]


class TestStreamedText:
    def test_pieces_join_and_a_usage_only_chunk_is_no_cut(self):
        usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}
        reply = assemble(chunk(content="Hel"), chunk(content="lo"), chunk("stop"), usage)
        assert reply == Reply("Hello", finish_reason="stop", model="m1", usage=Usage(7, 2))

    def test_null_chunks_and_empty_labels_are_ignored(self):
        assert assemble(chunk("", content="a"), None, {}, chunk("", content="b"), chunk("stop")).content == "ab"

    def test_content_parts_are_text_or_reasoning(self):
        parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "yes"}]
        reply = assemble(chunk(content=parts), chunk("stop"))
        assert (reply.content, reply.reasoning) == ("yes", "hm")

    @pytest.mark.parametrize(
        "delta",
        [
            {"reasoning_content": "hm"},
            {"reasoning": "hm"},
            {"reasoning": "hm", "reasoning_content": "hm", "reasoning_details": [{"text": "hm"}]},
            {"reasoning_details": [{"type": "reasoning.text", "text": "h"}, {"summary": "m"}]},
        ],
    )
    def test_reasoning_is_read_once_under_every_name(self, delta):
        assembler = StreamAssembler()
        assert assembler.feed(chunk(**delta)) == [ReasoningDelta("hm")]
        assembler.feed(chunk("stop", content="x"))
        assert assembler.reply().reasoning == "hm"

    def test_halves_of_an_emoji_in_two_chunks_become_one_character(self):
        assembler = StreamAssembler()
        shown = [event.text for half in ("a\ud83d", "\ude00b") for event in assembler.feed(chunk(content=half))]
        assembler.feed(chunk("stop"))
        assert shown == ["a", "\U0001f600b"]
        assert assembler.reply().content == "a\U0001f600b"

    def test_a_lone_half_is_replaced(self):
        assert (
            assemble(chunk(content="caf\ud83d!"), chunk(content="\ud83d"), chunk("stop")).content == "caf\ufffd!\ufffd"
        )

    def test_only_the_first_choice_counts(self):
        other = {"choices": [{"index": 1, "delta": {"content": "no"}, "finish_reason": None}]}
        assert assemble(chunk(content="yes"), other, chunk("stop")).content == "yes"

    def test_a_whole_message_in_one_chunk_is_read(self):
        whole = {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}
        assert assemble(whole, done=False).content == "hi"

    def test_a_refusal_is_the_text_when_there_is_no_other(self):
        assert assemble(chunk(refusal="I can"), chunk(refusal="not"), chunk("stop")).content == "I cannot"


class TestStreamedCalls:
    def test_arguments_join_by_index(self):
        calls = made(
            piece('{"p":', index=0, id="a", name="read"),
            piece('{"q":', index=1, id="b", name="stat"),
            piece("1}", index=0),
            piece("2}", index=1),
        )
        assert calls == [("a", "read", '{"p":1}'), ("b", "stat", '{"q":2}')]

    def test_a_new_id_on_a_used_index_is_a_new_call(self):
        calls = made(piece('{"p":"1"}', index=0, id="a", name="read"), piece('{"p":"2"}', index=0, id="b", name="read"))
        assert calls == [("a", "read", '{"p":"1"}'), ("b", "read", '{"p":"2"}')]

    def test_a_fresh_id_on_each_piece_of_arguments_is_the_same_call(self):
        assert made(piece('{"p":', index=0, id="a", name="read"), piece("1}", index=0, id="x")) == [
            ("a", "read", '{"p":1}')
        ]

    def test_without_ids_a_name_after_whole_arguments_is_the_next_call(self):
        calls = made(piece('{"p":1}', index=0, name="read"), piece('{"p":2}', index=0, name="read"))
        assert calls == [("", "read", '{"p":1}'), ("", "read", '{"p":2}')]

    @pytest.mark.parametrize(
        ("deltas", "call_id"),
        [
            ([{"id": "a"}, {"id": "a"}], "a"),
            ([{"id": "a"}, {}], "a"),
            ([{"index": 0}, {"index": 0}], ""),
            ([{"index": 0, "id": ""}, {"index": 0, "id": ""}], ""),
            ([{"index": 0, "id": "a"}, {"id": "a"}], "a"),
            ([{"index": None, "id": None}, {"index": None}], ""),
        ],
        ids=["id-only", "id-first", "index-only", "blank-id", "index-first", "neither"],
    )
    def test_a_missing_index_or_id_loses_nothing(self, deltas, call_id):
        first, second = deltas
        assert made(piece('{"p":', name="read", **first), piece("1}", **second)) == [(call_id, "read", '{"p":1}')]

    def test_two_calls_with_ids_and_no_index_stay_apart(self):
        calls = made(
            piece('{"p":', id="a", name="read"),
            piece('{"p":', id="b", name="read"),
            piece("1}", id="a"),
            piece("2}", id="b"),
        )
        assert calls == [("a", "read", '{"p":1}'), ("b", "read", '{"p":2}')]

    def test_a_repeated_full_name_is_not_doubled(self):
        pieces = [piece(part, index=0, id="a", name="web_search") for part in ('{"q"', ":", "1}")]
        assert made(*pieces) == [("a", "web_search", '{"q":1}')]

    def test_pieces_of_a_name_join(self):
        pieces = [piece("", index=0, id="a", name="web_"), piece("{}", index=0, name="search")]
        assert made(*pieces) == [("a", "web_search", "{}")]

    def test_arguments_sent_as_an_object_become_text(self):
        assert made(piece({"p": 1}, index=0, id="a", name="read")) == [("a", "read", '{"p": 1}')]

    def test_the_old_function_call_form_is_a_call(self):
        deltas = [chunk(function_call={"name": "read", "arguments": '{"p":'}), chunk(function_call={"arguments": "1}"})]
        assert made(*deltas, finish="function_call") == [("", "read", '{"p":1}')]

    def test_a_call_after_the_finish_reason_is_kept(self):
        first = piece("{}", index=0, id="a", name="read")
        first["choices"][0]["finish_reason"] = "tool_calls"
        reply = assemble(first, piece("{}", index=1, id="b", name="stat"))
        assert [call.id for call in reply.tool_calls] == ["a", "b"]

    def test_broken_arguments_are_handed_on_as_the_model_wrote_them(self):
        assert made(piece('{"a":1}{"a":1}', index=0, id="a", name="t")) == [("a", "t", '{"a":1}{"a":1}')]


class TestFinish:
    @pytest.mark.parametrize("label", ["stop", "end_turn", "STOP", "tool_calls", "function_call", "made_up"])
    def test_calls_decide_not_the_label(self, label):
        reply = assemble(piece("{}", index=0, id="a", name="t"), chunk(label))
        assert reply.finish_reason == "tool_calls"

    @pytest.mark.parametrize("label", ["stop", "end", "End_Turn", "tool_calls", None, ""])
    def test_text_alone_is_a_stop(self, label):
        assert assemble(chunk(content="x"), chunk(label)).finish_reason == "stop"

    @pytest.mark.parametrize("label", ["length", "max_tokens", "MAX_TOKENS"])
    def test_a_limit_stays_a_limit_even_with_calls(self, label):
        reply = assemble(piece('{"path":"a', index=0, id="a", name="t"), chunk(label))
        assert reply.finish_reason == "length"
        assert reply.tool_calls == (ToolCall("a", "t", '{"path":"a'),)

    def test_done_without_a_label_is_whole_when_the_call_is(self):
        assert assemble(piece("{}", index=0, id="a", name="t")).finish_reason == "tool_calls"

    @pytest.mark.parametrize(
        ("chunks", "done"),
        [([chunk(content="Let me")], False), ([piece('{"a', index=0, id="a", name="t")], True)],
        ids=["text", "half-call"],
    )
    def test_a_cut_answer_is_never_a_reply(self, chunks, done):
        with pytest.raises(ProviderError) as caught:
            assemble(*chunks, done=done)
        assert caught.value.reason is FailureReason.CONNECTION

    def test_the_text_of_a_cut_answer_is_kept(self):
        with pytest.raises(ProviderError) as caught:
            assemble(chunk(content="Let me compare the"), done=False)
        assert caught.value.partial == "Let me compare the"

    @pytest.mark.parametrize(
        ("chunks", "reason"),
        [
            ([], FailureReason.EMPTY_RESPONSE),
            ([chunk(content=""), chunk("stop")], FailureReason.EMPTY_RESPONSE),
            ([chunk(content=" \n"), chunk("stop")], FailureReason.EMPTY_RESPONSE),
            ([chunk(reasoning="hm"), chunk("stop")], FailureReason.EMPTY_RESPONSE),
            ([chunk("tool_calls")], FailureReason.EMPTY_RESPONSE),
            ([chunk("length")], FailureReason.TRUNCATED),
            ([chunk("content_filter")], FailureReason.CONTENT_BLOCKED),
            ([chunk("error", content="x")], FailureReason.SERVER_ERROR),
        ],
    )
    def test_an_answer_with_nothing_in_it_is_a_failure(self, chunks, reason):
        with pytest.raises(ProviderError) as caught:
            assemble(*chunks)
        assert caught.value.reason is reason

    @pytest.mark.parametrize(
        ("frame", "reason"),
        [
            ({"error": {"message": "rate limit exceeded"}}, FailureReason.RATE_LIMIT),
            ({"error": {"code": 429, "message": "wait"}}, FailureReason.RATE_LIMIT),
            ({"error": "boom"}, FailureReason.SERVER_ERROR),
            ({"object": "error", "message": "x", "code": 40303}, FailureReason.SERVER_ERROR),
            (
                {"choices": None, "error_type": "invalid_request", "error_message": "maximum context length is 8192"},
                FailureReason.CONTEXT_OVERFLOW,
            ),
            ({"choices": [{"delta": {}}], "error": {"code": 502, "message": "x"}}, FailureReason.SERVER_ERROR),
        ],
    )
    def test_an_error_inside_the_stream_is_the_error_and_not_text(self, frame, reason):
        assembler = StreamAssembler()
        assembler.feed(chunk(content="so far"))
        with pytest.raises(ProviderError) as caught:
            assembler.feed(frame)
        assert (caught.value.reason, caught.value.partial) == (reason, "so far")


def answer(content="hi", tool_calls=None, finish="stop", **message):
    message = SimpleNamespace(content=content, tool_calls=tool_calls, **message)
    return SimpleNamespace(
        choices=[SimpleNamespace(message=message, finish_reason=finish)], model="test/model", usage=None
    )


class TestWholeReplies:
    def test_a_bare_object_is_enough(self):
        assert assembly.read_reply(answer()) == Reply("hi", model="test/model")

    def test_calls_are_read_from_objects(self):
        function = SimpleNamespace(name="t", arguments='{"x": 1}')
        call = SimpleNamespace(id="c1", type="function", function=function)
        reply = assembly.read_reply(answer(None, [call], "stop"))
        assert reply.tool_calls == (ToolCall("c1", "t", '{"x": 1}'),)
        assert reply.finish_reason == "tool_calls"

    def test_dicts_parts_and_usage_are_read(self):
        usage = {
            "prompt_tokens": 9,
            "completion_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 3},
            "completion_tokens_details": {"reasoning_tokens": 2},
        }
        message = {"content": [{"type": "text", "text": "a"}, "b"], "reasoning": "hm\ud83d"}
        reply = assembly.read_reply({"choices": [{"message": message, "finish_reason": None}], "usage": usage})
        assert reply == Reply("ab", reasoning="hm\ufffd", usage=Usage(9, 4, 3, 0, 2))

    def test_members_of_the_wrong_type_count_as_absent(self):
        mock = MagicMock()
        mock.choices = [SimpleNamespace(message=SimpleNamespace(content="x", tool_calls=MagicMock()))]
        assert assembly.read_reply(mock) == Reply("x")

    @pytest.mark.parametrize(
        ("response", "reason"),
        [
            (SimpleNamespace(), FailureReason.INVALID_RESPONSE),
            ({"choices": []}, FailureReason.INVALID_RESPONSE),
            ({"error": {"message": "quota", "code": "insufficient_quota"}}, FailureReason.BILLING),
            (answer(""), FailureReason.EMPTY_RESPONSE),
            (answer("", finish="length"), FailureReason.TRUNCATED),
        ],
    )
    def test_what_is_no_answer_is_a_failure(self, response, reason):
        with pytest.raises(ProviderError) as caught:
            assembly.read_reply(response)
        assert caught.value.reason is reason


class StatusError(Exception):
    def __init__(self, status_code, body, headers=None):
        super().__init__(f"Error code: {status_code}")
        self.status_code = status_code
        self.body = body
        self.response = SimpleNamespace(headers=headers or {}, status_code=status_code)


def mock_client(returns=None, raises=None):
    client = MagicMock()
    client.chat.completions.create = MagicMock(return_value=returns, side_effect=raises)
    return client


def complete(client, request=ASK, on_event=None, cancellation=None):
    return OpenAIChat(lambda: client, name="mock").complete(request, on_event, cancellation or Cancellation())


class TestForeignClient:
    def test_nobody_listens_so_nothing_is_streamed(self):
        client = mock_client(answer())
        assert complete(client).content == "hi"
        client.chat.completions.create.assert_called_once_with(model="m", messages=[{"role": "user", "content": "hi"}])

    def test_messages_are_a_plain_list_of_dicts(self):
        class Rows(list):
            encoded = b"[]"

        client = mock_client(answer())
        complete(client, Request(model="m", messages=Rows(ASK.messages)))
        assert type(client.chat.completions.create.call_args.kwargs["messages"]) is list

    def test_tool_choice_goes_with_tools_only(self):
        client = mock_client(answer())
        complete(client, Request("m", ASK.messages, max_tokens=5, extra={"tool_choice": "auto", "temperature": 0}))
        assert client.chat.completions.create.call_args.kwargs.keys() == {
            "model",
            "messages",
            "max_tokens",
            "temperature",
        }
        tool = {"type": "function", "function": {"name": "t"}}
        complete(client, Request("m", ASK.messages, tools=(tool,), extra={"tool_choice": "auto"}))
        assert client.chat.completions.create.call_args.kwargs["tools"] == [tool]
        assert client.chat.completions.create.call_args.kwargs["tool_choice"] == "auto"

    def test_a_listener_gets_the_pieces_and_the_stream_is_closed(self):
        class Stream(list):
            closed = False

            def close(self):
                self.closed = True

        stream = Stream([chunk(content="a"), chunk(reasoning="r"), chunk("stop", content="b")])
        client = mock_client(stream)
        events = []
        assert complete(client, on_event=events.append).content == "ab"
        assert events == [TextDelta("a"), ReasoningDelta("r"), TextDelta("b")]
        assert client.chat.completions.create.call_args.kwargs["stream"] is True
        assert stream.closed

    def test_a_client_that_does_not_stream_is_heard_too(self):
        events = []
        assert complete(mock_client(answer()), on_event=events.append).content == "hi"
        assert events == [TextDelta("hi")]

    def test_the_client_is_looked_up_at_each_call(self):
        clients = [mock_client(answer("one")), mock_client(answer("two"))]
        provider = OpenAIChat(lambda: clients.pop(0), name="mock")
        assert [provider.complete(ASK, None, Cancellation()).content for _ in range(2)] == ["one", "two"]

    def test_an_http_error_of_a_foreign_client_is_classified(self):
        cause = StatusError(429, {"message": "slow down"}, {"retry-after": "7"})
        with pytest.raises(ProviderError) as caught:
            complete(mock_client(raises=cause))
        assert (caught.value.reason, caught.value.status, caught.value.retry_after) == (
            FailureReason.RATE_LIMIT,
            429,
            7,
        )
        assert caught.value.__cause__ is cause

    @pytest.mark.parametrize(
        ("cause", "reason"),
        [
            (RuntimeError("odd"), FailureReason.UNKNOWN),
            (TimeoutError("late"), FailureReason.TIMEOUT),
            (ConnectionResetError("gone"), FailureReason.CONNECTION),
            (type("APITimeoutError", (Exception,), {})("x"), FailureReason.TIMEOUT),
            (type("APIConnectionError", (Exception,), {})("x"), FailureReason.CONNECTION),
        ],
    )
    def test_other_exceptions_get_a_reason_and_keep_their_cause(self, cause, reason):
        with pytest.raises(ProviderError) as caught:
            complete(mock_client(raises=cause))
        assert caught.value.reason is reason
        assert caught.value.__cause__ is cause

    def test_the_key_of_a_foreign_client_stays_out_of_the_message(self):
        client = mock_client(raises=RuntimeError("bad key sk-foreign-CANARY12345"))
        client.api_key = "sk-foreign-CANARY12345"
        with pytest.raises(ProviderError) as caught:
            complete(client)
        assert "CANARY" not in str(caught.value)

    def test_a_break_in_the_middle_keeps_the_text(self):
        def stream():
            yield chunk(content="so far")
            raise ConnectionResetError

        with pytest.raises(ProviderError) as caught:
            complete(mock_client(stream()), on_event=lambda event: None)
        assert (caught.value.reason, caught.value.partial) == (FailureReason.CONNECTION, "so far")

    def test_what_the_listener_raises_comes_through(self):
        def listener(event):
            raise LookupError

        with pytest.raises(LookupError):
            complete(mock_client([chunk(content="a")]), on_event=listener)

    def test_a_cancelled_turn_asks_nobody(self):
        client = mock_client(answer())
        cancellation = Cancellation()
        cancellation.cancel("enough")
        with pytest.raises(TurnInterrupted, match="enough"):
            complete(client, cancellation=cancellation)
        client.chat.completions.create.assert_not_called()

    def test_a_cancellation_is_seen_between_chunks(self):
        cancellation = Cancellation()
        with pytest.raises(TurnInterrupted):
            complete(
                mock_client([chunk(content="a"), chunk("stop")]),
                on_event=lambda event: cancellation.cancel(),
                cancellation=cancellation,
            )
