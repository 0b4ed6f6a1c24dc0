"""Our client against real HTTP on this machine: requests, connections, failures and streams."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from hermes_agent.errors import FailureReason, ProviderError, SettingsError
from hermes_agent.providers import openai_client
from hermes_agent.providers.base import TextDelta, Usage
from hermes_agent.providers.openai_client import OpenAI
from hermes_agent.testing.fake_openai import FakeOpenAI, call, calls, error, hold, raw_sse, text
from tests.integration.http_here import (
    ASK,
    KEY,
    WHOLE,
    client_of,
    complete,
    create,
    failing,
    http,
    one_shot,
    read_request,
)

R = FailureReason


class TestRequests:
    def test_a_whole_answer_reads_like_the_sdks(self):
        with FakeOpenAI([calls(call("t", {"x": 1}), content="now")]) as fake:
            answer = create(client_of(fake), temperature=0.5)
            message = answer.choices[0].message
            assert (message.content, message.tool_calls[0].function.name) == ("now", "t")
            assert (answer.usage.prompt_tokens, answer.model, message.refusal) == (100, "m", None)
            assert fake.requests[0].body == {"model": "m", "messages": ASK, "temperature": 0.5}
            assert fake.requests[0].headers["authorization"] == f"Bearer {KEY}"

    def test_a_stream_reads_like_the_sdks(self):
        with FakeOpenAI([text("abc", chunks=3)]) as fake, create(client_of(fake), stream=True) as stream:
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "abc"
            assert stream.done

    def test_encoded_messages_are_sent_as_those_bytes(self):
        class Rows(list):
            encoded = b'[{"role": "user",   "content": "from bytes"}]'

        received = []
        with FakeOpenAI([text("ok")], on_request=lambda request: received.append(request.headers)) as fake:
            create(client_of(fake), messages=Rows([{"role": "user", "content": "not these"}]))
            assert fake.wire == [{"role": "user", "content": "from bytes"}]
        assert openai_client.encode_body({"messages": Rows()}) == b'{"messages":' + Rows.encoded + b"}"
        assert json.loads(openai_client.encode_body({"model": "m", "messages": Rows(), "n": 1})) == {
            "model": "m",
            "n": 1,
            "messages": [{"role": "user", "content": "from bytes"}],
        }

    def test_the_sdks_extra_keywords_are_understood(self):
        with FakeOpenAI([text("ok")]) as fake:
            client = client_of(fake, default_headers={"X-One": "1"})
            create(client, extra_headers={"X-Two": "2"}, extra_body={"think": True}, timeout=5)
            assert fake.requests[0].body["think"] is True
            assert (fake.requests[0].headers["x-one"], fake.requests[0].headers["x-two"]) == ("1", "2")

    def test_requests_share_one_connection_also_after_streams(self):
        with FakeOpenAI([text("a")], repeat=True) as fake:
            for stream in (False, True, True, False):
                answer = create(client_of(fake), stream=stream)
                if stream:
                    assert len(list(answer)) == 3
            assert (len(fake.requests), fake.connections) == (4, 1)

    def test_parallel_requests_do_not_wait_for_each_other(self):
        holds = [hold("x", then=text("y")) for _ in range(12)]
        with FakeOpenAI(holds) as fake:
            threads = [threading.Thread(target=complete, args=(fake,)) for _ in holds]
            for thread in threads:
                thread.start()
            assert all(item.reached.wait(20) for item in holds)
            for item in holds:
                item.release()
            for thread in threads:
                thread.join(20)

    def test_an_abandoned_stream_gives_its_connection_up(self):
        with FakeOpenAI([text("abc", chunks=3)], repeat=True) as fake:
            stream = create(client_of(fake), stream=True)
            next(stream)
            stream.close()
            assert list(stream) == []
            create(client_of(fake))
            assert len(fake.requests) == 2

    def test_a_connection_that_the_server_closed_while_idle_is_replaced(self):
        with FakeOpenAI([text("a")], repeat=True) as fake:
            create(client_of(fake))
            fake.drop_connections()
            create(client_of(fake))
            assert (len(fake.requests), fake.connections) == (2, 2)

    def test_every_address_of_a_name_is_tried(self, monkeypatch):
        look_up = socket.getaddrinfo
        with FakeOpenAI([text("ok")]) as fake, socket.create_server(("127.0.0.1", 0)) as closed:
            dead = closed.getsockname()[1]
            closed.close()
            found = [*look_up("127.0.0.1", dead, type=socket.SOCK_STREAM), *look_up("127.0.0.1", fake.port)]
            monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
            create(OpenAI(api_key="", base_url=f"http://model.test:{fake.port}/v1/"))
            assert fake.requests[0].headers["host"] == f"model.test:{fake.port}"
            assert "authorization" not in fake.requests[0].headers

    def test_a_name_without_an_address_is_an_error(self, monkeypatch):
        def none(*args, **kwargs):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        monkeypatch.setattr(socket, "getaddrinfo", none)
        with pytest.raises(ProviderError, match=r"cannot resolve model\.test: Name or service not known") as caught:
            create(OpenAI(api_key="", base_url="http://model.test/v1"))
        assert caught.value.reason is R.CONNECTION

    def test_ipv6_addresses_are_bracketed(self):
        assert OpenAI(api_key="", base_url="http://[::1]:8080/v1").host == "[::1]:8080"

    def test_a_large_request_arrives_whole(self):
        large = [{"role": "user", "content": "x" * 3_000_000}]
        with FakeOpenAI([text("ok")]) as fake:
            create(client_of(fake), messages=large)
            assert fake.wire == large

    @pytest.mark.parametrize(
        "url", ["", "localhost:8080/v1", "ftp://x/v1", "http:///v1", "http://x:port/v1", "http://a..b/v1"]
    )
    def test_a_base_url_that_is_none_is_refused(self, url):
        with pytest.raises(SettingsError, match="base URL"):
            OpenAI(api_key="k", base_url=url)

    def test_a_key_that_http_cannot_carry_is_refused_without_showing_it(self):
        with pytest.raises(SettingsError) as caught:
            OpenAI(api_key="sk-\u20ac", base_url="http://x/v1")
        assert "\u20ac" not in str(caught.value)


class TestConnections:
    def test_a_kept_connection_that_dies_before_the_answer_is_retried_once(self):
        # The second request reaches a server that closes without a byte: the race of every idle timeout.
        port, log = one_shot([http(WHOLE), read_request], http(WHOLE))
        client = OpenAI(api_key=KEY, base_url=f"http://127.0.0.1:{port}/v1")
        assert create(client).choices[0].message.content == "fine"
        assert create(client).choices[0].message.content == "fine"
        assert len(log) == 2

    def test_a_new_connection_that_dies_is_an_error_and_not_retried(self):
        port, log = one_shot(b"", http(WHOLE))
        client = OpenAI(api_key=KEY, base_url=f"http://127.0.0.1:{port}/v1")
        with pytest.raises(ProviderError) as caught:
            create(client)
        assert caught.value.reason is R.CONNECTION
        assert len(log) == 1

    def test_an_answer_that_began_is_not_asked_for_again(self):
        port, log = one_shot([http(WHOLE), read_request, b"HTTP/1.1 200"], http(WHOLE))
        client = OpenAI(api_key=KEY, base_url=f"http://127.0.0.1:{port}/v1")
        create(client)
        with pytest.raises(ProviderError):
            create(client)
        assert len(log) == 1

    def test_an_unreachable_server_is_named(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        with pytest.raises(ProviderError, match=rf"^127\.0\.0\.1:{port} \(m\): ") as caught:
            create(OpenAI(api_key=KEY, base_url=f"http://127.0.0.1:{port}/v1"))
        assert caught.value.reason is R.CONNECTION

    def test_a_reset_in_the_middle_is_a_connection_failure(self):
        def reset(connection):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()

        port, _ = one_shot([http(WHOLE)[:-5], reset])
        with pytest.raises(ProviderError) as caught:
            create(OpenAI(api_key=KEY, base_url=f"http://127.0.0.1:{port}/v1"))
        assert caught.value.reason is R.CONNECTION

    def test_an_answer_before_the_end_of_the_request_is_heard(self):
        with socket.create_server(("127.0.0.1", 0)) as server:

            def refuse():
                connection, _ = server.accept()
                connection.recv(100)
                connection.sendall(http(b'{"error": "too large"}', status="413 Payload Too Large"))
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 20):
                    pass
                connection.close()

            thread = threading.Thread(target=refuse)
            thread.start()
            client = OpenAI(api_key=KEY, base_url=f"http://127.0.0.1:{server.getsockname()[1]}/v1")
            with pytest.raises(ProviderError) as caught:
                create(client, messages=[{"role": "user", "content": "x" * 8_000_000}])
            thread.join()
        assert (caught.value.reason, caught.value.status) == (R.CONTEXT_OVERFLOW, 413)

    def test_a_server_that_reads_nothing_is_a_timeout(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            client = OpenAI(api_key=KEY, base_url=f"http://127.0.0.1:{server.getsockname()[1]}/v1", timeout=0.2)
            with pytest.raises(ProviderError) as caught:
                create(client, messages=[{"role": "user", "content": "x" * 20_000_000}])
        assert caught.value.reason is R.TIMEOUT

    def test_silence_is_a_timeout(self):
        with FakeOpenAI([hold("partial")]) as fake:
            late = failing(fake, on_event=lambda event: None, timeout=0.2)
            assert (late.reason, late.partial) == (R.TIMEOUT, "partial")

    def test_a_forked_child_opens_its_own_connection(self):
        with FakeOpenAI([text("a")], repeat=True) as fake:
            code = f"""
                import os
                from hermes_agent.providers import transport
                from hermes_agent.providers.openai_client import OpenAI
                client = OpenAI(api_key="k", base_url={fake.base_url!r})
                ask = lambda: client.chat.completions.create(model="m", messages=[{{"role": "user", "content": "x"}}])
                ask()
                transport._shared.lock.acquire()   # held by another thread at the moment of the fork
                child = os.fork()
                if child == 0:
                    ask()
                    os._exit(0)
                transport._shared.lock.release()
                assert os.waitpid(child, 0)[1] == 0
                ask()
            """
            subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=30)
            assert (len(fake.requests), fake.connections) == (3, 2)


class TestFailures:
    @pytest.mark.parametrize(
        ("item", "reason", "status"),
        [
            (error(401, f"Incorrect API key provided: {KEY}", code="invalid_api_key"), R.AUTH, 401),
            (error(429, f"slow down, {KEY[8:20]}"), R.RATE_LIMIT, 429),
            (error(500, KEY), R.SERVER_ERROR, 500),
            (error(400, body=f"<html>{KEY}</html>".encode()), R.BAD_REQUEST, 400),
            (error(200, body=f"not json {KEY}".encode()), R.INVALID_RESPONSE, 0),
            (error(200, body=[KEY]), R.INVALID_RESPONSE, 0),
            (error(200, f"quota {KEY}", code="insufficient_quota"), R.BILLING, 0),
            (error(200, body={"choices": []}), R.INVALID_RESPONSE, 0),
            (error(307, "moved", headers={"Location": "/elsewhere"}), R.INVALID_RESPONSE, 307),
        ],
    )
    def test_every_failure_has_a_reason_a_place_and_no_key(self, item, reason, status):
        with FakeOpenAI([item]) as fake:
            failure = failing(fake)
            assert (failure.reason, failure.status) == (reason, status)
            assert str(failure).startswith(f"127.0.0.1:{fake.port} (m): ")
            assert "CANARY" not in str(failure)
            assert "\n" not in str(failure)

    def test_the_wait_that_the_server_asks_for_is_read(self):
        with FakeOpenAI([error(429, headers={"Retry-After": "7"})]) as fake:
            assert failing(fake).retry_after == 7

    def test_keys_in_other_headers_are_secrets_too(self):
        with FakeOpenAI([error(401, "no: abcdef-CANARY-123456")]) as fake:
            failure = failing(fake, default_headers={"X-Api-Key": "abcdef-CANARY-123456"})
            assert "CANARY" not in str(failure)

    def test_a_connection_is_used_again_after_an_error(self):
        with FakeOpenAI([error(500, times=2), text("ok")]) as fake:
            failing(fake)
            failing(fake, on_event=lambda event: None)
            complete(fake)
            assert fake.connections == 1

    def test_an_endless_answer_is_refused(self, monkeypatch):
        monkeypatch.setattr(openai_client, "MAX_BODY", 100)
        with FakeOpenAI([text("x" * 1000)]) as fake:
            assert failing(fake).reason is R.INVALID_RESPONSE


CHUNK = 'data: {"choices":[{"delta":{"content":"so far"}}]}\n\n'
FINISH = 'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = "data: [DONE]\n\n"


def stream(*frames, cut=False):
    events = []
    with FakeOpenAI([raw_sse(frames, cut=cut)]) as fake:
        try:
            return complete(fake, on_event=events.append), events
        except ProviderError as exc:
            return exc, events


class TestStreams:
    def test_text_arrives_in_pieces_and_usage_at_the_end(self):
        events = []
        with FakeOpenAI([text("a\U0001f600b", chunks=3)]) as fake:
            reply = complete(fake, on_event=events.append)
            assert fake.requests[0].body["stream_options"] == {"include_usage": True}
        assert events == [TextDelta("a"), TextDelta("\U0001f600"), TextDelta("b")]
        assert (reply.content, reply.usage, reply.finish_reason) == ("a\U0001f600b", Usage(100, 10), "stop")

    def test_without_a_listener_nothing_is_streamed(self):
        with FakeOpenAI([text("a")]) as fake:
            assert complete(fake).content == "a"
            assert "stream" not in fake.requests[0].body

    @pytest.mark.parametrize("cut", [True, False])
    def test_a_stream_without_an_end_is_cut(self, cut):
        failure, events = stream(CHUNK, cut=cut)
        assert (failure.reason, failure.partial, events) == (R.CONNECTION, "so far", [TextDelta("so far")])

    def test_a_call_that_was_cut_is_never_a_reply(self):
        delta = '{"tool_calls":[{"index":0,"id":"b","function":{"name":"t","arguments":"{\\"pa"}}]}'
        failure, _ = stream(CHUNK, f'data: {{"choices":[{{"delta":{delta}}}]}}\n\n', cut=True)
        assert (failure.reason, failure.partial) == (R.CONNECTION, "so far")

    @pytest.mark.parametrize(
        ("frames", "cut"),
        [((CHUNK, FINISH, DONE), False), ((CHUNK, FINISH), False), ((CHUNK, DONE), False), ((CHUNK, FINISH), True)],
        ids=["both", "finish-only", "done-only", "finish-then-cut"],
    )
    def test_a_finish_reason_or_done_makes_it_whole(self, frames, cut):
        reply, _ = stream(*frames, cut=cut)
        assert (reply.content, reply.finish_reason) == ("so far", "stop")

    @pytest.mark.parametrize("frames", [(DONE,), (), (": keep-alive\n\n", ": keep-alive\n\n")])
    def test_an_empty_stream_is_an_empty_answer(self, frames):
        failure, _ = stream(*frames)
        assert failure.reason is R.EMPTY_RESPONSE
        assert "empty stream" in str(failure)

    @pytest.mark.parametrize(
        ("frame", "reason", "status"),
        [
            (
                'id:1\nevent:error\n:HTTP_STATUS/429\ndata:{"code":"Throttling.AllocationQuota","message":"slow"}\n\n',
                R.RATE_LIMIT,
                429,
            ),
            ("event: error\ndata: plain words\n\n", R.SERVER_ERROR, 0),
            ('data: {"error":{"message":"rate limit exceeded"}}\n\n', R.RATE_LIMIT, 0),
            ('data: {"choices":null,"error_type":"x","error_message":"context length 400"}\n\n', R.CONTEXT_OVERFLOW, 0),
            ('{"error":{"code":503,"message":"busy"}}\n\n', R.OVERLOADED, 503),
            ("data: {broken\n\n", R.INVALID_RESPONSE, 0),
        ],
    )
    def test_an_error_in_the_stream_is_an_error(self, frame, reason, status):
        failure, events = stream(CHUNK, frame, FINISH, DONE)
        assert (failure.reason, failure.status, failure.partial) == (reason, status, "so far")
        assert events == [TextDelta("so far")]

    def test_a_server_that_does_not_stream_is_read_whole(self):
        events = []
        with FakeOpenAI([error(200, body=json.loads(WHOLE))]) as fake:
            assert complete(fake, on_event=events.append).content == "fine"
        assert events == [TextDelta("fine")]

    def test_a_server_that_stays_after_done_holds_nobody_up(self):
        stays = (CHUNK + FINISH + DONE).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
        gone = threading.Event()
        port, _ = one_shot([head + stays, lambda connection: gone.wait(60)])
        client = OpenAI(api_key=KEY, base_url=f"http://127.0.0.1:{port}/v1")
        started = time.monotonic()
        assert len(list(create(client, stream=True))) == 2
        gone.set()
        assert time.monotonic() - started < 30


def test_importing_the_client_is_light(unmeasured):
    code = "import sys, hermes_agent.providers.openai_chat; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"httpcore", "h11", "ssl", "socket", "msgspec", "logging", "asyncio", "email"} & set(loaded)
