"""`/api/deliveries`: what became of a message, for whoever sent it and did not wait."""

from __future__ import annotations

import re
from typing import Any

from aiohttp import web

from hermes_agent.delivery.service import Receipt
from hermes_agent.gateway import replies, work
from hermes_agent.gateway.call import Call
from hermes_agent.gateway.keys import Scope
from hermes_agent.gateway.replies import ApiError
from hermes_agent.gateway.table import Parameter, Route
from hermes_agent.store.turns import TurnState

_LONGEST_WAIT = 300.0


async def index(call: Call) -> web.StreamResponse:
    """List the caller's messages that are not answered yet, oldest first."""
    limit = call.number("limit", 100, least=1, most=1000)
    sender = None if call.principal.may(Scope.ADMIN) else call.principal.name
    found = await call.profile.read(call.profile.service.pending, sender, limit)
    return replies.json_reply({"object": "list", "data": [_fields(receipt) for receipt in found]})


async def get(call: Call) -> web.StreamResponse:
    """Tell what became of a message; with `wait`, as soon as it is answered or so many seconds are over."""
    receipt = await _find(call)
    wait = _wait(call)
    if wait and not receipt.is_final:
        receipt = await call.profile.ended(receipt.turn_id, wait)
    headers = {} if receipt.is_final else {"Retry-After": "1"}
    return replies.json_reply(_fields(receipt), 200, headers)


async def cancel(call: Call) -> web.StreamResponse:
    """Withdraw a message that waits, or ask its turn to stop; one that has been answered is told as it is."""
    receipt = await _find(call)
    after = await call.profile.read(call.profile.service.cancel, receipt.turn_id)
    return replies.json_reply(_fields(after or receipt))


async def _find(call: Call) -> Receipt:
    """The delivery that the path names, by our id or by the caller's own; raises `ApiError` 404."""
    name = call.path("delivery_id")
    receipt = await work.find(call, work.turn_id(name))
    if receipt is None:
        receipt = await call.profile.read(call.profile.service.find_message, call.principal.name, name)
    if receipt is None:
        raise ApiError(404, "delivery_not_found", f"There is no delivery {name!r}.", param="delivery_id")
    return receipt


def _wait(call: Call) -> float:
    """How long to wait: the query's `wait`, else what the client prefers."""
    text = call.request.query.get("wait", "")
    if not text:
        return min(call.prefer.wait or 0.0, _LONGEST_WAIT)
    if not re.fullmatch(r"\d{1,6}(\.\d{1,3})?", text):
        raise ApiError(400, "invalid_wait", "wait is a number of seconds", param="wait")
    return min(float(text), _LONGEST_WAIT)


def _fields(receipt: Receipt) -> dict[str, Any]:
    message_id = receipt.message_id
    found: dict[str, Any] = {
        "object": "hermes.delivery",
        "delivery_id": receipt.turn_id,
        "message_id": None if message_id.startswith("turn:") else message_id,
        "run_id": work.run_id(receipt.turn_id),
        "session_id": receipt.session_id,
        "status": work.status_of(receipt),
        "state": str(receipt.state),
        "final": receipt.is_final,
        "completed": receipt.state is TurnState.DONE,
        "attempts": receipt.attempts,
        "created_at": receipt.accepted_at,
        **work.outcome(receipt),
    }
    if receipt.is_final:
        found["reply"] = receipt.reply
        found.pop("output", None)
    return found


ROUTES = (
    Route(
        "GET", "/api/deliveries", "listDeliveries", index, Scope.DM, "List messages that are not answered yet.",
        parameters=(Parameter("limit", "At most so many, 100 by default.", kind="integer"),),
    ),
    Route(
        "GET", "/api/deliveries/{delivery_id}", "getDelivery", get, Scope.DM, "Tell what became of a message.",
        parameters=(Parameter("wait", "Seconds to wait for the answer, at most 300.", kind="number"),),
    ),
    Route(
        "POST", "/api/deliveries/{delivery_id}/cancel", "cancelDelivery", cancel, Scope.DM,
        "Withdraw a message, or stop its turn.",
    ),
)  # fmt: skip
