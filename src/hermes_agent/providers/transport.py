"""Send one HTTP request over a pooled connection that a cancellation can cut at any moment.

One connection pool per endpoint and process and one TLS context per process, both
made at first use; a forked child starts with none. Certificates are always verified.
Importing this module costs as much as httpcore and ssl: import it when a request is due.
"""

from __future__ import annotations

import functools
import ipaddress
import math
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import certifi
import httpcore

from hermes_agent.baton import waiting
from hermes_agent.cancellation import Cancellation
from hermes_agent.errors import TurnInterrupted

CONNECT_TIMEOUT = 15.0
KEEPALIVE_SECONDS = 55.0
"""Shorter than the idle limit of common load balancers (60 s)."""
MAX_IDLE = 64
"""Connections to one place that are kept while nobody uses them."""
_SLICE = 0.1
"""How long a connect waits before it looks whether it was aborted."""
_READ_SLICE = 1.0
"""How long a signal may go unheard while the server says nothing."""
_HEAD_BUFFER = 4096
_JOIN_LIMIT = 65536
"""A larger body is not copied to join it to its head."""


class Endpoint(NamedTuple):
    """Where requests go."""

    scheme: str
    host: str
    port: int
    proxy: str | None


class Line:
    """One request's hold on the socket it uses, so that another thread or a signal handler can cut it."""

    def __init__(self) -> None:
        self.aborted = False
        self.fresh = False
        """This request opened a new connection."""
        self.received = False
        """At least one byte of the answer came."""
        self.read_timeout: float | None = None
        """Replaces the request's read timeout once set."""
        self._socket: socket.socket | None = None
        # Reentrant: the abort may run in a signal handler on top of `hold` or `release`.
        self._lock = threading.RLock()

    def hold(self, sock: socket.socket) -> None:
        """Name the socket in use; raises when the request was aborted before."""
        with self._lock:
            self._socket = sock
        self.check()

    def release(self) -> None:
        """Let go of the socket: an abort that comes later must not touch its next user."""
        with self._lock:
            self._socket = None

    def abort(self) -> None:
        self.aborted = True
        with self._lock:
            if self._socket is not None:
                _shut(self._socket)

    def check(self) -> None:
        if self.aborted:
            raise TurnInterrupted


def _shut(sock: socket.socket) -> None:
    # Not SSLSocket.shutdown: it drops the TLS layer first, and a write in another thread
    # could then leave in clear.
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class _Current(threading.local):
    line: Line | None = None


_current = _Current()


def _line() -> Line:
    return _current.line or Line()


class _Stream:
    """httpcore's network stream over a socket, with the head joined to the body in one write."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._timeout = sock.gettimeout()
        self._head = b""
        self._line = _line()

    def _limit(self, timeout: float | None) -> None:
        if timeout != self._timeout:  # settimeout costs a system call even when nothing changes
            self._sock.settimeout(timeout)
            self._timeout = timeout

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        line = self._line
        try:
            if self._head:
                self._send(b"", timeout)
            data = self._receive(max_bytes, timeout if line.read_timeout is None else line.read_timeout)
        except TimeoutError as exc:
            raise httpcore.ReadTimeout(str(exc)) from exc
        except OSError as exc:
            line.check()
            raise httpcore.ReadError(str(exc)) from exc
        line.check()
        if data:
            line.received = True
        return data

    def _receive(self, max_bytes: int, timeout: float | None) -> bytes:
        """Wait in slices: a signal that comes just before the wait begins is only heard when it ends."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        self._limit(min(_READ_SLICE, math.inf if timeout is None else timeout))
        while True:
            try:
                with waiting:
                    return self._sock.recv(max_bytes)
            except TimeoutError:
                self._line.check()
                if time.monotonic() >= deadline:
                    raise

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if not buffer:
            return
        self._line = _line()
        self._line.hold(self._sock)
        if not self._head and len(buffer) < _HEAD_BUFFER:
            self._head = buffer
            return
        try:
            self._send(buffer, timeout)
        except TimeoutError as exc:
            raise httpcore.WriteTimeout(str(exc)) from exc
        except OSError as exc:
            self._line.check()
            raise httpcore.WriteError(str(exc)) from exc

    def _send(self, buffer: bytes, timeout: float | None) -> None:
        head, self._head = self._head, b""
        self._limit(timeout)
        if head and len(buffer) > _JOIN_LIMIT:
            self._sock.sendall(head)
        elif head:
            buffer = head + buffer
        self._sock.sendall(buffer)

    def close(self) -> None:
        self._sock.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> _Stream:
        self._limit(timeout)
        # The handshake runs after the socket is known, so that it can be cut.
        tls = ssl_context.wrap_socket(self._sock, server_hostname=server_hostname, do_handshake_on_connect=False)
        try:
            self._line.hold(tls)
            with waiting:
                tls.do_handshake()
        except TimeoutError as exc:
            tls.close()
            raise httpcore.ConnectTimeout(str(exc)) from exc
        except OSError as exc:
            tls.close()
            self._line.check()
            raise httpcore.ConnectError(str(exc)) from exc
        except BaseException:
            tls.close()
            raise
        return _Stream(tls)

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":
            return _readable(self._sock)
        if info == "ssl_object" and isinstance(self._sock, ssl.SSLSocket):
            return self._sock
        return self._sock if info == "socket" else None


def _readable(sock: socket.socket) -> bool:
    descriptor = sock.fileno()
    if descriptor < 0:
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


class _Backend:
    """httpcore's network backend: name look-up and connect end soon after an abort."""

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: object = None,
    ) -> _Stream:
        del local_address, socket_options
        line = _line()
        line.fresh = True
        line.check()
        deadline = time.monotonic() + (CONNECT_TIMEOUT if timeout is None else timeout)
        last: OSError | None = None
        with waiting:
            addresses = _resolve(host, port, line, deadline)
        for left, (family, kind, protocol, _, address) in zip(range(len(addresses), 0, -1), addresses, strict=True):
            sock = socket.socket(family, kind, protocol)
            now = time.monotonic()
            try:
                # An address that swallows packets must leave time for the others.
                with waiting:
                    _connect(sock, address, line, now + (deadline - now) / left)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                line.hold(sock)
            except OSError as exc:
                sock.close()
                last = exc
            except BaseException:
                sock.close()
                raise
            else:
                return _Stream(sock)
        if isinstance(last, TimeoutError):
            raise httpcore.ConnectTimeout(f"no connection to {host}:{port} in time") from last
        raise httpcore.ConnectError(str(last) if last else f"no address for {host}") from last

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def _connect(sock: socket.socket, address: Any, line: Line, deadline: float) -> None:
    sock.setblocking(False)
    try:
        sock.connect(address)
    except BlockingIOError:
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        # In slices: to shut down a socket that is still connecting wakes nobody on macOS.
        while not poll.poll(int(_SLICE * 1000)):
            line.check()
            if time.monotonic() > deadline:
                raise TimeoutError from None
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code)) from None
    sock.settimeout(None)


def _resolve(host: str, port: int, line: Line, deadline: float) -> list[Any]:
    """The addresses of `host`; a look-up in the resolver cannot be aborted, so it gets its own thread."""
    if _is_address(host):
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    found: list[Any] = []
    failure: list[OSError] = []

    def look_up() -> None:
        try:
            found.extend(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError as exc:
            failure.append(exc)

    thread = threading.Thread(target=look_up, name="hermes-resolve", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_SLICE)
        line.check()
        if time.monotonic() > deadline:
            raise httpcore.ConnectTimeout(f"the name {host} was not resolved in time")
    if failure:
        raise httpcore.ConnectError(f"cannot resolve {host}: {failure[0].strerror or failure[0]}") from failure[0]
    return found


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@dataclass(slots=True)
class _Shared:
    """What this process shares among its clients."""

    lock: threading.Lock
    free: dict[Endpoint, deque[tuple[float, httpcore.ConnectionPool]]]
    """Connections that nobody uses, the last used last, each with the time since when; each in a pool of its own,
    since httpcore's pool asks all its connections about their state with every request."""
    tls: ssl.SSLContext | None = None


_shared = _Shared(threading.Lock(), {})


def _forget() -> None:
    # A child must not speak on its parent's sockets, and the lock may be held by a thread that is gone.
    global _shared  # noqa: PLW0603 - one table a process
    _shared = _Shared(threading.Lock(), {})
    _current.line = None


os.register_at_fork(after_in_child=_forget)


def _borrow(endpoint: Endpoint) -> httpcore.ConnectionPool:
    """What one request goes through: the connection that was used last, or a new one."""
    shared = _shared
    with shared.lock:
        free = shared.free.get(endpoint)
        if free:
            return free.pop()[1]
        if endpoint.scheme == "https" and shared.tls is None:
            shared.tls = _tls_context()
    return _new_pool(endpoint, shared.tls)


def _give_back(endpoint: Endpoint, way: httpcore.ConnectionPool) -> None:
    """Keep a connection for the next request, and close those that were kept for too long, or are too many."""
    shared, now = _shared, time.monotonic()
    old: list[httpcore.ConnectionPool] = []
    with shared.lock:
        free = shared.free.setdefault(endpoint, deque())
        free.append((now, way))
        while len(free) > MAX_IDLE or free[0][0] < now - KEEPALIVE_SECONDS:
            old.append(free.popleft()[1])
    for each in old:
        each.close()


def _new_pool(endpoint: Endpoint, tls: ssl.SSLContext | None) -> httpcore.ConnectionPool:
    proxy = None
    if endpoint.proxy:
        url = httpcore.URL(endpoint.proxy)
        user, _, rest = endpoint.proxy.partition("://")[2].rpartition("@")[0].partition(":")
        proxy = httpcore.Proxy(url, auth=(_unquote(user), _unquote(rest)) if user else None)
    return httpcore.ConnectionPool(
        ssl_context=tls,
        proxy=proxy,
        max_connections=None,  # a limit would make callers wait where nothing can wake them
        max_keepalive_connections=1,
        keepalive_expiry=KEEPALIVE_SECONDS,
        network_backend=cast("httpcore.NetworkBackend", _Backend()),
    )


def _unquote(text: str) -> bytes:
    first, *rest = text.encode().split(b"%")
    return first + b"".join(bytes.fromhex(part[:2].decode()) + part[2:] for part in rest)


@functools.lru_cache(maxsize=256)
def _url(endpoint: Endpoint, target: str) -> httpcore.URL:
    host = endpoint.host
    return httpcore.URL(
        scheme=endpoint.scheme.encode(),
        host=host.encode() if host.isascii() else host.encode("idna"),
        port=endpoint.port,
        target=target.encode(),
    )


def _tls_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    paths = ssl.get_default_verify_paths()
    if not (paths.cafile or paths.capath):
        context.load_verify_locations(certifi.where())  # a system without a certificate store
    return context


class Answer:
    """An answer whose head has come; iterate for the body, then `close`."""

    def __init__(
        self,
        response: httpcore.Response,
        line: Line,
        aborting: AbstractContextManager[None],
        give_back: Callable[[], None],
    ) -> None:
        self._response = response
        self._give_back = give_back
        self._line = line
        self._aborting: AbstractContextManager[None] | None = aborting
        self.status = response.status
        self.headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}

    def __iter__(self) -> Iterator[bytes]:
        return self._response.iter_stream()

    def hurry(self, seconds: float) -> None:
        """Wait at most `seconds` for each further piece."""
        self._line.read_timeout = seconds

    def close(self) -> None:
        """Give the connection back when the body was read to its end, else close it."""
        aborting, self._aborting = self._aborting, None
        if aborting is None:
            return
        self._line.release()
        aborting.__exit__(None, None, None)
        if self._line.aborted:
            cast("Any", self._response).extensions["network_stream"].close()
        self._response.close()
        self._give_back()

    def check(self) -> None:
        """Raise `TurnInterrupted` if the request was aborted."""
        self._line.check()


def post(
    endpoint: Endpoint,
    target: str,
    headers: list[tuple[bytes, bytes]],
    body: bytes,
    *,
    timeout: float,
    cancellation: Cancellation | None,
) -> Answer:
    """Send a POST and return its answer as soon as the head is there.

    Raises httpcore's errors, or `TurnInterrupted` soon after `cancellation` is set. A kept-alive
    connection that the server had closed before it sent a byte is replaced once.
    """
    try:
        return _attempt(endpoint, target, headers, body, timeout, cancellation)
    except _Stale:
        return _attempt(endpoint, target, headers, body, timeout, cancellation, last=True)


class _Stale(Exception):
    """The kept-alive connection had been closed by the server."""


def _attempt(
    endpoint: Endpoint,
    target: str,
    headers: list[tuple[bytes, bytes]],
    body: bytes,
    timeout: float,
    cancellation: Cancellation | None,
    *,
    last: bool = False,
) -> Answer:
    line = Line()
    aborting = nullcontext() if cancellation is None else cancellation.aborting(line.abort)
    aborting.__enter__()
    _current.line = line
    way = _borrow(endpoint)
    give_back = functools.partial(_give_back, endpoint, way)
    try:
        response = way.handle_request(
            httpcore.Request(
                b"POST",
                _url(endpoint, target),
                headers=headers,
                content=body,
                extensions={
                    "timeout": {
                        "connect": min(timeout, CONNECT_TIMEOUT),
                        "read": timeout,
                        "write": timeout,
                        "pool": None,
                    }
                },
            )
        )
    except (httpcore.RemoteProtocolError, httpcore.ReadError, httpcore.WriteError) as exc:
        line.release()
        aborting.__exit__(None, None, None)
        give_back()
        line.check()
        if last or line.fresh or line.received:
            raise
        raise _Stale from exc
    except BaseException:
        line.release()
        aborting.__exit__(None, None, None)
        give_back()
        raise
    finally:
        _current.line = None
    return Answer(response, line, aborting, give_back)
