"""The fake server that ships for tests: what it answers, refuses and records."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from hermes_agent.testing.fake_openai import FakeOpenAI, call, calls, delay, error, hold, raw_sse, text

USER = {"role": "user", "content": "hi"}


class Client:
    """Speaks HTTP by hand, so that the fake is not tested with our own client."""

    def __init__(self, port):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)

    def ask(self, *messages, raw=None, path="/v1/chat/completions", **rest):
        body = raw if raw is not None else json.dumps({"model": "m", "messages": messages or (USER,), **rest})
        headers = {"Authorization": "Bearer sk-CANARY", "Content-Type": "application/json"}
        self.connection.request("POST", path, body, headers)
        answer = self.connection.getresponse()
        return answer.status, answer.headers, answer.read()

    def json(self, *messages, **rest):
        status, _, body = self.ask(*messages, **rest)
        return status, json.loads(body)

    def frames(self, **rest):
        status, headers, body = self.ask(stream=True, **rest)
        assert (status, headers["Content-Type"]) == (200, "text/event-stream")
        return [frame.removeprefix("data: ") for frame in body.decode().strip().split("\n\n")]


@pytest.fixture
def serve():
    open_fakes = []

    def start(*replies, **options):
        fake = FakeOpenAI(replies, **options).__enter__()
        client = Client(fake.port)
        open_fakes.append((fake, client))
        return fake, client

    yield start
    for fake, client in open_fakes:
        client.connection.close()
        fake.close()


def test_one_item_is_answered_whole_or_streamed(serve):
    item = calls(call("t", {"x": 1}), call("u", "{bad", id="mine"), content="now")
    fake, client = serve(item, item)
    status, whole = client.json()
    message = whole["choices"][0]["message"]
    assert (status, message["content"], whole["choices"][0]["finish_reason"]) == (200, "now", "tool_calls")
    made = [(made["id"], made["function"]["arguments"]) for made in message["tool_calls"]]
    assert made == [("call_0_0", '{"x": 1}'), ("mine", "{bad")]
    *chunks, done = client.frames()
    assert done == "[DONE]"
    deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "now"
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    assert "".join(p["function"].get("arguments", "") for p in pieces if p["index"] == 0) == '{"x": 1}'
    assert fake.connections == 1


def test_usage_is_streamed_when_asked_for(serve):
    _, client = serve(text("a", reasoning="hm"), repeat=True)
    assert "usage" not in "".join(client.frames())
    last = json.loads(client.frames(stream_options={"include_usage": True})[-2])
    assert (last["choices"], last["usage"]["prompt_tokens"]) == ([], 100)


def test_text_comes_in_the_number_of_pieces_that_was_asked(serve):
    _, client = serve(text("abcdef", chunks=3))
    contents = [json.loads(f)["choices"][0]["delta"].get("content") for f in client.frames()[:-1]]
    assert contents == ["", "ab", "cd", "ef", None]


def test_errors_come_as_often_as_said_with_their_headers(serve):
    _, client = serve(error(429, "slow", code="rate_limit", headers={"Retry-After": "3"}, times=2), text("ok"))
    for _ in range(2):
        status, headers, body = client.ask()
        assert (status, headers["Retry-After"]) == (429, "3")
        assert json.loads(body)["error"] == {
            "message": "slow",
            "type": "rate_limit",
            "param": None,
            "code": "rate_limit",
        }
    assert client.ask()[0] == 200


def test_a_used_up_script_is_a_500_and_repeat_plays_the_last_item(serve):
    fake, client = serve(text("only"))
    assert client.ask()[0] == 200
    status, body = client.json()
    assert (status, body["error"]["message"]) == (500, "script used up")
    fake.extend([text("more")])
    assert client.ask()[0] == 200
    _, client = serve(text("again"), repeat=True)
    assert [client.ask()[0] for _ in range(3)] == [200, 200, 200]


def test_a_callable_answers_from_the_request(serve):
    _, client = serve(lambda body: delay(0.0, text(body["messages"][-1]["content"].upper())), repeat=True)
    assert client.json({"role": "user", "content": "loud"})[1]["choices"][0]["message"]["content"] == "LOUD"


def test_raw_frames_are_sent_as_they_are_and_a_cut_drops_the_connection(serve):
    _, client = serve(raw_sse(["data: x\r\n", b": c\n"]), raw_sse(["data: half"], cut=True))
    assert client.ask(stream=True)[2] == b"data: x\r\n: c\n"
    with pytest.raises(http.client.IncompleteRead) as caught:
        client.ask(stream=True)
    assert caught.value.partial == b"data: half"


def test_a_held_answer_stays_open_until_it_is_released(serve):
    held = hold("begin ", then=text("end"))
    _, client = serve(held)
    found = []
    reader = threading.Thread(target=lambda: found.extend(client.frames()))
    reader.start()
    assert held.reached.wait(10)
    assert found == []
    held.release()
    reader.join(10)
    contents = [json.loads(f)["choices"][0]["delta"].get("content") or "" for f in found[:-1]]
    assert "".join(contents) == "begin end"


def test_requests_are_recorded_in_order(serve):
    fake, client = serve(text("a"), repeat=True)
    client.ask(temperature=1)
    client.ask({"role": "user", "content": "two"})
    first, second = fake.requests
    assert (first.path, first.body["temperature"], first.headers["authorization"]) == (
        "/v1/chat/completions",
        1,
        "Bearer sk-CANARY",
    )
    assert second.time >= first.time
    assert fake.wire == [{"role": "user", "content": "two"}]


ASSISTANT = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "t", "arguments": "{}"}}],
}


@pytest.mark.parametrize(
    ("messages", "rest"),
    [
        ([USER, ASSISTANT], {}),
        ([USER, {"role": "tool", "tool_call_id": "x", "content": "r"}], {}),
        ([USER, USER], {}),
        ([USER, {"role": "assistant", "content": ""}], {}),
        ([USER, {"role": "assistant", "content": "x", "tool_calls": []}], {}),
        ([{"role": "user", "content": "a\x00"}], {}),
        ([USER], {"tool_choice": "auto"}),
        ([USER], {"tools": []}),
    ],
)
def test_a_strict_server_refuses_what_a_strict_provider_refuses(serve, messages, rest):
    fake, client = serve(text("ok"))
    status, body = client.json(*messages, **rest)
    assert status == 400
    assert fake.violations == [body["error"]["message"]]
    assert client.ask()[0] == 200, "a refused request must not use up a reply"


def test_bytes_that_are_not_utf8_are_refused(serve):
    fake, client = serve(text("ok"))
    assert client.ask(raw=b'{"messages": [{"role": "user", "content": "\xff"}]}')[0] == 400
    assert len(fake.violations) == 1


def test_a_good_exchange_and_a_lenient_server_are_not_refused(serve):
    fake, client = serve(text("ok"), repeat=True)
    tool = {"role": "tool", "tool_call_id": "c1", "content": "r"}
    assert client.ask(USER, ASSISTANT, tool, tools=[{"type": "function"}], tool_choice="auto")[0] == 200
    assert fake.violations == []
    _, client = serve(text("ok"), strict=False)
    assert client.ask(USER, ASSISTANT)[0] == 200
    _, client = serve(text("ok"), alternation=False)
    assert client.ask(USER, USER)[0] == 200


def test_models_are_listed_and_other_paths_are_not_found(serve):
    _, client = serve(model="toy")
    client.connection.request("GET", "/v1/models")
    assert json.loads(client.connection.getresponse().read())["data"][0]["id"] == "toy"
    client.connection.request("GET", "/v1/nothing")
    answer = client.connection.getresponse()
    answer.read()
    assert answer.status == 404
    assert client.ask(path="/v1/embeddings")[0] == 404


def test_closing_frees_a_client_that_waits():
    fake = FakeOpenAI([hold("x")]).__enter__()
    client = Client(fake.port)
    ended = threading.Event()

    def wait():
        with suppress(OSError, http.client.HTTPException):
            client.ask(stream=True)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    fake._holds[0].reached.wait(10)
    fake.close()
    assert ended.wait(10)
    client.connection.close()


def test_as_a_process_it_plays_a_script_by_the_request_and_logs_without_the_key(tmp_path):
    script = {
        "model": "toy",
        "replies": [
            {"error": {"reason": "overloaded", "times": 1}, "tool_calls": [{"name": "t", "arguments": {"x": 1}}]},
            {"text": "got {{last_result}}"},
        ],
    }
    path, log = tmp_path / "script.json", tmp_path / "log.jsonl"
    path.write_text(json.dumps(script), encoding="utf-8")
    command = [sys.executable, "-m", "hermes_agent.testing.fake_openai", "--script", path, "--log", log]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            name, _, port = server.stdout.readline().strip().rpartition(":")
            assert name == "listening 127.0.0.1"
            client = Client(int(port))
            assert client.json()[0] == 503
            assert client.json()[1]["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "t"
            again = client.json()[1]["choices"][0]["message"]
            assert again["tool_calls"], "the same request gets the same reply"
            tool = {"role": "tool", "tool_call_id": "c1", "content": "42"}
            assert client.json(USER, ASSISTANT, tool)[1]["choices"][0]["message"]["content"] == "got 42"
            assert client.ask(USER, USER)[0] == 400
            client.connection.close()
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(10) == 0
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert [len(line["body"]["messages"]) for line in lines] == [1, 1, 1, 3, 2]
    assert [bool(line["refused"]) for line in lines] == [False, False, False, False, True]
    assert {line["headers"]["authorization"] for line in lines} == {"***"}
