"""Server-sent events: any legal framing, cut anywhere, gives the same reply."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_agent.providers import sse
from hermes_agent.providers.base import ToolCall
from hermes_agent.providers.openai_chat import StreamAssembler

FRAMES = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "caf\u00e9 \U0001f600"}}]},
    {"choices": [{"index": 0, "delta": {"content": " na\u00efve"}, "finish_reason": ""}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "t"}}]}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"x":"\u00e9"}'}}]}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
]


def wire(newline="\n", before="", null=False):
    lines = [before + "data: " + json.dumps(frame, ensure_ascii=False) + newline * 2 for frame in FRAMES]
    if null:
        lines.insert(2, "data: null" + newline * 2)
    return ("".join(lines) + "data: [DONE]" + newline * 2).encode()


def read(pieces):
    decoder = sse.Decoder()
    assembler = StreamAssembler()
    events = [event for data in pieces for event in decoder.feed(data)] + decoder.finish()
    for event in events:
        if event.data == "[DONE]":
            assembler.done = True
        else:
            assembler.feed(json.loads(event.data))
    return assembler.reply()


class TestServerSentEvents:
    WHOLE = read([wire()])

    def test_the_stream_reads_as_written(self):
        assert self.WHOLE.content == "caf\u00e9 \U0001f600 na\u00efve"
        assert self.WHOLE.tool_calls == (ToolCall("a", "t", '{"x":"\u00e9"}'),)

    @pytest.mark.parametrize(
        "raw",
        [
            wire("\r\n"),
            wire("\r"),
            wire(before=": keep-alive\n\n\n"),
            wire(before="event: message\nid: 7\nretry: 10\n"),
            wire(null=True),
            wire().rstrip(b"\n"),
        ],
        ids=["crlf", "cr", "comments", "fields", "null", "no-last-blank-line"],
    )
    def test_legal_frames_change_nothing(self, raw):
        assert read([raw]) == self.WHOLE
        assert read([raw[at : at + 1] for at in range(len(raw))]) == self.WHOLE

    @settings(max_examples=60, deadline=None)
    @given(cuts=st.lists(st.integers(0, 2000), max_size=12), newline=st.sampled_from(["\n", "\r\n"]))
    def test_any_cutting_gives_the_same_reply(self, cuts, newline):
        raw = wire(newline)
        edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
        assert read([raw[a:b] for a, b in pairwise(edges)]) == self.WHOLE

    def test_data_lines_of_one_event_join(self):
        assert sse.Decoder().feed(b"data: a\ndata:b\n\n") == [sse.Event("", "a\nb")]

    def test_invalid_bytes_are_replaced(self):
        assert sse.Decoder().feed(b"data: a\xffb\n\n") == [sse.Event("", "a\ufffdb")]

    def test_a_status_in_a_comment_belongs_to_its_event(self):
        raw = b"id:1\nevent:error\n:HTTP_STATUS/429\ndata:{}\n\ndata: x\n\n"
        assert sse.Decoder().feed(raw) == [sse.Event("error", "{}", 429), sse.Event("", "x")]

    def test_bare_json_is_data(self):
        assert sse.Decoder().feed(b'{"error": "x"}\n\n') == [sse.Event("", '{"error": "x"}')]

    def test_an_endless_line_is_refused(self, monkeypatch):
        monkeypatch.setattr(sse, "MAX_LINE", 10)
        with pytest.raises(ValueError, match="too long"):
            sse.Decoder().feed(b"data: 123456")
