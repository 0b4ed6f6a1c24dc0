"""Server-sent events: the frames of a stream, and what keeps it alive or ends it.

A reader that does not keep up is waited for, which holds up nobody but itself, and is cut
off when nothing could be written for `STALLED_SECONDS`; it may come back with the id of
the last event that it saw.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from hermes_agent.gateway import replies

STALLED_SECONDS = 30.0

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", "Content-Type": "text/event-stream"}


class StreamGone(ConnectionError):
    """The reader of a stream went away, or did not keep up."""


class EventStream:
    """One stream to one client; make it with `opened`."""

    def __init__(self, response: web.StreamResponse) -> None:
        self.response = response

    @classmethod
    async def opened(cls, request: web.Request, headers: Mapping[str, str] | None = None) -> EventStream:
        """Send the head of a stream."""
        response = web.StreamResponse(headers={**_HEADERS, **(headers or {})})
        stream = cls(response)
        await stream._within(response.prepare(request))
        return stream

    async def send(self, data: Any, *, event: str | None = None, number: int | str | None = None) -> None:
        """Send one event; `data` is JSON, or bytes that stand as they are."""
        body = data if isinstance(data, bytes) else replies.to_json(data)
        head = b"" if number is None else b"id: %s\n" % str(number).encode()
        if event is not None:
            head += b"event: %s\n" % event.encode()
        await self._write(b"%sdata: %s\n\n" % (head, body))

    async def comment(self, text: str) -> None:
        """Send a sign of life, which clients ignore."""
        await self._write(b": %s\n\n" % text.encode())

    async def end(self) -> web.StreamResponse:
        """End the stream in good order."""
        await self._within(self.response.write_eof())
        return self.response

    async def _write(self, frame: bytes) -> None:
        await self._within(self.response.write(frame))

    async def _within(self, work: Any) -> None:
        try:
            async with asyncio.timeout(STALLED_SECONDS):
                await work
        except (TimeoutError, ConnectionError) as error:
            raise StreamGone(str(error) or "the reader did not keep up") from error


def last_seen(request: web.Request) -> int | None:
    """The number of the last event that a returning client saw: `Last-Event-ID`, or `after` in the query."""
    for text in (request.headers.get("Last-Event-ID"), request.query.get("after"), request.query.get("last_seq")):
        if text is not None and text.strip().isdecimal() and len(text.strip()) <= 10:
            return int(text)
    return None
