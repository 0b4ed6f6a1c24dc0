"""One request on its way: who asks, of which profile, and what they may wish about the answer."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web

from hermes_agent.gateway import bodies
from hermes_agent.gateway.keys import Principal
from hermes_agent.gateway.profile import Profile
from hermes_agent.gateway.replies import ApiError

Kind = TypeVar("Kind")

_KEY = re.compile(r"[\x21-\x7e]{1,255}")


@dataclass(frozen=True, slots=True)
class Prefer:
    """The wishes of a `Prefer` header (RFC 7240) that mean something here."""

    strict: bool = False
    """`status=strict`: a failed turn has a failure's status."""
    wait: float | None = None
    """`wait=SECONDS`: how long to wait for an answer."""
    respond_async: bool = False
    """`respond-async`: do not wait."""


@dataclass(slots=True)
class Call:
    """A request that was let in."""

    request: web.Request
    profile: Profile
    principal: Principal
    _fields: dict[str, Any] | None = field(default=None, init=False)

    async def fields(self) -> dict[str, Any]:
        """The JSON object of the body, `{}` when there is none."""
        if self._fields is None:
            self._fields = await bodies.read_json(self.request)
        return self._fields

    async def body(self, kind: type[Kind]) -> Kind:
        """The body as a `kind`; raises `ApiError` 400 naming what does not fit."""
        return bodies.decode(await self.fields(), kind)

    def path(self, name: str) -> str:
        """A part of the path."""
        return self.request.match_info[name]

    def number(self, name: str, default: int, *, least: int = 0, most: int = 1 << 31) -> int:
        """A whole number of the query."""
        text = self.request.query.get(name)
        if text is None or text == "":
            return default
        if not re.fullmatch(r"\d{1,10}", text) or not least <= int(text) <= most:
            raise ApiError(400, "invalid_pagination", f"{name} is a whole number from {least} to {most}", param=name)
        return int(text)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A yes or no of the query."""
        text = self.request.query.get(name, "").lower()
        if text in ("", "1", "true", "yes", "0", "false", "no"):
            return default if text == "" else text in ("1", "true", "yes")
        raise ApiError(400, f"invalid_{name}", f"{name} is true or false", param=name)

    @property
    def idempotency_key(self) -> str:
        """The `Idempotency-Key` header, "" without one."""
        key = self.request.headers.get("Idempotency-Key", "")
        if key and not _KEY.fullmatch(key):
            raise ApiError(
                400, "invalid_idempotency_key", "Idempotency-Key is 1 to 255 visible ASCII characters",
                param="Idempotency-Key",
            )  # fmt: skip
        return key

    @property
    def prefer(self) -> Prefer:
        """What the client prefers; what is not understood is ignored, as the header's standard wants."""
        strict, wait, later = False, None, False
        for wish in ",".join(self.request.headers.getall("Prefer", ())).split(","):
            name, _, value = wish.partition(";")[0].partition("=")
            name, value = name.strip().lower(), value.strip().strip('"')
            if name == "status" and value.lower() == "strict":
                strict = True
            elif name == "wait" and re.fullmatch(r"\d{1,5}", value):
                wait = float(value)
            elif name == "respond-async":
                later = True
        return Prefer(strict, wait, later)
