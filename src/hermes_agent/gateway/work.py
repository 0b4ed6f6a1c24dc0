"""Pieces of work as their callers see them: by public id, each only by whoever began it, in one set of words."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from hermes_agent.delivery.service import Receipt
from hermes_agent.errors import FailureReason, HermesError
from hermes_agent.gateway import replies, story, turns
from hermes_agent.gateway.call import Call
from hermes_agent.gateway.keys import Scope
from hermes_agent.gateway.replies import ApiError
from hermes_agent.gateway.story import Frame
from hermes_agent.store.approvals import ApprovalRecord
from hermes_agent.store.turns import TurnState

Fields = dict[str, Any]

_PUBLIC_ID = re.compile(r"(?:run_|turn_|resp_|chatcmpl-)([0-9a-f]{24,32})")

STATUS = {
    TurnState.ACCEPTED: "queued",
    TurnState.RUNNING: "running",
    TurnState.WAITING_RETRY: "running",
    TurnState.WAITING_APPROVAL: "waiting_for_approval",
    TurnState.DONE: "completed",
    TurnState.FAILED: "failed",
    TurnState.EXPIRED: "failed",
    TurnState.CANCELLED: "cancelled",
}
_LAST_EVENT = {
    "queued": "run.queued",
    "running": "run.started",
    "stopping": "run.started",
    "waiting_for_approval": "approval.request",
}


def run_id(turn_id: str) -> str:
    """A turn under the name that it has as a run."""
    return "run_" + turn_id.removeprefix("turn_")


def turn_id(public_id: str) -> str:
    """The turn that a public id stands for, "" when it is none."""
    found = _PUBLIC_ID.fullmatch(public_id)
    return "" if found is None else "turn_" + found.group(1)


def may_see(call: Call, sender: str) -> bool:
    """Whether the caller began that sender's work, or oversees everybody's."""
    return sender == call.principal.name or call.principal.may(Scope.ADMIN)


async def find_run(call: Call, name: str = "run_id") -> Receipt:
    """The run that the path names; raises `ApiError` 404 when it is none of the caller's."""
    receipt = await find(call, turn_id(call.path(name)))
    if receipt is None:
        raise ApiError(404, "run_not_found", f"There is no run {call.path(name)!r}.", param=name)
    return receipt


async def find(call: Call, turn: str) -> Receipt | None:
    """What is known of a turn, if the caller may see it."""
    receipt = await call.profile.read(call.profile.service.get, turn) if turn else None
    return receipt if receipt is not None and may_see(call, receipt.sender) else None


def status_of(receipt: Receipt) -> str:
    """Where a piece of work stands, in one word."""
    return "stopping" if receipt.is_stopping else STATUS[receipt.state]


def outcome(receipt: Receipt) -> Fields:
    """What became of a piece of work that has ended."""
    if not receipt.is_final:
        return {}
    found: Fields = {"finished_at": receipt.ended_at, "usage": usage(receipt)}
    if receipt.state is TurnState.DONE:
        return {**found, "output": receipt.reply}
    reason = receipt.reason or FailureReason.UNKNOWN
    return {**found, "error": receipt.error or receipt.reply, "failure": replies.failure_fields(reason)}


def usage(receipt: Receipt) -> Fields:
    """The tokens of all its attempts."""
    used = receipt.usage
    return {
        **turns.usage_of(receipt),
        "cache_read_tokens": used.get("cache_read_tokens", 0),
        "cache_write_tokens": used.get("cache_write_tokens", 0),
    }


def runtime(call: Call, receipt: Receipt) -> Fields:
    """What ran it."""
    return {"model": receipt.model or call.profile.settings.model.default}


async def open_questions(call: Call, receipt: Receipt) -> list[ApprovalRecord]:
    """The questions on which a piece of work waits."""
    if receipt.is_final:
        return []
    return await call.profile.read(call.profile.service.questions.waiting, receipt.turn_id)


def question(call: Call, record: ApprovalRecord) -> Fields:
    """A question as a client shows it."""
    return story.question_fields(record, [secret.reveal() for secret in call.profile.settings.secrets])


async def run_fields(call: Call, receipt: Receipt) -> Fields:
    """The status object of a run."""
    status = status_of(receipt)
    found: Fields = {
        "object": "hermes.run",
        "run_id": run_id(receipt.turn_id),
        "delivery_id": receipt.turn_id,
        "session_id": receipt.session_id,
        "status": status,
        "attempts": receipt.attempts,
        "created_at": receipt.accepted_at,
        "updated_at": receipt.ended_at or receipt.accepted_at,
        "last_event": _LAST_EVENT.get(status, f"run.{status}"),
        "completed": receipt.state is TurnState.DONE,
        "partial": False,
        "interrupted": receipt.state is TurnState.CANCELLED,
        "runtime": runtime(call, receipt),
        **runtime(call, receipt),
        **outcome(receipt),
    }
    for record in (await open_questions(call, receipt))[:1]:
        found["approval"] = question(call, record)
    return found


async def told(call: Call, receipt: Receipt, after: int | None = None) -> AsyncGenerator[Frame | None]:
    """`story.tell`, after a word that the work waits for its turn; what goes wrong is a last frame, `error`."""
    if receipt.state is TurnState.ACCEPTED and after is None:
        yield Frame("queued", {"status": "queued", "delivery_id": receipt.turn_id}, at=receipt.accepted_at)
    try:
        async with aclosing(story.tell(call.profile, receipt.turn_id, after)) as frames:
            async for frame in frames:
                yield frame
    except HermesError as error:
        yield Frame("error", replies.from_error(error).body()["error"])
