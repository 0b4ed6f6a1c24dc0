"""What is known of a message: derived from its turn, the same after a restart."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from hermes_agent.delivery import policy
from hermes_agent.errors import FAILURES, FailureReason
from hermes_agent.store.intake import TurnView
from hermes_agent.store.turns import USAGE, TurnState


class Receipt(NamedTuple):
    """One message and what became of it so far."""

    turn_id: str
    session_id: str
    state: TurnState
    is_new: bool = False
    attempts: int = 0
    reply: str = ""
    """The answer, or of a turn that failed what a person reads instead."""
    reasoning: str = ""
    finish_reason: str = ""
    """Why the model stopped, as it said."""
    reason: FailureReason | None = None
    error: str = ""
    usage: Mapping[str, int] = MappingProxyType({})
    model: str = ""
    sender: str = ""
    scope: str = ""
    message_id: str = ""
    accepted_at: float = 0.0
    ended_at: float | None = None
    is_stopping: bool = False
    """It was asked to stop and has not ended yet."""

    @property
    def is_final(self) -> bool:
        return self.state.is_end

    @property
    def is_retryable(self) -> bool:
        """Whether the same message may succeed later with nobody changing anything."""
        return self.reason is not None and FAILURES[self.reason].retry


_WITHOUT_ANSWER = frozenset((TurnState.FAILED, TurnState.CANCELLED, TurnState.EXPIRED))


def receipt_of(view: TurnView) -> Receipt:
    """What a turn as it stands on disk says."""
    turn = view.turn
    return Receipt(
        turn.id, view.session_id, turn.state, attempts=turn.attempts, reply=view.reply,
        reasoning=str(view.beside.get("reasoning") or ""), finish_reason=str(view.beside.get("finish_reason") or ""),
        reason=policy.reason_of(turn.reason) if turn.reason is not None and turn.state in _WITHOUT_ANSWER else None,
        error=turn.error or "", usage=dict(zip(USAGE, turn.usage, strict=False)), model=view.model or "",
        sender=view.sender, scope=view.scope, message_id=view.message_id,
        accepted_at=turn.accepted_at, ended_at=turn.ended_at,
        is_stopping=turn.reason == FailureReason.INTERRUPTED and not turn.state.is_end,
    )  # fmt: skip
