"""The one retry policy of delivery: which failures are worth another attempt at a turn, and when.

It reads the typed reason only. An attempt goes on behind the rows that the one before it left.
"""

from __future__ import annotations

from hermes_agent.errors import FailureReason

ATTEMPTS = 2
"""Attempts at a turn, the first one included."""

_DELAYS = {
    FailureReason.RATE_LIMIT: 2.0,
    FailureReason.OVERLOADED: 1.0,
    FailureReason.SERVER_ERROR: 1.0,
    FailureReason.TIMEOUT: 1.0,
    FailureReason.CONNECTION: 1.0,
    FailureReason.EMPTY_RESPONSE: 0.0,
    FailureReason.INVALID_RESPONSE: 0.0,
}
"""Seconds before the next attempt, for the reasons that pass by themselves; every other one never does."""


def again(reason: FailureReason, attempts: int, budget: int = ATTEMPTS) -> bool:
    """Whether a turn that failed for `reason` after so many attempts is tried again."""
    return attempts < budget and reason in _DELAYS


def delay(reason: FailureReason, *, waited: bool) -> float:
    """Seconds until then; none when the model was asked again, with pauses, within the attempt."""
    return 0.0 if waited else _DELAYS[reason]


def reason_of(published: object) -> FailureReason:
    """The typed reason in a result's `failure_reason`, which may carry a detail behind a colon."""
    name = published.partition(":")[0] if isinstance(published, str) else ""
    try:
        return FailureReason(name)
    except ValueError:
        return FailureReason.UNKNOWN
