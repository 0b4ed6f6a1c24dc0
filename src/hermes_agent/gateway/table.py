"""The table of routes: one line each, from which come the handlers, the OpenAPI document and who may call what."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web

from hermes_agent.gateway.call import Call
from hermes_agent.gateway.keys import Scope

Handler = Callable[[Call], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the query or of a header."""

    name: str
    about: str
    kind: str = "string"
    """Its JSON Schema type."""
    where: str = "query"


@dataclass(frozen=True, slots=True)
class Route:
    """One operation of the API."""

    method: str
    path: str
    name: str
    """Its `operationId`."""
    handler: Handler
    scope: Scope | None
    """What a key must be allowed; None is open to everybody."""
    about: str
    body: type | None = None
    """The structure of the JSON body."""
    status: int = 200
    """The status of its ordinary answer."""
    parameters: tuple[Parameter, ...] = field(default=())
    streams: bool = False
    """It can answer with an event stream."""
    media: str = "application/json"
    """What it answers with otherwise."""


def starts_work(*more: Parameter) -> tuple[Parameter, ...]:
    """The parameters of every route that starts a turn."""
    return (
        Parameter("Idempotency-Key", "Names this message for ever; sent again it starts nothing new.", where="header"),
        Parameter("Prefer", "`status=strict`, `wait=SECONDS`, `respond-async`.", where="header"),
        *more,
    )
