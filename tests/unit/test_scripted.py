"""The offline model: its script format, and that the request alone decides what comes next."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hermes_agent.cancellation import Cancellation
from hermes_agent.errors import FailureReason, ProviderError, SettingsError, TurnInterrupted
from hermes_agent.providers.base import Request, TextDelta, ToolCall, Usage
from hermes_agent.providers.scripted import Scripted, parse_script

USER = {"role": "user", "content": "go"}


def provider(*replies):
    return Scripted(parse_script({"model": "toy", "replies": list(replies)}))


def ask(model, *messages, on_event=None, cancellation=None):
    return model.complete(Request("m", list(messages)), on_event, cancellation or Cancellation())


def said(text):
    return {"role": "assistant", "content": text}


def called(call_id="c"):
    return {"role": "assistant", "content": None, "tool_calls": [{"id": call_id}]}


def result(text):
    return {"role": "tool", "tool_call_id": "c", "content": text}


def test_a_conversation_is_played_in_order_and_any_process_can_go_on():
    replies = (
        {"tool_calls": [{"name": "read", "arguments": {"p": 1}}, {"name": "x", "arguments": "{bad", "id": "mine"}]},
        {"text": "done", "usage": {"input_tokens": 3}, "finish_reason": "length"},
    )
    first = ask(provider(*replies), USER)
    assert first.tool_calls == (ToolCall("call_0_0", "read", '{"p": 1}'), ToolCall("mine", "x", "{bad"))
    assert (first.finish_reason, first.model) == ("tool_calls", "toy")
    second = ask(provider(*replies), USER, called(), result("r"))
    assert (second.content, second.finish_reason, second.usage) == ("done", "length", Usage(3))


def test_the_calls_of_a_script_are_not_shared_between_replies():
    model = provider({"tool_calls": [{"name": "read"}]})
    ask(model, USER).tool_calls[0].id = "changed"
    assert ask(model, USER).tool_calls == (ToolCall("call_0_0", "read", "{}"),)


def test_bracketed_notes_are_not_replies_of_the_script():
    model = provider({"text": "one"}, {"text": "[2] two"}, {"text": "three"})
    note = said("[no reply was recorded for the message above]")
    assert ask(model, USER, note, USER).content == "one"
    assert ask(model, USER, said("one"), USER, note, USER).content == "[2] two"
    assert ask(model, USER, said("one"), USER, said("[2] two"), USER).content == "three"


def test_match_passes_a_reply_over_and_the_history_is_read_the_same_way():
    model = provider({"text": "a"}, {"text": "b", "match": "^red$"}, {"text": "c"}, {"text": "d"})
    red, blue = {"role": "user", "content": "red"}, {"role": "user", "content": [{"type": "text", "text": "blue"}]}
    assert ask(model, USER, said("a"), red).content == "b"
    assert ask(model, USER, said("a"), blue).content == "c"
    assert ask(model, USER, said("a"), blue, said("c"), blue).content == "d"
    assert ask(model, USER, said("a"), red, said("b"), blue).content == "c"


def test_match_looks_at_the_last_tool_result_too():
    model = provider({"tool_calls": [{"name": "t"}]}, {"text": "failed", "match": "exit 1"}, {"text": "fine"})
    assert ask(model, USER, called(), result("exit 1")).content == "failed"
    assert ask(model, USER, called(), result("exit 0")).content == "fine"


def test_a_used_up_script_says_so():
    with pytest.raises(ProviderError, match="used up") as caught:
        ask(provider({"text": "a"}), USER, said("a"), USER)
    assert caught.value.reason is FailureReason.BAD_REQUEST


def test_marks_become_what_the_request_holds():
    model = provider({"text": "{{last_user}}: {{last_result}}"})
    assert ask(model, USER).content == "go: "
    assert ask(model, result("r" * 3000), {"role": "user", "content": "u"}).content == "u: " + "r" * 2000


def test_text_is_streamed_in_pieces():
    events = []
    ask(provider({"text": "abcdefg", "stream": 3}), USER, on_event=events.append)
    assert events == [TextDelta("abc"), TextDelta("def"), TextDelta("g")]


def test_an_error_comes_so_many_times_before_the_reply():
    error = {"reason": "rate_limit", "message": "slow", "times": 2, "status": 429, "retry_after": 1.5}
    model = provider({"error": error, "text": "ok"})
    for _ in range(2):
        with pytest.raises(ProviderError, match="slow") as caught:
            ask(model, USER)
        assert (caught.value.reason, caught.value.status, caught.value.retry_after) == ("rate_limit", 429, 1.5)
    assert ask(model, USER).content == "ok"


def test_an_error_without_a_count_stays():
    model = provider({"error": {"reason": "auth"}})
    for _ in range(3):
        with pytest.raises(ProviderError, match="auth"):
            ask(model, USER)


def test_a_stop_ends_a_delay():
    cancellation = Cancellation()
    cancellation.cancel("enough")
    with pytest.raises(TurnInterrupted, match="enough"):
        ask(provider({"text": "late", "delay": 3600}), USER, cancellation=cancellation)


@pytest.mark.parametrize(
    ("script", "names"),
    [
        ([], "the whole must be a JSON object"),
        ({}, "replies must be a list"),
        ({"replies": []}, "replies must be a list"),
        ({"replies": [1]}, "replies[0] must be a JSON object"),
        ({"replies": [{}]}, "replies[0] needs text, tool_calls or error"),
        ({"replies": [{"txt": "a"}]}, "replies[0].txt is not a known field; known are text"),
        ({"replies": [{"text": 1}]}, "replies[0].text must be a text"),
        ({"replies": [{"text": "[a note]"}]}, "replies[0].text must not be one bracketed note"),
        ({"replies": [{"text": "a", "delay": "1"}]}, "replies[0].delay must be a number"),
        ({"replies": [{"text": "a", "match": "("}]}, "replies[0].match is not a regular expression"),
        ({"replies": [{"text": "a"}, {"tool_calls": {}, "text": "x"}]}, "replies[1].tool_calls must be a list"),
        ({"replies": [{"tool_calls": [{"name": ""}]}]}, "replies[0].tool_calls[0].name must be"),
        ({"replies": [{"tool_calls": [{"name": "t", "arguments": 1}]}]}, "tool_calls[0].arguments must be"),
        ({"replies": [{"error": {"reason": "bad luck"}}]}, "replies[0].error.reason 'bad luck' is not one of"),
        ({"replies": [{"text": "a", "usage": {"tokens": 1}}]}, "replies[0].usage.tokens is not a known field"),
        ({"model": 3, "replies": [{"text": "a"}]}, "model must be a text"),
    ],
)
def test_a_wrong_script_names_the_field(script, names):
    with pytest.raises(SettingsError) as caught:
        parse_script(script, source="s.json")
    assert names in str(caught.value)
    assert "s.json" in str(caught.value)


def test_a_file_that_is_not_json_names_the_line(tmp_path):
    path = tmp_path / "s.json"
    path.write_text('{\n "replies": [\n  {text: "a"}\n]}', encoding="utf-8")
    with pytest.raises(SettingsError, match="line 3"):
        Scripted.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"none\.json"):
        Scripted.load(tmp_path / "none.json")


def test_a_file_is_played(tmp_path):
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"replies": [{"text": "h\u00e9"}]}), encoding="utf-8")
    assert ask(Scripted.load(path), USER).content == "h\u00e9"


def test_importing_the_offline_model_needs_no_http_and_no_msgspec(unmeasured):
    code = "import sys, hermes_agent.providers.scripted; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"httpcore", "ssl", "socket", "msgspec", "logging", "asyncio"} & set(loaded)
