"""Listening to an event stream of the gateway, frame by frame."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from tests.integration.gateway.conftest import KEY, PATIENT, Site


@dataclass
class Heard:
    """One frame; a comment has no data."""

    id: str = ""
    event: str = ""
    data: Any = None
    comment: str = ""

    @property
    def name(self) -> str:
        """Its event, wherever it is named."""
        return self.event or (self.data or {}).get("event", "")


@dataclass
class Ear:
    """A stream that is open; an async context manager."""

    site: Site
    method: str
    path: str
    body: Any = None
    key: str = KEY
    headers: dict[str, str] = field(default_factory=dict[str, str])
    heard: list[Heard] = field(default_factory=list[Heard])

    async def __aenter__(self) -> Self:
        self._opening = self.site.request(self.method, self.path, self.body, key=self.key, headers=self.headers)
        self.answer = await self._opening.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.answer.close()

    async def next(self) -> Heard | None:
        """The next frame, None at the end."""
        found = Heard()
        async with asyncio.timeout(PATIENT):
            while line := (await self.answer.content.readline()).decode():
                line = line.rstrip("\n")
                if not line:
                    self.heard.append(found)
                    return found
                name, _, value = line.partition(": ")
                if name == "":
                    found.comment = value
                elif name == "data":
                    found.data = json.loads(value)
                else:
                    setattr(found, name, value)
        return None

    async def until(self, what: str | Callable[[Heard], bool]) -> Heard:
        """Listen up to the next frame of that name, or for which it holds."""
        while (found := await self.next()) is not None:
            if found.name == what or (callable(what) and what(found)):
                return found
        raise AssertionError(f"it never came; heard {names(self.heard)}")

    async def rest(self) -> list[Heard]:
        """All frames up to the end of the stream; those of the beginning too."""
        while await self.next() is not None:
            pass
        return self.heard


async def listen(site: Site, method: str, path: str, body: Any = None, **more: Any) -> list[Heard]:
    """All frames of a stream."""
    async with Ear(site, method, path, body, **more) as ear:
        assert ear.answer.status == 200, await ear.answer.text()
        return await ear.rest()


def names(heard: Iterable[Heard]) -> list[str]:
    """The names of the frames, words of one message as one, without comments."""
    found: list[str] = []
    for frame in heard:
        if frame.name and not (frame.name.endswith(".delta") and found[-1:] == [frame.name]):
            found.append(frame.name)
    return found


def said(heard: Iterable[Heard]) -> str:
    """What a client that adds up the words has in the end: what is void, it forgets."""
    text = ""
    for frame in heard:
        if frame.name.endswith((".delta",)) and "delta" in frame.data and not frame.name.startswith("reasoning"):
            text += frame.data["delta"]
        elif frame.name.endswith(".void") or frame.name.startswith("tool."):
            text = ""
    return text
