"""The gateway as a process: one per home, in the foreground, until a signal ends it.

The first SIGTERM, SIGINT or SIGHUP lets running turns end and admits nothing new; the
second interrupts them; the third ends the process where it stands. What was acknowledged
is durable at each of these points, and the next start goes on with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from hermes_agent import log as log_module
from hermes_agent.gateway import guard, keys, pid_file
from hermes_agent.gateway.pid_file import GatewayError, PidFile
from hermes_agent.gateway.replies import ApiError
from hermes_agent.settings import ApiServerSettings, Settings

_BIND_ATTEMPTS = 5
_BACKLOG = 1024
_HANDLERS_END = 2.0
"""Seconds that open requests and streams get after the drain."""
_STORES_CLOSE = 5.0
_PR_SET_DUMPABLE = 4
_SPEAKS: dict[str, Any] = {
    "access_log": None,
    "auto_decompress": False,
    "keepalive_timeout": 75,
    "lingering_time": 2,
    "max_field_size": 16384,
    "max_line_size": 8190,
}
"""How HTTP is spoken: what aiohttp's request handler is told."""
_COLLECT_AT = (2000, 10, 10)
"""Three times the usual number of new objects: half the time in the collector, for pauses of some milliseconds."""

_log = log_module.get("gateway")

Say = Callable[[str], None]


class Gateway(Protocol):
    """What is served."""

    async def start(self) -> None:
        """Open the stores and go on with what a dead process left."""
        ...

    async def drain(self, timeout: float) -> bool:  # noqa: ASYNC109 - the turns are told how long they have
        """Admit nothing new and let running turns end; False if some had not after `timeout` seconds."""
        ...

    async def close(self) -> None:
        """Stop what still runs and close the stores."""
        ...


def serve(home: Path, settings: Settings, say: Say | None = None) -> int:
    """Serve until a signal comes; 0 after a clean drain, else 1. `say` gets the lines for the person.

    Raises `GatewayError` where it cannot listen and `HermesError` where the stores cannot be opened.
    """
    chosen = settings.logging
    log_module.configure(home, level=chosen.level, max_size_mb=chosen.max_size_mb, backup_count=chosen.backup_count)
    log_module.add_secrets(secret.reveal() for secret in settings.secrets)
    if not settings.api_server.enabled:
        raise GatewayError("the API server is switched off: API_SERVER_ENABLED or platforms.api_server.enabled")
    _hide_environment()
    for library in ("aiohttp", "asyncio"):
        logging.getLogger(library).addHandler(_ToLog(logging.WARNING))
    with pid_file.held(home) as file:
        return asyncio.run(_Server(home, settings, file, say or _say).run())


class _Server:
    """One run of the gateway."""

    def __init__(self, home: Path, settings: Settings, file: PidFile, say: Say) -> None:
        self._home = home
        self._settings = settings
        self._file = file
        self._say = say
        self._new_key: str | None = None
        """The owner's key, if this start made one and has not shown it yet."""
        self._signals = 0
        self._stop = asyncio.Event()
        self._at_once = asyncio.Event()

    async def run(self) -> int:
        self._listen_to_signals()
        server = self._settings.api_server
        ring = keys.KeyRing(self._home, server.key)
        check_place(server, ring)
        with contextlib.closing(await _bind(server.host, server.port)) as sock:
            self._new_key = ring.ensure_owner()
            try:
                clean = await self._serve(sock)
            finally:
                self._show_key()
        if not clean:
            # Threads of turns that do not end would keep the process; all they did is durable.
            self._leave()
        _log.info("gateway.stopped")
        return 0

    async def _serve(self, sock: socket.socket) -> bool:
        """Serve on the socket until a signal comes; True if everything had ended by itself."""
        from hermes_agent.gateway import app  # noqa: PLC0415 - only when the port is ours

        gateway: Gateway = app.Gateway(self._home, self._settings)
        clean = False
        try:
            await gateway.start()
            runner = web.AppRunner(app.build(gateway), shutdown_timeout=_HANDLERS_END)
            await runner.setup()
            server = await listen(runner, sock)
            try:
                _spare_the_collector()
                self._announce(sock)
                await self._stop.wait()
                clean = await self._drain(gateway)
            finally:
                server.close()
                await runner.cleanup()
        finally:
            clean = await _in_time(gateway.close(), _STORES_CLOSE) and clean
        return clean

    def _show_key(self) -> None:
        """Show the key that this start made, once: nobody can find it out later."""
        key, self._new_key = self._new_key, None
        if key is not None:
            self._say(owner_key(key))

    def _announce(self, sock: socket.socket) -> None:
        record = self._file.write(self._settings.api_server.host, sock.getsockname()[1])
        _log.info("gateway.listening", host=record.host, port=record.port, version=record.version)
        self._say(f"listening on {record.url}\n")
        self._show_key()
        _notify(self._settings.notify_socket, "READY=1")

    async def _drain(self, gateway: Gateway) -> bool:
        """Let running turns end, until they have had their time or a second signal comes."""
        timeout = self._settings.gateway.drain_timeout
        _log.info("gateway.draining", timeout=timeout)
        _notify(self._settings.notify_socket, "STOPPING=1")
        drain = asyncio.ensure_future(gateway.drain(timeout))
        hurry = asyncio.ensure_future(self._at_once.wait())
        await asyncio.wait({drain, hurry}, timeout=timeout + _HANDLERS_END, return_when=asyncio.FIRST_COMPLETED)
        clean = drain.done() and drain.result()
        drain.cancel()
        hurry.cancel()
        _log.info("gateway.drained", clean=clean)
        return clean

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup starts it
                loop.add_signal_handler(number, self._signalled, number.name)

    def _signalled(self, name: str) -> None:
        self._signals += 1
        _log.info("gateway.signal", signal=name, count=self._signals)
        if self._signals == 1:
            self._stop.set()
        elif self._signals == 2:
            self._at_once.set()
        else:
            self._leave()

    def _leave(self) -> None:
        """End the process although something in it runs."""
        _log.warning("gateway.left")
        self._file.remove()
        os._exit(1)


def owner_key(key: str) -> str:
    """What the person is told, once, when the owner's key was made."""
    return f"owner key, shown only now: {key}\nGive it to your programs as their API key; only its digest is kept.\n"


def check_place(server: ApiServerSettings, ring: keys.KeyRing) -> None:
    """Raise an error that says what to do where these settings would let strangers in."""
    guard.refuse_to_bind(
        server.host,
        has_key=server.key is not None or bool(ring.list()),
        allow_remote=server.allow_remote,
        sandboxed=False,
        allow_unsandboxed_remote=server.allow_unsandboxed_remote,
    )


async def listen(runner: web.AppRunner, sock: socket.socket) -> asyncio.Server:
    """Serve the runner's application on a socket; it ends with the runner."""
    loop = asyncio.get_running_loop()
    manager = runner.server
    assert manager is not None
    return await loop.create_server(
        lambda: Speaker(manager, loop=loop, **_SPEAKS),
        sock=sock,
        backlog=_BACKLOG,
    )


class Speaker(web.RequestHandler):
    """aiohttp's speaker of HTTP, whose own errors look like ours: what cannot be read is not repeated, nor logged."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - it shows what the client sent, a key perhaps
    ) -> web.StreamResponse:
        if status >= 500 and exc is not None:
            _log.failure("request.crashed", exc)
        else:
            _log.debug("request.unreadable", status=status, error=type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer is out already")
        self.close()
        text = "Internal error of the server; see its log." if status >= 500 else "The request is not valid HTTP."
        code = "internal_error" if status >= 500 else "invalid_http"
        return ApiError(status, code, text, headers={"Server": "hermes-agent"}, close=True).to_response()


async def _bind(host: str, port: int) -> socket.socket:
    """A socket that listens there; who connects waits until somebody serves it."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise GatewayError(f"cannot listen on {host!r}: {error.strerror}") from error
    # `localhost` is often ::1 as well; what clients are told is 127.0.0.1.
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    for attempt in range(1, _BIND_ATTEMPTS + 1):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            if error.errno != errno.EADDRINUSE:
                raise GatewayError(f"cannot listen on {host} port {port}: {error.strerror}") from error
        else:
            return sock
        if attempt < _BIND_ATTEMPTS:
            _log.info("gateway.port_taken", port=port, attempt=attempt)
            await asyncio.sleep(0.2 * attempt)
    raise GatewayError(
        f"port {port} of {host} is taken by another program; choose one with platforms.api_server.port in config.yaml "
        "or API_SERVER_PORT"
    )


async def _in_time(work: Awaitable[object], seconds: float) -> bool:
    """Wait for the work; False when it took longer."""
    try:
        await asyncio.wait_for(work, seconds)
    except TimeoutError:
        return False
    return True


def _spare_the_collector() -> None:
    """Let it never again go through what is there for good, which stops every thread for tens of milliseconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AT)


def _notify(place: str, state: str) -> None:
    """Tell the service manager, if one asked for it; `@` begins a name outside the file system."""
    if not place:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(state.encode(), "\0" + place[1:] if place.startswith("@") else place)


def _hide_environment() -> None:
    """Keep children of the same user from reading our keys in /proc/PID/environ."""
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        _log.warning("gateway.dumpable")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stdout.write(text)
        sys.stdout.flush()


class _ToLog(logging.Handler):
    """Brings what libraries report into our log."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        fields: dict[str, Any] = {"library": record.name, "text": record.getMessage()}
        if error is not None:
            _log.failure("library.failure", error, **fields)
        else:
            _log.warning("library.warning", **fields)
