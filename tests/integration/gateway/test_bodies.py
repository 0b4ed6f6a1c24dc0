"""A body is a JSON object within limits, or a 4xx that says why; nothing else, whatever is sent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tracemalloc
import zlib
from typing import Literal

import pytest
import pytest_asyncio
from aiohttp import StreamReader, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import TransferEncodingError
from aiohttp.test_utils import make_mocked_request
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec import Struct

from hermes_agent.gateway import bodies
from hermes_agent.gateway.replies import ApiError
from tests.integration.gateway.here import RIGHT, ask, guarded, parsed, serving

JSON = "Content-Type: application/json"


def refused(body):
    with pytest.raises(ApiError) as caught:
        bodies.parse(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert caught.value.message.startswith("Invalid JSON in request body: ")
    return caught.value.message.removeprefix("Invalid JSON in request body: ")


async def post(port, body=b"", *lines, path="/echo"):
    return await ask(port, path, RIGHT, *(lines or (JSON,)), method="POST", body=body)


class TestParsing:
    @pytest.mark.parametrize(
        "value",
        [
            {},
            {"a": 1, "b": -0.5, "c": [True, None, {"a": {}}], "": "", "\u00e9": "\U0001f600"},
            {"a": 2**63 - 1, "b": -(2**63), "c": 1.7e308},
            {"a": "x" * 100_000, "braces": "[{" * 100, "quotes": '"\\"[' * 100, "slash": "\\" * 101},
        ],
    )
    def test_an_object_comes_out_as_it_was_sent(self, value):
        for text in [json.dumps(value), json.dumps(value, ensure_ascii=False, indent=2)]:
            assert bodies.parse(text.encode()) == value

    @pytest.mark.parametrize(
        ("body", "why"),
        [
            (b"", "Expecting value (line 1, column 1)"),
            (b"   ", "Expecting value"),
            (b"{", "Expecting property name"),
            (b'{"a":}', "Expecting value (line 1, column 6)"),
            (b'{"a":1,}', "property name"),
            (b"{'a':1}", "property name"),
            (b'{"a":1}}', "Extra data"),
            (b'{"a":1} {"b":2}', "Extra data"),
            (b'{"a":"\n"}', "Invalid control character"),
            (b'{"a":"\\x"}', "Invalid \\escape"),
            (b'{"a":01}', "Expecting ',' delimiter"),
            (b"// no\n{}", "Expecting value"),
            (b"a=1&b=2", "Expecting value"),
            (b"\xef\xbb\xbf{}", "Expecting value"),
            (b'{"a":"\xff"}', "not UTF-8 text (byte 6)"),
            (b'{"a":"\xed\xa0\x80"}', "not UTF-8 text"),
            ('{"a":1}'.encode("utf-16"), "not UTF-8 text"),
            (b'{"a":NaN}', "NaN is not JSON"),
            (b'{"a":[Infinity]}', "Infinity is not JSON"),
            (b'{"a":-Infinity}', "-Infinity is not JSON"),
            (b'{"a":1e999}', "the number '1e999' is too large"),
            (b'{"a":-1e999}', "is too large"),
            (b'{"a":9223372036854775808}', "more than 64 bits"),
            (b'{"a":-9223372036854775809}', "more than 64 bits"),
            (b'{"a":' + b"9" * 5000 + b"}", "more than 64 bits"),
            (b'{"a":-' + b"9" * 400 + b".0}", "is too large"),
            (b'{"a":1,"a":1}', "the key 'a' stands twice in an object"),
            (b'{"x":{"b":0,"a":1,"\\u0061":2}}', "the key 'a' stands twice"),
            (b'[{"a":1,"a":2}]', "the key 'a' stands twice"),
            (b"[]", "expected an object, got a list"),
            (b'"a"', "expected an object, got a text"),
            (b"1", "expected an object, got a number"),
            (b"1.5", "expected an object, got a number"),
            (b"true", "expected an object, got true or false"),
            (b"null", "expected an object, got null"),
        ],
        ids=lambda value: ascii(value)[:40],
    )
    def test_what_is_no_strict_json_object_is_refused_with_the_place(self, body, why):
        assert why in refused(body)

    def test_a_long_key_is_not_echoed_whole(self):
        key = "k" * 1_000_000
        assert len(refused(f'{{"{key}":1,"{key}":2}}'.encode())) < 200

    @pytest.mark.parametrize(("opening", "closing"), [('{"a":', "}"), ("[", "]"), ('[{"a":', "}]"), ('{"a":[', "]}")])
    def test_sixty_four_levels_are_taken_and_no_more(self, opening, closing):
        levels = len(opening.replace('"a":', ""))

        def nested(depth):
            inside, odd = divmod(depth - 1, levels)
            middle = "[]" if odd else "1"
            return ('{"a":' + opening * inside + middle + closing * inside + "}").encode()

        bodies.parse(nested(64))
        for depth in [65, 66, 100, 900, 5000, 90_000]:
            assert refused(nested(depth)) == "nested deeper than 64 levels"

    def test_depth_is_counted_outside_of_texts_only(self):
        value = {"a": ["[" * 50, '"{', "\\", '\\"[[', {"b}]": [[1], [2]]}] * 100}
        assert bodies.parse(json.dumps(value).encode()) == value

    def test_unclosed_brackets_are_no_depth(self):
        assert refused(b'{"a":[' + b"[1]," * 100) != "nested deeper than 64 levels"
        assert refused(b"[" * 90_000) == "nested deeper than 64 levels"

    def test_values_are_counted_outside_of_texts_only(self):
        prose = {"a": 'one, "two", three\\, ' * 100_000}
        assert bodies.parse(json.dumps(prose).encode()) == prose
        assert len(bodies.parse(b'{"a":[' + b"0," * 99_998 + b"0]}")["a"]) == 99_999
        for value in [b"0", b"[]", b"{}", b'""', b'{"b":1}']:
            assert refused(b'{"a":[' + (value + b",") * 100_001 + value + b"]}") == "more than 100000 values"
        assert refused(b"[" * 2_000_000) == "more than 100000 values"
        assert refused(b'{"a":[' + b'{"b":[{}]},' * 30_000 + b"1]}") == "more than 100000 values"

    def test_half_characters_and_nul_become_the_replacement_character(self):
        body = b'{"a\\ud800":["\\udc00x","\\u0000","\\ud83d\\ude00","\\\\ud800"]}'
        assert bodies.parse(body) == {"a\ufffd": ["\ufffdx", "\ufffd", "\U0001f600", "\\ud800"]}


@pytest_asyncio.fixture
async def port(tmp_path):
    async with guarded(tmp_path) as (number, _):
        yield number


@pytest.mark.asyncio
class TestTypes:
    @pytest.mark.parametrize(
        "kind",
        [
            "application/json",
            "Application/JSON",
            "application/json; charset=utf-8",
            'application/json;charset="UTF-8"',
            "application/json; charset=us-ascii",
            "application/json ; version=1",
            "application/vnd.api+json",
        ],
    )
    async def test_json_is_taken(self, port, kind):
        answer = await post(port, b'{"a":1}', f"Content-Type: {kind}")
        assert (answer.status, answer.json()) == (200, {"fields": {"a": 1}})

    @pytest.mark.parametrize(
        "kind",
        [
            None,
            "",
            "text/plain",
            "text/plain; application/json",
            "text/json",
            "text/html+json",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "application/jsonp",
            "application/octet-stream",
            "application/json, text/plain",
            "application/json; charset=utf-16",
            "application/json; charset=latin-1",
            "*/*",
            "\u00e9",
        ],
    )
    async def test_everything_else_is_415_also_where_it_would_be_json(self, port, kind):
        answer = await post(port, b'{"a":1}', *(["X: y"] if kind is None else [f"Content-Type: {kind}"]))
        assert (answer.status, answer.code) == (415, "unsupported_content_type")
        assert answer.json()["error"]["param"] == "Content-Type"

    async def test_no_body_is_an_empty_object(self, port):
        for lines in [("X: y",), (JSON,), (JSON, "Content-Length: 0"), ("Content-Length: 0",)]:
            assert (await post(port, b"", *lines)).json() == {"fields": {}}
        for lines in [("X: y",), (JSON,)]:
            answer = await chunked(port, [], *lines)
            assert answer.json() == {"fields": {}}


async def chunked(port, chunks, *lines, end=b"0\r\n\r\n"):
    """Send a body without a length; stops sending when the server answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = ["POST /echo HTTP/1.1", "Host: localhost", RIGHT, "Transfer-Encoding: chunked", *(lines or (JSON,)), "", ""]
    async with asyncio.timeout(20):
        writer.write("\r\n".join(head).encode())
        for chunk in chunks:
            writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            await writer.drain()
        writer.write(end)
        await writer.drain()
        answer = parsed(await reader.readuntil(b"\r\n\r\n"))
        answer.body = await reader.readexactly(int(answer.headers["content-length"]))
        if answer.headers.get("connection") == "close":
            assert await reader.read() == b""  # an end, not a reset
    writer.close()
    await writer.wait_closed()
    return answer


def body_of(size):
    return b'{"a":"' + b"x" * (size - 8) + b'"}'


@pytest.mark.asyncio
class TestLimits:
    async def test_a_body_of_the_limit_is_taken_and_one_byte_more_is_not(self, port):
        assert (await post(port, body_of(100_000))).status == 200
        answer = await post(port, body_of(100_001))
        assert (answer.status, answer.code) == (413, "body_too_large")
        assert answer.headers["connection"] == "close"

    async def test_a_declared_size_is_refused_before_anything_of_it_came(self, port):
        answer = await post(port, b"", JSON, "Content-Length: 10000000000")
        assert (answer.status, answer.code) == (413, "body_too_large")

    @pytest.mark.parametrize("megabytes", [1, 5, 25])
    async def test_a_client_that_sends_on_sees_the_413_and_an_orderly_end(self, port, megabytes):
        size = megabytes * 1_000_000
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /echo HTTP/1.1\r\nHost: localhost\r\n{RIGHT}\r\n{JSON}\r\nContent-Length: {size}\r\n\r\n"
        async with asyncio.timeout(20):
            writer.write(head.encode() + body_of(size))
            await writer.drain()
            answer = parsed(await reader.read())
        assert (answer.status, answer.code) == (413, "body_too_large")
        writer.close()
        await writer.wait_closed()

    async def test_chunks_without_a_length_are_counted(self, port):
        piece = b"x" * 10_000
        assert (await chunked(port, [b'{"a":"', *[piece] * 9, b'"}'])).status == 200
        answer = await chunked(port, [b'{"a":"', *[piece] * 300, b'"}'])
        assert (answer.status, answer.code) == (413, "body_too_large")

    async def test_compressed_bodies_are_refused_and_never_unpacked(self, port):
        packer = zlib.compressobj(9, wbits=31)
        bomb = b"".join(packer.compress(b" " * 1_000_000) for _ in range(200)) + packer.flush()
        for name in ["gzip", "deflate", "br", "zstd", "GZip", "gzip, gzip", "rot13"]:
            tracemalloc.start()
            answer = await post(port, bomb, JSON, f"Content-Encoding: {name}")
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert (answer.status, answer.code) == (415, "unsupported_content_encoding")
            assert answer.headers["accept-encoding"] == "identity"
            assert peak < 5_000_000
        assert (await post(port, b'{"a":1}', JSON, "Content-Encoding: identity")).status == 200

    async def test_chunks_that_are_none_are_a_4xx(self, port):
        assert (await chunked(port, [b'{"a":1'], end=b"zz\r\nnonsense\r\n")).status in {400, 408}

    @pytest.mark.parametrize("error", [web.RequestPayloadError("odd"), TransferEncodingError("odd")])
    async def test_a_body_whose_framing_breaks_is_a_400_that_ends_the_connection(self, error):
        loop = asyncio.get_running_loop()
        payload = StreamReader(BaseProtocol(loop), 1000, loop=loop)
        payload.feed_data(b'{"a":')
        payload.set_exception(error)
        request = make_mocked_request("POST", "/", {"Content-Type": "application/json"}, payload=payload)
        with pytest.raises(ApiError) as caught:
            await bodies.read_json(request)
        assert (caught.value.status, caught.value.code, caught.value.close) == (400, "invalid_body", True)

    async def test_a_body_that_does_not_come_is_a_408(self, port):
        for data in [b"", b'{"a":']:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = f"POST /echo HTTP/1.1\r\nHost: localhost\r\n{RIGHT}\r\n{JSON}\r\nContent-Length: 1000\r\n\r\n"
            writer.write(head.encode() + data)
            async with asyncio.timeout(10):
                answer = parsed(await reader.readuntil(b"}}"))
            assert answer.status == 408
            assert answer.headers["connection"] == "close"
            writer.close()
            await writer.wait_closed()

    async def test_a_client_that_goes_away_in_the_middle_disturbs_nobody(self, port, hermes_home):
        for _ in range(3):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            head = f"POST /echo HTTP/1.1\r\nHost: localhost\r\n{RIGHT}\r\n{JSON}\r\nContent-Length: 1000\r\n\r\n"
            writer.write(head.encode() + b'{"a":')
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        assert (await post(port, b'{"a":1}')).status == 200
        log = hermes_home / "logs" / "agent.log"
        assert not log.exists() or "request.crashed" not in log.read_text(encoding="utf-8")


class Part(Struct):
    text: str


class Fields(Struct, forbid_unknown_fields=True):
    message: str
    mode: Literal["fast", "slow"] = "fast"
    count: int = 1
    parts: list[Part] = []
    extra: dict[str, str] = {}


class TestDecoding:
    def test_good_fields_become_the_object(self):
        found = bodies.decode({"message": "m", "parts": [{"text": "t"}]}, Fields)
        assert found == Fields("m", parts=[Part("t")])

    @pytest.mark.parametrize(
        ("fields", "param", "code", "message"),
        [
            ({}, "message", "missing_message", "message is required"),
            ({"message": 1}, "message", "invalid_message", "message: Expected str, got int"),
            ({"message": None}, "message", "invalid_message", "message: Expected str, got null"),
            ({"message": [None, None]}, "message", "invalid_message", "message: Expected str, got array"),
            ({"message": "m", "count": True}, "count", "invalid_count", "count: Expected int, got bool"),
            ({"message": "m", "count": "1"}, "count", "invalid_count", "count: Expected int, got str"),
            ({"message": "m", "mode": "x"}, "mode", "invalid_mode", "mode: Invalid enum value 'x'"),
            ({"message": "m", "parts": {}}, "parts", "invalid_parts", "parts: Expected array, got object"),
            (
                {"message": "m", "parts": [{"text": "t"}, {"text": {}}]},
                "parts[1].text",
                "invalid_parts",
                "parts[1].text: Expected str, got object",
            ),
            ({"message": "m", "parts": [{}]}, "parts[0].text", "missing_parts", "parts[0].text is required"),
            ({"message": "m", "extra": {"k": 1}}, "extra", "invalid_extra", "extra: Expected str, got int"),
            ({"message": "m", "x`y": 1}, "x`y", "unknown_field", "'x`y' is not a field of this request"),
        ],
    )
    def test_a_wrong_field_is_named(self, fields, param, code, message):
        with pytest.raises(ApiError) as caught:
            bodies.decode(fields, Fields)
        error = caught.value
        assert (error.status, error.param, error.code) == (400, param, code)
        assert error.message.replace("`", "") == message.replace("`", "")

    def test_a_route_can_give_its_own_codes(self):
        with pytest.raises(ApiError) as caught:
            bodies.decode({"message": "m", "parts": [{}]}, Fields, codes={"parts": "invalid_content"})
        assert caught.value.code == "invalid_content"

    def test_what_the_client_sent_is_not_echoed_at_length(self):
        for fields in [{"message": "m", "mode": "x" * 1_000_000}, {"message": "m", "y" * 1_000_000: 1}]:
            with pytest.raises(ApiError) as caught:
                bodies.decode(fields, Fields)
            assert len(str(caught.value.body())) < 1500

    @pytest.mark.parametrize(
        "fields",
        [
            {"schedule": [None, None]},
            {"messages": [{"role": {}, "content": ""}]},
            {"conversation": [None, None]},
            {"input": [None, None]},
            {"\ufffd\u0130\u200d": 1, "message": []},
        ],
    )
    def test_bodies_that_broke_other_servers_are_answers(self, fields):
        with pytest.raises(ApiError) as caught:
            bodies.decode(bodies.parse(json.dumps(fields).encode()), Fields)
        assert caught.value.status == 400


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=[])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)
ODD_BODIES = st.one_of(
    st.binary(max_size=300),
    VALUES.map(lambda value: json.dumps(value).encode()),
    st.dictionaries(st.text(max_size=5), VALUES).map(lambda value: json.dumps(value).encode()),
    st.tuples(st.integers(1, 300), st.sampled_from(['{"a":', "["])).map(lambda t: (t[0] * t[1]).encode()),
    st.lists(
        st.sampled_from(
            ['{"a":', '"a"', ":", ",", "}", "[", "]", "1", "-", "1e9", "\\u", "\\ud800", '"', "NaN", "\x00"]
        )
    ).map(lambda pieces: "".join(pieces).encode()),
)
TYPES = st.sampled_from(
    ["application/json", None, "text/plain", "application/json; charset=x", "a/b+json", ";", "\x80"]
)
ENCODINGS = st.sampled_from([None, None, None, "gzip", "deflate", "br", "zstd", "gzip, gzip"])


class OneServer:
    """A server in a loop of its own that the examples share: it answers what `read_json` makes of each request."""

    def __enter__(self):
        self.runner = asyncio.Runner()
        self.stack = contextlib.AsyncExitStack()
        app = web.Application()
        app.router.add_post("/", self.handle)
        self.port = self.runner.run(self.stack.enter_async_context(serving(app)))
        return self

    def __exit__(self, *error):
        self.runner.run(self.stack.aclose())
        self.runner.close()

    async def handle(self, request):
        try:
            fields = await bodies.read_json(request, limit=200, seconds=5)
        except ApiError as error:
            return error.to_response()
        assert type(fields) is dict
        assert json.dumps(fields, allow_nan=False).encode()
        return web.Response(text="read")

    async def post(self, body, kind, encoding, is_chunked):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = [b"POST / HTTP/1.1", b"Host: localhost"]
        head += [b"Content-Type: " + kind.encode("latin-1")] if kind is not None else []
        head += [b"Content-Encoding: " + encoding.encode()] if encoding is not None else []
        if is_chunked:
            head.append(b"Transfer-Encoding: chunked")
            body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in [body[:7], body[7:]] if part) + b"0\r\n\r\n"
        else:
            head.append(b"Content-Length: %d" % len(body))
        async with asyncio.timeout(10):
            writer.write(b"\r\n".join([*head, b"Connection: close", b"", b""]) + body)
            await writer.drain()
            data = await reader.read()
        writer.close()
        await writer.wait_closed()
        return parsed(data)


def test_any_body_is_an_object_or_a_4xx():
    with OneServer() as server:

        @settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
        @given(ODD_BODIES, TYPES, ENCODINGS, st.booleans())
        @example(b"{}", "application/json", None, False)
        @example(b'{"a":1}', "application/json", "gzip", True)
        @example(b'{"\\ud800":"\\u0000"}', "application/json", None, True)
        def check(body, kind, encoding, is_chunked):
            answer = server.runner.run(server.post(body, kind, encoding, is_chunked))
            assert answer.status == 200 or 400 <= answer.status < 500, answer
            if answer.status != 200 and answer.headers["content-type"] == "application/json":
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

        check()
