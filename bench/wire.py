"""HTTP/1.1 on kept connections, for clients and servers that must cost little; every body has a length."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

_LENGTH = re.compile(rb"(?i)\r\ncontent-length:[ \t]*(\d+)")
_REPLY = b"HTTP/1.1 %d -\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


class Message(NamedTuple):
    """A request or an answer."""

    head: bytes
    body: bytes

    @property
    def status(self) -> int:
        """Of an answer."""
        return int(self.head[9:12])

    @property
    def place(self) -> tuple[str, str]:
        """Method and path of a request."""
        method, path, _ = self.head.split(b" ", 2)
        return method.decode(), path.decode()


class Frames:
    """Cuts what arrives on a connection into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole now."""
        self._buffer += data
        found: list[Message] = []
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end])
            length = _LENGTH.search(head)
            whole = end + 4 + (int(length[1]) if length else 0)
            if len(self._buffer) < whole:
                break
            found.append(Message(head, bytes(self._buffer[end + 4 : whole])))
            del self._buffer[:whole]
        return found


class Connection(asyncio.Protocol):
    """One connection of a client: a request, then its answer."""

    def __init__(self) -> None:
        self._frames = Frames()
        self._answer: asyncio.Future[Message] | None = None

    @classmethod
    async def open(cls, port: int) -> Self:
        """Connect to a server of this machine."""
        _, connection = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return connection

    async def ask(self, data: bytes) -> Message:
        """Send a request and wait for its answer; raises `ConnectionError` when the server goes away."""
        if self.is_closed:
            raise ConnectionResetError
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return await self._answer

    def send(self, data: bytes) -> None:
        """Send a request whose answer nobody will read; `close` follows."""
        self._transport.write(data)

    def close(self) -> None:
        self._transport.close()

    @property
    def is_closed(self) -> bool:
        return self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(message)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc if isinstance(exc, ConnectionError) else ConnectionResetError())


def request(method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> bytes:
    """A whole request; `body` is sent as JSON."""
    data = b"" if body is None else dump(body)
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(data)}", *(f"{name}: {value}" for name, value in (headers or {}).items())]
    return "\r\n".join([*lines, "", ""]).encode() + data


def reply(status: int, body: Any) -> bytes:
    """A whole answer with JSON."""
    data = dump(body)
    return _REPLY % (status, len(data)) + data


def dump(value: Any) -> bytes:
    """As JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
