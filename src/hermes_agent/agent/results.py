"""The only builder of the result dict that a turn returns: the same keys on every exit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hermes_agent.errors import FAILURES, FailureReason


@dataclass(frozen=True, slots=True)
class Exit:
    """How a turn left its loop."""

    kind: str
    """The published `turn_exit_reason`."""
    text: str = ""
    """What the person reads: the answer, or what happened and what to do."""
    reason: FailureReason | None = None
    error: str = ""
    detail: str = ""
    """Appended to the published failure reason after a colon."""
    partial: bool = False

    @property
    def failed(self) -> bool:
        return self.reason is not None and not self.interrupted

    @property
    def interrupted(self) -> bool:
        return self.reason is FailureReason.INTERRUPTED


@dataclass(slots=True)
class Totals:
    """What the model calls of a turn used."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0
    last_prompt_tokens: int = 0


@dataclass(slots=True)
class TurnFacts:
    """What the result says beside the exit."""

    messages: list[dict[str, Any]]
    api_calls: int = 0
    reasoning: str = ""
    model: str = ""
    served_model: str = ""
    provider: str = ""
    base_url: str = ""
    session_id: str = ""
    turn_id: str = ""
    user_index: int | None = None
    pending_steer: str = ""
    totals: Totals = field(default_factory=Totals)


def build(exit_: Exit, facts: TurnFacts) -> dict[str, Any]:
    """The result dict. `completed` excludes a failure reason; a failed turn names one."""
    reason = exit_.reason
    published = None if reason is None else f"{reason}:{exit_.detail}" if exit_.detail else str(reason)
    if exit_.kind == PERSISTENCE:
        published = f"{PERSISTENCE}:{exit_.detail or 'unknown'}"
    totals = facts.totals
    prompt = totals.input_tokens
    return {
        "final_response": exit_.text,
        "last_reasoning": facts.reasoning or None,
        "messages": facts.messages,
        "api_calls": facts.api_calls,
        "completed": reason is None,
        "failed": exit_.failed,
        "partial": exit_.partial,
        "interrupted": exit_.interrupted,
        "turn_exit_reason": exit_.kind,
        "error": exit_.error or None,
        "failure_reason": published,
        "failure_retryable": None if reason is None else FAILURES[reason].retry,
        "interrupt_message": exit_.detail if exit_.interrupted else None,
        "pending_steer": facts.pending_steer or None,
        "model": facts.model,
        "requested_model": facts.model,
        "served_model": facts.served_model or None,
        "provider": facts.provider,
        "base_url": facts.base_url,
        "input_tokens": totals.input_tokens,
        "output_tokens": totals.output_tokens,
        "cache_read_tokens": totals.cache_read_tokens,
        "cache_write_tokens": totals.cache_write_tokens,
        "reasoning_tokens": totals.reasoning_tokens,
        "prompt_tokens": prompt,
        "completion_tokens": totals.output_tokens,
        "total_tokens": prompt + totals.output_tokens,
        "last_prompt_tokens": totals.last_prompt_tokens,
        "session_id": facts.session_id,
        "turn_id": facts.turn_id or None,
        "current_turn_user_idx": facts.user_index,
    }


PERSISTENCE = "session_persistence_failed"


def answered(text: str, finish_reason: str) -> Exit:
    """The model gave its answer."""
    return Exit(f"text_response(finish_reason={finish_reason})", text, partial=finish_reason == "length")


def interrupted(why: str, partial: str = "") -> Exit:
    """The person stopped the turn."""
    text = f"{partial}\n\n[{why}]" if partial else f"[{why}]"
    return Exit("interrupted_by_user", text, FailureReason.INTERRUPTED, detail=why, partial=bool(partial))


def failed(kind: str, reason: FailureReason, message: str, partial: str = "") -> Exit:
    """The turn failed; the text says what happened and what to do."""
    text = f"{message} {FAILURES[reason].advice}"
    return Exit(kind, f"{partial}\n\n{text}" if partial else text, reason, error=message, partial=bool(partial))


def not_stored(error: Exception | None) -> Exit:
    """A row could not be made durable, so nothing after it may happen."""
    reason = getattr(error, "reason", FailureReason.STORE_IO)
    message = str(error) if error is not None else "the session store did not take a row"
    text = f"The turn was stopped because its last step could not be stored: {message}. {FAILURES[reason].advice}"
    detail = str(reason).removeprefix("store_") if error is not None else "unknown"
    return Exit(PERSISTENCE, text, reason, error=message, detail=detail)
