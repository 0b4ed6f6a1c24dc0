"""`/api/approvals`: questions of running turns to a person, each decided once."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web
from msgspec import Struct

from hermes_agent.gateway import replies, work
from hermes_agent.gateway.call import Call
from hermes_agent.gateway.keys import Scope
from hermes_agent.gateway.replies import ApiError
from hermes_agent.gateway.table import Route
from hermes_agent.store.approvals import ApprovalRecord, ApprovalState
from hermes_agent.store.intake import TurnView

_CHOICES = {
    "once": "once",
    "approve": "once",
    "approved": "once",
    "allow": "once",
    "session": "session",
    "always": "session",
    "deny": "deny",
    "denied": "deny",
}
"""What a client may say, and what it means; nothing is allowed for longer than its session."""


class NewDecision(Struct, frozen=True):
    """A decision: `once`, `session` or `deny`."""

    choice: str = ""
    request_hash: str | None = None
    """The hash of what was shown; a decision about anything else does not count."""


async def index(call: Call) -> web.StreamResponse:
    """List the open questions of the caller's work, oldest first."""
    found: list[dict[str, Any]] = []
    for record in await call.profile.read(call.profile.service.questions.waiting):
        view = await turn_of(call, record)
        if work.may_see(call, view.sender):
            found.append(_fields(call, record, view))
    return replies.json_reply({"object": "list", "data": found})


async def get(call: Call) -> web.StreamResponse:
    """Show a question, open or not."""
    record = await find(call, call.path("approval_id"))
    return replies.json_reply(_fields(call, record, await turn_of(call, record)))


async def answer(call: Call) -> web.StreamResponse:
    """Decide a question; the first decision counts."""
    body = await call.body(NewDecision)
    choice = choice_of(body.choice)
    record = await find(call, call.path("approval_id"))
    decided = await decide(call, record, choice, body.request_hash)
    if isinstance(decided, web.Response):
        return decided
    return replies.json_reply(_fields(call, decided, await turn_of(call, decided)))


# -- for every route that decides ---------------------------------------------------------


def choice_of(text: str) -> str:
    """A client's choice in our words; raises `ApiError` 400."""
    choice = _CHOICES.get(text.strip().lower())
    if choice is None:
        raise ApiError(400, "invalid_approval_choice", "choice is once, session or deny", param="choice")
    return choice


def not_found(approval_id: str) -> ApiError:
    """There is no such question for this caller."""
    return ApiError(404, "approval_not_found", f"There is no approval {approval_id!r}.")


async def turn_of(call: Call, record: ApprovalRecord) -> TurnView:
    """The turn that asks."""
    return await call.profile.read(call.profile.service.intake.turn_by_key, record.turn_key)


async def find(call: Call, approval_id: str) -> ApprovalRecord:
    """A question of the caller's work; raises `ApiError` 404."""
    record = await call.profile.read(call.profile.service.intake.approval, approval_id)
    if record is None or not work.may_see(call, (await turn_of(call, record)).sender):
        raise not_found(approval_id)
    return record


async def decide(
    call: Call, record: ApprovalRecord, choice: str, shown: str | None = None
) -> ApprovalRecord | web.Response:
    """Decide a question about what was `shown`, its hash; the question as it stands then, or a 409 that says why."""
    if shown is not None and shown != record.request_hash.hex():
        raise ApiError(
            409, "approval_request_mismatch", "The question is not the one that was shown; look at it again.",
            param="request_hash",
        )  # fmt: skip
    questions = call.profile.service.questions
    counts, found = await call.profile.read(questions.decide, record.id, choice, call.principal.name)
    if counts:
        return found
    if _state(found) == ApprovalState.EXPIRED:
        error = ApiError(409, "approval_expired", "Nobody decided in time; the answer was no.")
    elif found.state is ApprovalState.CANCELLED:
        error = ApiError(409, "approval_not_pending", "The work that asked has ended.")
    else:
        said = f"{found.decided_by} decided already: {found.answer or found.state}."
        error = ApiError(409, "approval_not_pending", said)
    return replies.json_reply({**error.body(), "approval": _fields(call, found, await turn_of(call, found))}, 409)


def _state(record: ApprovalRecord) -> ApprovalState:
    late = record.state is ApprovalState.PENDING and record.expires_at <= time.time()
    return ApprovalState.EXPIRED if late else record.state


def _fields(call: Call, record: ApprovalRecord, view: TurnView) -> dict[str, Any]:
    return {
        "object": "hermes.approval",
        "id": record.id,
        **work.question(call, record),
        "session_id": view.session_id,
        "run_id": work.run_id(view.turn.id),
        "delivery_id": view.turn.id,
        "state": str(_state(record)),
        "choice": record.answer,
        "decided_by": record.decided_by,
    }


ROUTES = (
    Route("GET", "/api/approvals", "listApprovals", index, Scope.APPROVE, "List open questions."),
    Route("GET", "/api/approvals/{approval_id}", "getApproval", get, Scope.APPROVE, "Show a question."),
    Route(
        "POST", "/api/approvals/{approval_id}", "decideApproval", answer, Scope.APPROVE, "Decide a question, once.",
        NewDecision,
    ),
)  # fmt: skip
