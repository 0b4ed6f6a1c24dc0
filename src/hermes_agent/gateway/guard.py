"""The edge of the API: what a request must satisfy before a handler sees it, and how every answer leaves.

In this order: the `Host` is one of ours (a page cannot reach us under a name of its
own), the `Origin` is ours, allowed or absent, a preflight is answered, the key is known
and has the route's scope. An unknown path looks like any other without a key. Whatever
goes wrong, here or in a handler, leaves as the JSON error envelope; every answer carries
the security headers and, for an allowed page, those of CORS.
"""

from __future__ import annotations

import ipaddress
import math
import re
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable
from typing import cast

from aiohttp import web
from aiohttp.typedefs import Handler

from hermes_agent import log
from hermes_agent.errors import HermesError, SettingsError
from hermes_agent.gateway import bodies, replies
from hermes_agent.gateway.keys import OPEN, KeyRing, Principal, Scope, bearer_key
from hermes_agent.gateway.replies import ApiError

LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
FAILURES_A_MINUTE = 10
_ADDRESSES = 4096
"""Peers whose bad keys are counted; the ones that were quiet longest are forgotten."""
_MINUTE = 60.0

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?", re.IGNORECASE)
_METHODS = "GET, POST, PATCH, DELETE, OPTIONS"
_REQUEST_HEADERS = (
    "Authorization, Content-Type, Idempotency-Key, Last-Event-ID, Prefer, X-Hermes-Session-Id, X-Hermes-Session-Key"
)
_CLIENT_HEADER = re.compile(r"(?:x-stainless|x-hermes|openai)-[a-z0-9-]{1,60}")
"""What the OpenAI client for browsers adds to each request, and what our own may add."""
_EXPOSED = (
    "Retry-After, Idempotency-Replayed, X-Hermes-Session-Id, X-Hermes-Session-Key, "
    "X-Hermes-Completed, X-Hermes-Partial, X-Hermes-Error"
)
_KNOWN_HEADERS = frozenset(f"{_REQUEST_HEADERS}, {_EXPOSED}".lower().split(", "))
_SECURITY_HEADERS = (
    ("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
)
PRINCIPAL = web.RequestKey("principal", Principal)
"""Under this key a request holds who asks; nothing on an open route."""
_ORIGIN = web.RequestKey("allowed_origin", str)
_STARTED = web.RequestKey("started", web.StreamResponse)

_log = log.get("gateway")

Recognise = Callable[[web.Request, Principal | None, str], Awaitable[Principal | None]]


class Guard:
    """The middleware of one application; `install` puts it in front of everything else.

    `keys` None means that no keys are in use and everybody is `OPEN`. `recognise` has the
    last word on who asks: it gets the request, whom `keys` say, None for nobody, and the
    header with what may be a key. `scope_of` says what a route of the application demands,
    None for an open one; it is asked for known routes only. `principal(request)` is who
    asks; on an open route nobody is known, for a key is not looked at there, so that it is
    no place to try keys.
    """

    def __init__(
        self,
        keys: KeyRing | None,
        *,
        scope_of: Callable[[web.Request], Scope | None],
        recognise: Recognise | None = None,
        bind_host: str = "127.0.0.1",
        allowed_hosts: Iterable[str] = (),
        allowed_origins: Iterable[str] = (),
        failures_a_minute: int = FAILURES_A_MINUTE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = keys
        self._scope_of = scope_of
        self._recognise = recognise
        self._hosts = LOCAL_HOSTS | {_host_name(name) for name in (bind_host, *allowed_hosts) if name}
        self._origins = frozenset(origin.strip().rstrip("/").lower() for origin in allowed_origins)
        self._failures = _Failures(failures_a_minute, clock)

    def install(self, app: web.Application) -> None:
        app.middlewares.insert(0, self.middleware)
        app.on_response_prepare.append(self.prepare)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            refused = await self._admit(request)
            return await handler(request) if refused is None else refused
        except ApiError as error:
            answer = error
        except web.HTTPException as error:
            if error.status < 400:
                raise
            answer = _from_http(error)
        except HermesError as error:
            answer = replies.from_error(error)
            if answer.status >= 500:
                _log.failure("request.failed", error, **_which(request))
        except Exception as error:  # the boundary of a request
            if isinstance(error, ConnectionError) and _is_gone(request):
                raise
            _log.failure("request.crashed", error, **_which(request))
            answer = ApiError(500, "internal_error", "Internal error of the server; see its log.")
        started = request.get(_STARTED)
        if started is None:
            return answer.to_response()
        # A part of an answer is out: the client must see it break off, not a second head within it.
        if request.transport is not None:
            request.transport.close()
        return started

    async def prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Complete the headers of any answer, just before they leave."""
        request[_STARTED] = response
        headers = response.headers
        for name, value in _SECURITY_HEADERS:
            if name not in headers:
                headers[name] = value
        headers["Server"] = "hermes-agent"
        if not self._origins:
            return
        if "*" not in self._origins:
            _vary(response)
        origin = request.get(_ORIGIN)
        if origin is not None:
            headers["Access-Control-Allow-Origin"] = origin
            ours = [name for name in headers if name.lower().startswith("x-hermes-")]
            more = [name for name in ours if name.lower() not in _KNOWN_HEADERS]
            headers["Access-Control-Expose-Headers"] = ", ".join([_EXPOSED, *more])

    async def expect(self, request: web.Request) -> web.StreamResponse | None:
        """The routes' `expect_handler`: refuse before the client sends a body that would be refused after it."""
        try:
            refused = await self._admit(request)
            if refused is not None:
                return refused
            if request.headers.get("Expect", "").lower() != "100-continue":
                raise ApiError(417, "unknown_expectation", "Expect may only be 100-continue.")
            if (request.content_length or 0) > bodies.LIMIT:
                raise bodies.too_large(bodies.LIMIT)
        except ApiError as error:
            error.close = True
            return error.to_response()
        if request.version >= (1, 1):
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        return None

    async def _admit(self, request: web.Request) -> web.StreamResponse | None:
        """Let a request in (None), answer a preflight, or raise `ApiError`."""
        host = self._check_host(request)
        self._check_origin(request, host)
        headers = request.headers
        if request.method == "OPTIONS" and "Origin" in headers and "Access-Control-Request-Method" in headers:
            return _preflight(headers.get("Access-Control-Request-Headers", ""))
        known = request.match_info.http_exception is None
        scope = self._scope_of(request) if known else None
        if known and scope is None:
            return None
        who = request[PRINCIPAL] = await self._authenticate(request)
        if scope is not None and not who.may(scope):
            raise ApiError(403, "insufficient_scope", f"This key lacks the scope {scope.value!r}.")
        return None

    def _check_host(self, request: web.Request) -> str:
        """The request's `Host`, in lower case. Raises `ApiError` 403 for one that is not ours."""
        named = request.headers.getall("Host", ())
        host = named[0].lower() if len(named) == 1 else ""
        found = _HOST.fullmatch(host)
        if found is None or not (found.group(1) in self._hosts or found.group(1) == _local_address(request)):
            raise ApiError(403, "host_not_allowed", "This server does not answer under that host name.")
        target = request.raw_path
        # "GET http://other/ HTTP/1.1" names the host a second time.
        if not target.startswith(("/", "*")) and request.url.host != _plain_host(found.group(1)):
            raise ApiError(403, "host_not_allowed", "The request's target names another host.")
        return host

    def _check_origin(self, request: web.Request, host: str) -> None:
        """Raise `ApiError` 403 for a page that is neither ours nor allowed."""
        headers = request.headers
        named = headers.getall("Origin", ())
        if not named:
            if headers.get("Sec-Fetch-Site", "").lower() == "cross-site":
                raise _origin_refused()
            return
        origin = named[0].lower()
        if len(named) > 1:
            raise _origin_refused()
        if "*" in self._origins:
            request[_ORIGIN] = "*"
        elif origin in self._origins:
            request[_ORIGIN] = named[0]
        elif origin not in {f"http://{host}", f"https://{host}"}:
            raise _origin_refused()

    async def _authenticate(self, request: web.Request) -> Principal:
        if self._keys is None:
            return OPEN
        given = request.headers.getall("Authorization", ())
        header = given[0] if len(given) == 1 else None
        who = self._keys.authenticate(header)
        # A header that cannot be a key is no guess.
        guess = header if who is not None or bearer_key(header) is not None else None
        if self._recognise is not None and guess is not None:
            who = await self._recognise(request, who, guess)
        if who is not None:
            return who
        wait = self._failures.count(request.remote or "", guess=guess is not None)
        if wait > 0:
            raise ApiError(
                429,
                "too_many_bad_keys",
                "Too many requests with a wrong API key; wait before the next one.",
                headers={"Retry-After": str(math.ceil(wait))},
            )
        raise ApiError(
            401,
            "gateway_auth_failed",
            "Invalid gateway API key (API_SERVER_KEY)",
            error_type="gateway_auth_error",
            headers={"WWW-Authenticate": "Bearer"},
        )


class _Failures:
    """Wrong keys by peer, over the last minute."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._times: OrderedDict[str, deque[float]] = OrderedDict()

    def count(self, address: str, *, guess: bool) -> float:
        """The seconds that this peer has to wait; counts a guess if it need not."""
        now = self._clock()
        peer = _network(address)
        times = self._times.get(peer)
        if times is not None and len(times) == self._limit and now - times[0] < _MINUTE:
            return times[0] + _MINUTE - now
        if guess:
            if times is None:
                times = self._times[peer] = deque(maxlen=self._limit)
                if len(self._times) > _ADDRESSES:
                    self._times.popitem(last=False)
            times.append(now)
            self._times.move_to_end(peer)
        return 0.0


def principal(request: web.Request) -> Principal:
    """Who asks, in a handler of a route that demands a scope."""
    return request[PRINCIPAL]


def refuse_to_bind(
    host: str, *, has_key: bool, allow_remote: bool, sandboxed: bool, allow_unsandboxed_remote: bool
) -> None:
    """Raise `SettingsError` if the gateway must not listen on `host`.

    Whoever reaches it can run commands. This machine's own addresses are fine; any other
    needs a key, a permission, and a second one as long as commands run without a sandbox.
    """
    if is_loopback(host):
        return
    where = f"The gateway would listen on {host or 'every address'}, where other machines reach it"
    if not has_key:
        raise SettingsError(f"{where}, without a key: set API_SERVER_KEY, or listen on 127.0.0.1")
    if not allow_remote:
        raise SettingsError(f"{where}: set `allow_remote: true` if that is meant, or listen on 127.0.0.1")
    if not sandboxed and not allow_unsandboxed_remote:
        raise SettingsError(
            f"{where}, and commands run without a sandbox: whoever holds a key has this account. "
            "Set `allow_unsandboxed_remote: true` if that is meant, or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """True for an address or name that only this machine reaches; a name that has to be looked up is not one."""
    name = host.strip().strip("[]").lower()
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _preflight(wanted: str) -> web.Response:
    """The answer for an allowed page; `prepare` adds for whom it is."""
    names = (name.strip() for name in wanted.lower().split(",")[:64])
    more = [name for name in names if _CLIENT_HEADER.fullmatch(name) and name not in _KNOWN_HEADERS]
    headers = {
        "Access-Control-Allow-Methods": _METHODS,
        "Access-Control-Allow-Headers": ", ".join([_REQUEST_HEADERS, *more]),
        "Access-Control-Max-Age": "600",
    }
    return web.Response(status=204, headers=headers)


def _from_http(error: web.HTTPException) -> ApiError:
    """The library's own refusals, in our envelope."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{error.method} is not possible here; use {allowed}."
        return ApiError(405, "method_not_allowed", message, headers={"Allow": allowed})
    if isinstance(error, web.HTTPNotFound):
        return ApiError(404, "not_found", "There is nothing at this path.")
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return ApiError(413, "body_too_large", "The request body is too large.", close=True)
    return ApiError(error.status, "http_error", error.reason)


def _origin_refused() -> ApiError:
    return ApiError(403, "origin_not_allowed", "Pages of this origin may not use the server.")


def _vary(response: web.StreamResponse) -> None:
    headers = response.headers
    there = headers.get("Vary", "")
    if "origin" not in there.lower():
        headers["Vary"] = f"{there}, Origin" if there else "Origin"


def _host_name(configured: str) -> str:
    """A name or address of the settings as a `Host` header has it: lower case, no port, brackets around IPv6."""
    name = configured.strip().lower()
    try:
        address = ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return re.sub(r":[0-9]+$", "", name)
    return f"[{address}]" if address.version == 6 else str(address)


def _plain_host(name: str) -> str:
    return name.strip("[]")


def _local_address(request: web.Request) -> str:
    """The address of ours that the client connected to: no page can give it another meaning."""
    transport = request.transport
    name = transport.get_extra_info("sockname") if transport is not None else None
    return _host_name(str(cast("tuple[object, ...]", name)[0])) if isinstance(name, tuple) else ""


def _network(address: str) -> str:
    """What counts as one peer: an IPv4 address, or the /64 that one IPv6 customer has."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    mapped = parsed.ipv4_mapped
    return str(mapped) if mapped else str(int(parsed) >> 64)


def _is_gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _which(request: web.Request) -> dict[str, str]:
    """The request for a log line: the route's pattern, for a path may hold anything."""
    resource = request.match_info.route.resource
    return {"method": request.method, "route": resource.canonical if resource is not None else ""}
