"""What stands between the network and the handlers: hosts, pages, keys, and how every answer leaves."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from hermes_agent.errors import SettingsError
from hermes_agent.gateway import guard
from hermes_agent.gateway.guard import refuse_to_bind
from hermes_agent.gateway.keys import KeyRing, Scope
from tests.integration.gateway.here import KEY, RIGHT, Clock, ask, guarded, parsed, send

pytestmark = pytest.mark.asyncio

REFUSED = {
    "error": {
        "message": "Invalid gateway API key (API_SERVER_KEY)",
        "type": "gateway_auth_error",
        "param": None,
        "code": "gateway_auth_failed",
    }
}
PAGE = "https://app.example"
SECURITY = {
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


def envelope(answer):
    """The error object of an answer, which must be complete."""
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert error["message"]
    return error


BAD_CREDENTIALS = [
    (),
    ("Authorization:",),
    ("Authorization: Bearer",),
    ("Authorization: Bearer ",),
    (f"Authorization: {KEY}",),
    (f"Authorization: Basic {KEY}",),
    (f"Authorization: Token {KEY}",),
    (f"Authorization: Bearer  {KEY}",),
    (f"Authorization: Bearer\t{KEY}",),
    (f"Authorization: Bearer:{KEY}",),
    (f"Authorization: Bearer={KEY}",),
    (f"Authorization: Bearer {KEY} x",),
    (f"Authorization: Bearer x {KEY}",),
    (f"Authorization: Bearer {KEY},",),
    (f'Authorization: Bearer "{KEY}"',),
    (f"Authorization: Bearer Bearer {KEY}",),
    (f"Authorization: Bearer {KEY[:-1]}",),
    (f"Authorization: Bearer {KEY[1:]}",),
    (f"Authorization: Bearer {KEY}x",),
    (f"Authorization: Bearer {KEY[:-1]}X",),
    (f"Authorization: Bearer {KEY.lower()}",),
    (f"Authorization: Bearer {KEY.upper()}",),
    (f"Authorization: Bearer {KEY[:4]}",),
    (f"Authorization: Bearer {'x' * len(KEY)}",),
    ("Authorization: Bearer " + "x" * 10_000,),
    ("Authorization: Bearer " + "x" * 16_000,),
    ("Authorization: Bearer schl\u00fcssel-schl\u00fcssel",),
    (b"Authorization: Bearer \xe9",),
    (b"Authorization: Bearer \xff\xfe\xfd",),
    (b"Authorization: \xf0\x9f\x98\x80",),
    ("Authorization: Bearer null",),
    ("Authorization: Bearer undefined",),
    ("Authorization: Bearer *",),
    ("Authorization: Bearer ' OR 1=1 --",),
    ("Authorization: Bearer ../../keys.json",),
    ("Authorization: Bearer %s%s%n",),
    (RIGHT, RIGHT),
    (RIGHT, "Authorization: Bearer wrong"),
    ("Authorization: Bearer wrong", RIGHT),
    (f"X-Api-Key: {KEY}",),
    (f"Proxy-Authorization: Bearer {KEY}",),
    (f"Cookie: Authorization=Bearer {KEY}",),
]


class TestKeys:
    async def test_every_other_credential_gets_the_same_401(self, tmp_path):
        async with guarded(tmp_path, failures_a_minute=1000) as (port, _):
            for lines in BAD_CREDENTIALS:
                answer = await ask(port, "/who", *lines)
                assert (answer.status, answer.json()) == (401, REFUSED), lines
                assert answer.headers["www-authenticate"] == "Bearer"

    async def test_bearer_in_any_case_and_the_key_get_in(self, tmp_path):
        async with guarded(tmp_path) as (port, _):
            for scheme in ["Bearer", "bearer", "BEARER"]:
                answer = await ask(port, "/who", f"authorization: {scheme} {KEY}")
                assert (answer.status, answer.json()) == (200, {"name": "owner"})

    async def test_a_key_in_the_address_is_none(self, tmp_path):
        async with guarded(tmp_path) as (port, _):
            for name in ["key", "api_key", "access_token", "token"]:
                assert (await ask(port, f"/who?{name}={KEY}")).status == 401

    async def test_a_revoked_key_is_refused_in_less_than_a_second(self, tmp_path):
        clock = Clock()
        ring = KeyRing(tmp_path, None, clock=clock)
        line = f"Authorization: Bearer {ring.issue('rex', [Scope.READ])}"
        async with guarded(tmp_path, keys=ring) as (port, _):
            assert (await ask(port, "/who", line)).json() == {"name": "rex"}
            KeyRing(tmp_path, None).revoke("rex")
            clock.now += 0.9
            assert (await ask(port, "/who", line)).json() == REFUSED

    async def test_a_route_demands_its_scope_and_a_client_cannot_add_one(self, tmp_path):
        ring = KeyRing(tmp_path, None)
        reader = f"Authorization: Bearer {ring.issue('reader', [Scope.READ])}"
        approver = f"Authorization: Bearer {ring.issue('approver', [Scope.APPROVE])}"
        async with guarded(tmp_path, keys=ring) as (port, _):
            assert (await ask(port, "/who", reader)).status == 200
            assert (await ask(port, "/approve", approver, method="POST")).status == 200
            for line, method, path in [(reader, "POST", "/approve"), (approver, "GET", "/who")]:
                answer = await ask(port, path, line, "X-Scopes: approve, read, admin", method=method)
                assert (answer.status, answer.code) == (403, "insufficient_scope")
                assert envelope(answer)["type"] == "permission_error"

    async def test_an_open_route_needs_no_key_and_is_no_place_to_try_one(self, tmp_path):
        async with guarded(tmp_path, failures_a_minute=1) as (port, _):
            for lines in [(), ("Authorization: Bearer wrong-wrong-wrong",), (RIGHT,)] * 3:
                answer = await ask(port, "/health", *lines)
                assert (answer.status, answer.json()) == (200, {"ok": True})
            assert (await ask(port, "/who", "Authorization: Bearer wrong-wrong-wrong")).status == 401

    async def test_without_a_key_no_path_can_be_told_from_another(self, tmp_path):
        async with guarded(tmp_path) as (port, _):
            asked = [("/who", "GET"), ("/nowhere", "GET"), ("/who", "DELETE"), ("/who", "TRACE"), ("/a/../b", "PUT")]
            answers = [await ask(port, path, method=method) for path, method in asked]
            assert [(answer.status, answer.json()) for answer in answers] == [(401, REFUSED)] * len(asked)
            assert len({tuple(set(answer.headers) - {"date"}) for answer in answers}) == 1

    async def test_with_a_key_what_is_not_there_is_said_in_json(self, tmp_path):
        async with guarded(tmp_path) as (port, _):
            missing = await ask(port, "/nowhere", RIGHT)
            assert (missing.status, envelope(missing)["code"]) == (404, "not_found")
            wrong = await ask(port, "/who", RIGHT, method="DELETE")
            assert (wrong.status, envelope(wrong)["code"]) == (405, "method_not_allowed")
            assert wrong.headers["allow"] == "GET, HEAD, PATCH"
            assert (await ask(port, "/nowhere", RIGHT, method="HEAD")).body == b""

    async def test_where_no_keys_are_in_use_everybody_is_the_local_user(self, tmp_path):
        async with guarded(tmp_path, keys=None) as (port, _):
            assert (await ask(port, "/who")).json() == {"name": "local"}
            assert (await ask(port, "/who", "Authorization: Bearer anything")).json() == {"name": "local"}
            assert (await ask(port, "/who", host="evil.test")).status == 403
            assert (await ask(port, "/who", "Origin: https://evil.test")).status == 403

    async def test_a_ring_without_keys_lets_nobody_in(self, tmp_path):
        async with guarded(tmp_path, keys=KeyRing(tmp_path, None)) as (port, _):
            assert (await ask(port, "/who", RIGHT)).status == 401


class TestGuessing:
    WRONG = "Authorization: Bearer wrong-wrong-wrong"

    async def test_after_ten_wrong_keys_in_a_minute_a_peer_has_to_wait_but_never_with_the_right_one(self, tmp_path):
        clock = Clock()
        async with guarded(tmp_path, clock=clock) as (port, _):
            statuses = []
            for _ in range(12):
                statuses.append((await ask(port, "/who", self.WRONG)).status)
                clock.now += 1
            assert statuses == [401] * 10 + [429] * 2
            answer = await ask(port, "/who", self.WRONG)
            assert (envelope(answer)["code"], answer.headers["retry-after"]) == ("too_many_bad_keys", "48")
            assert (await ask(port, "/who")).status == 429
            assert (await ask(port, "/who", self.WRONG, "X-Forwarded-For: 8.8.8.8", "X-Real-IP: 8.8.8.8")).status == 429
            assert (await ask(port, "/who", RIGHT)).status == 200
            clock.now += 48
            assert [(await ask(port, "/who", self.WRONG)).status for _ in range(2)] == [401, 429]

    async def test_a_request_without_a_key_is_no_guess(self, tmp_path):
        async with guarded(tmp_path) as (port, _):
            for lines in [(), ("Authorization: Basic abc",), (b"Authorization: Bearer \xe9",)] * 7:
                assert (await ask(port, "/who", *lines)).status == 401

    async def test_a_flood_from_many_addresses_is_forgotten_and_a_network_counts_as_one(self):
        failures = guard._Failures(2, Clock())
        for number in range(20_000):
            failures.count(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", guess=True)
        assert len(failures._times) == 4096
        for address in ["2001:db8::1", "2001:db8::2"]:
            assert failures.count(address, guess=True) == 0
        assert failures.count("2001:db8::ffff%eth0", guess=True) == 60
        assert failures.count("2001:db8:0:1::1", guess=True) == 0
        for address in ["::ffff:192.0.2.1", "192.0.2.1"]:
            assert failures.count(address, guess=True) == 0
        assert failures.count("::ffff:192.0.2.1", guess=True) == 60
        assert failures.count("::ffff:192.0.2.2", guess=True) == 0
        assert failures.count("", guess=True) == 0


GOOD_HOSTS = [
    "localhost",
    "localhost:8642",
    "LOCALHOST:1",
    "127.0.0.1",
    "127.0.0.1:8642",
    "[::1]",
    "[::1]:8642",
    "gate.example",
    "gate.example:443",
    "192.0.2.7:8642",
    "[2001:db8::7]",
]
BAD_HOSTS = [
    None,
    "",
    "evil.test",
    "evil.test:8642",
    "localhost.evil.test",
    "evil-localhost",
    "localhost.",
    "127.0.0.1.evil.test",
    "127.0.0.1.",
    "127.1",
    "2130706433",
    "0x7f000001",
    "0177.0.0.1",
    "0.0.0.0",
    "127.0.0.2",
    "::1",
    "[::1",
    "[::ffff:127.0.0.1]",
    "[::1%25lo]",
    "localhost:8642:80",
    "localhost:port",
    "localhost:",
    "localhost/evil.test",
    "localhost@evil.test",
    "user:pass@localhost",
    "localhost, evil.test",
    "localhost evil.test",
    "localhost#",
    "127.0.0.1\\@evil.test",
    "*",
    b"Host: \xc0\xafevil".removeprefix(b"Host: "),
]


HOSTS = {"allowed_hosts": ["Gate.Example:443", "2001:DB8::7"], "bind_host": "192.0.2.7"}


class TestHosts:
    async def test_only_our_names_are_answered_with_the_right_key_or_without(self, tmp_path):
        async with guarded(tmp_path, **HOSTS) as (port, _):
            for host in GOOD_HOSTS:
                assert (await ask(port, "/who", RIGHT, host=host)).status == 200, host
            for host in BAD_HOSTS:
                raw = host if isinstance(host, bytes) else (host or "").encode()
                line = b"" if host is None else b"Host: " + raw + b"\r\n"
                for path in ["/who", "/health", "/nowhere"]:
                    request = f"GET {path} HTTP/1.1\r\n{RIGHT}\r\nConnection: close\r\n".encode() + line + b"\r\n"
                    answer = await send(port, request)
                    assert answer.status in {400, 403}, host
                    assert answer.status == 400 or answer.code == "host_not_allowed"

    async def test_a_rebound_name_is_refused_for_every_method(self, tmp_path):
        async with guarded(tmp_path) as (port, _):
            for method in ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"]:
                answer = await ask(port, "/who", RIGHT, method=method, host="evil.test")
                assert answer.status == 403, method

    async def test_two_hosts_are_none(self, tmp_path):
        async with guarded(tmp_path) as (port, _):
            for hosts in [("localhost", "evil.test"), ("evil.test", "localhost"), ("localhost", "localhost")]:
                answer = await ask(port, "/who", RIGHT, f"Host: {hosts[1]}", host=hosts[0])
                assert answer.status in {400, 403}

    async def test_the_target_may_not_name_another_host(self, tmp_path):
        async with guarded(tmp_path) as (port, _):
            expected = {
                "http://localhost/who": 200,
                "http://evil.test/who": 403,
                "http://localhost@evil.test/who": 403,
                "http://evil.test:80/who": 403,
                "//evil.test/who": 404,
            }
            found = {target: (await ask(port, target, RIGHT)).status for target in expected}
            assert found == expected
            for raw in [b"CONNECT evil.test:443 HTTP/1.1", b"OPTIONS * HTTP/1.1", b"GET http:// HTTP/1.1"]:
                request = raw + f"\r\nHost: localhost\r\n{RIGHT}\r\nConnection: close\r\n\r\n".encode()
                assert 400 <= (await send(port, request)).status < 500, raw

    async def test_the_address_that_was_connected_to_is_ours(self, tmp_path):
        """A server that listens on every address is found under each of them, and still under no foreign name."""
        async with guarded(tmp_path, listen="127.0.0.9", bind_host="0.0.0.0") as (port, _):
            for host, status in [(f"127.0.0.9:{port}", 200), ("127.0.0.8", 403), ("evil.test", 403)]:
                request = f"GET /who HTTP/1.1\r\nHost: {host}\r\n{RIGHT}\r\nConnection: close\r\n\r\n"
                assert (await send(port, request.encode(), host="127.0.0.9")).status == status


GOOD_PAGES = [
    None,
    PAGE,
    "HTTPS://APP.EXAMPLE",
    "http://localhost:3000",
    "http://localhost:8642",
    "https://localhost:8642",
]
BAD_PAGES = [
    "null",
    "",
    "*",
    "https://evil.test",
    "http://app.example",
    "https://app.example:444",
    "https://app.example.evil.test",
    "https://evil.test/?https://app.example",
    "https://app.example/",
    "https://xapp.example",
    "app.example",
    "//app.example",
    "https://app.example, https://evil.test",
    "https://app.example https://evil.test",
    "file://",
    "chrome-extension://abcdef",
    "http://localhost",
    "http://localhost:8643",
    "http://127.0.0.1:8642",
    "ftp://localhost:8642",
    b"https://\xff.test",
]
PAGES = {"allowed_origins": [PAGE, "http://localhost:3000/"]}


class TestPages:
    async def test_allowed_pages_and_our_own_get_in_and_no_other(self, tmp_path):
        async with guarded(tmp_path, **PAGES) as (port, _):
            for origin in GOOD_PAGES:
                lines = [] if origin is None else [f"Origin: {origin}"]
                answer = await ask(port, "/who", RIGHT, *lines, host="localhost:8642")
                assert answer.status == 200, origin
                allowed = answer.headers.get("access-control-allow-origin")
                assert allowed == (origin if origin in {PAGE, "HTTPS://APP.EXAMPLE", "http://localhost:3000"} else None)
                assert answer.headers["vary"] == "Origin"
            for origin, method in itertools.product(BAD_PAGES, ["GET", "POST", "OPTIONS"]):
                raw = origin if isinstance(origin, bytes) else origin.encode()
                lines = [RIGHT, b"Origin: " + raw, "Access-Control-Request-Method: POST"]
                answer = await ask(port, "/who", *lines, method=method, host="localhost:8642")
                assert (answer.status, answer.code) == (403, "origin_not_allowed"), origin
                assert "access-control-allow-origin" not in answer.headers

    async def test_two_origins_are_none(self, tmp_path):
        async with guarded(tmp_path, **PAGES) as (port, _):
            answer = await ask(port, "/who", RIGHT, f"Origin: {PAGE}", f"Origin: {PAGE}")
            assert answer.status in {400, 403}

    async def test_another_site_without_an_origin_is_refused(self, tmp_path):
        async with guarded(tmp_path, **PAGES) as (port, _):
            for site, status in [("cross-site", 403), ("same-site", 200), ("same-origin", 200), ("none", 200)]:
                assert (await ask(port, "/who", RIGHT, f"Sec-Fetch-Site: {site}")).status == status
            answer = await ask(port, "/who", RIGHT, "Sec-Fetch-Site: cross-site", f"Origin: {PAGE}")
            assert answer.status == 200

    async def test_a_preflight_needs_no_key_and_names_what_a_page_may_do(self, tmp_path):
        async with guarded(tmp_path, **PAGES) as (port, _):
            for path, method in [("/who", "PATCH"), ("/echo", "POST"), ("/nowhere", "DELETE")]:
                answer = await ask(
                    port,
                    path,
                    f"Origin: {PAGE}",
                    f"Access-Control-Request-Method: {method}",
                    "Access-Control-Request-Headers: authorization, content-type, x-hermes-session-id",
                    method="OPTIONS",
                )
                assert (answer.status, answer.body) == (204, b"")
                assert answer.headers["access-control-allow-origin"] == PAGE
                assert answer.headers["access-control-allow-methods"] == "GET, POST, PATCH, DELETE, OPTIONS"
                assert answer.headers["access-control-allow-headers"] == (
                    "Authorization, Content-Type, Idempotency-Key, Last-Event-ID, Prefer, "
                    "X-Hermes-Session-Id, X-Hermes-Session-Key"
                )
                assert answer.headers["access-control-max-age"] == "600"
                assert answer.headers["vary"] == "Origin"
                assert "access-control-allow-credentials" not in answer.headers

    async def test_a_preflight_allows_the_headers_of_openai_s_client_and_no_others(self, tmp_path):
        async with guarded(tmp_path, **PAGES) as (port, _):
            wanted = (
                "authorization,x-stainless-os, x-stainless-retry-count, openai-beta, x-hermes-session, x-evil, cookie"
            )
            answer = await ask(
                port,
                "/echo",
                f"Origin: {PAGE}",
                "Access-Control-Request-Method: POST",
                f"Access-Control-Request-Headers: {wanted}",
                method="OPTIONS",
            )
            allowed = answer.headers["access-control-allow-headers"].lower().split(", ")
            assert allowed[7:] == ["x-stainless-os", "x-stainless-retry-count", "openai-beta", "x-hermes-session"]

    async def test_a_page_can_read_our_headers_on_answers_errors_and_streams(self, tmp_path):
        async with guarded(tmp_path, **PAGES) as (port, _):
            for path, line in [
                ("/who", RIGHT),
                ("/who", "X: y"),
                ("/crash", RIGHT),
                ("/no", RIGHT),
                ("/stream", RIGHT),
            ]:
                answer = await ask(port, path, line, f"Origin: {PAGE}")
                assert answer.headers["access-control-allow-origin"] == PAGE
                exposed = answer.headers["access-control-expose-headers"].split(", ")
                assert {"X-Hermes-Session-Id", "X-Hermes-Session-Key", "Retry-After", "Idempotency-Replayed"} <= set(
                    exposed
                )
                assert ("X-Hermes-Run-Id" in exposed) == (answer.status == 200 and path == "/who")

    async def test_a_star_allows_every_page_and_never_with_credentials(self, tmp_path):
        async with guarded(tmp_path, allowed_origins=["*"]) as (port, _):
            for origin in ["https://evil.test", "null"]:
                answer = await ask(port, "/who", RIGHT, f"Origin: {origin}")
                assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "*")
                assert "access-control-allow-credentials" not in answer.headers
            assert (await ask(port, "/who", f"Origin: {PAGE}")).status == 401

    async def test_options_that_are_no_preflight_are_like_any_method(self, tmp_path):
        async with guarded(tmp_path, **PAGES) as (port, _):
            assert (await ask(port, "/who", method="OPTIONS")).status == 401
            assert (await ask(port, "/who", RIGHT, f"Origin: {PAGE}", method="OPTIONS")).status == 405


class TestAnswers:
    async def test_every_answer_carries_the_security_headers_and_hides_the_server(self, tmp_path):
        async with guarded(tmp_path) as (port, _):
            for path, line in itertools.product(["/who", "/health", "/nowhere", "/crash", "/stream"], [RIGHT, "X: y"]):
                answer = await ask(port, path, line)
                assert {name: answer.headers.get(name) for name in SECURITY} == SECURITY
                assert answer.headers["server"] == "hermes-agent"
                assert "strict-transport-security" not in answer.headers
                assert "vary" not in answer.headers

    async def test_a_bug_is_a_json_500_that_says_nothing_and_a_logged_traceback_without_secrets(
        self, tmp_path, hermes_home
    ):
        async with guarded(tmp_path) as (port, _):
            answer = await ask(port, "/crash", RIGHT)
        assert answer.status == 500
        assert envelope(answer) == {
            "message": "Internal error of the server; see its log.",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
        log = (hermes_home / "logs" / "agent.log").read_text(encoding="utf-8")
        assert '"action":"request.crashed"' in log
        assert '"route":"/crash"' in log
        assert "RuntimeError" in log
        assert KEY not in log

    async def test_an_error_of_the_program_has_its_status_and_its_failure(self, tmp_path):
        async with guarded(tmp_path) as (port, _):
            answer = await ask(port, "/full", RIGHT)
            assert answer.status == 507
            assert envelope(answer)["failure"] == {
                "reason": "store_full",
                "retryable": True,
                "action": "The disk is full; free some space and try again.",
            }

    @pytest.mark.parametrize("when", ["late", "early"])
    async def test_a_stream_that_fails_breaks_off_without_a_second_head(self, tmp_path, when):
        async with guarded(tmp_path) as (port, _):
            answer = await ask(port, f"/stream?{when}", RIGHT)
            assert answer.status == 200
            assert b"HTTP/" not in answer.body
            assert not answer.body.endswith(b"0\r\n\r\n")
            assert b"500" not in answer.body
            assert (await ask(port, "/who", RIGHT)).status == 200

    async def test_a_connection_serves_on_after_refusals(self, tmp_path):
        async with guarded(tmp_path) as (port, _):
            asked = [("/who", "evil.test", RIGHT), ("/who", "localhost", "X: y"), ("/who", "localhost", RIGHT)]
            raw = "".join(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{line}\r\n\r\n" for path, host, line in asked)
            raw += f"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{RIGHT}\r\n\r\n"
            answers = (await whole(port, raw.encode())).split(b"HTTP/1.1 ")[1:]
            assert [int(answer[:3]) for answer in answers] == [403, 401, 200, 404]


async def whole(port, raw):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw)
    await writer.drain()
    data = await reader.read()
    writer.close()
    await writer.wait_closed()
    assert parsed(data)
    return data


class TestWaitingForPermissionToSend:
    async def test_a_body_that_would_be_refused_is_refused_before_it_is_sent(self, tmp_path):
        async with guarded(tmp_path) as (port, _):
            cases = [
                ("Authorization: Bearer wrong", "localhost", "100-continue", 10, 401),
                (RIGHT, "evil.test", "100-continue", 10, 403),
                (RIGHT, "localhost", "100-continue", 10_000_001, 413),
                (RIGHT, "localhost", "a-miracle", 10, 417),
            ]
            for line, host, expect, length, status in cases:
                lines = [f"POST /echo HTTP/1.1\r\nHost: {host}", line, f"Expect: {expect}", f"Content-Length: {length}"]
                answer = await send(port, "\r\n".join([*lines, "", ""]).encode())
                assert (answer.status, answer.headers["connection"]) == (status, "close")
                assert envelope(answer)

    async def test_the_others_are_told_to_send(self, tmp_path):
        async with guarded(tmp_path) as (port, _):
            lines = [RIGHT, "Expect: 100-continue", "Content-Type: application/json"]
            data = await whole(
                port,
                "\r\n".join(
                    ["POST /echo HTTP/1.1", "Host: localhost", "Connection: close", "Content-Length: 7", *lines, "", ""]
                ).encode()
                + b'{"a":1}',
            )
            assert data.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
            assert data.endswith(b'{"fields":{"a":1}}')


LOOPBACK = ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost", "LOCALHOST", "::ffff:127.0.0.1"]
REMOTE = ["0.0.0.0", "::", "", "192.168.1.5", "10.0.0.1", "2001:db8::1", "fe80::1", "gate.example", "127.1", "0"]


@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=4)), ids=str)
async def test_the_gateway_listens_where_others_reach_it_only_with_key_and_permissions(flags):
    key, remote, sandboxed, unsandboxed = flags
    options = {
        "has_key": key,
        "allow_remote": remote,
        "sandboxed": sandboxed,
        "allow_unsandboxed_remote": unsandboxed,
    }
    for host in LOOPBACK:
        refuse_to_bind(host, **options)
    needed = (
        "set API_SERVER_KEY"
        if not key
        else "set `allow_remote: true`"
        if not remote
        else "`allow_unsandboxed_remote: true`"
        if not (sandboxed or unsandboxed)
        else None
    )
    for host in REMOTE:
        if needed is None:
            refuse_to_bind(host, **options)
        else:
            with pytest.raises(SettingsError, match=needed) as caught:
                refuse_to_bind(host, **options)
            assert (host or "every address") in str(caught.value)
